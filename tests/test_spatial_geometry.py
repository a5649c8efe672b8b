"""The arithmetic of split samples against brute force: each part's window gives exactly its rows of the result."""

import itertools

import numpy as np
import pytest
from ranges import assert_even

from keras_hpc.spatial import geometry

EXTENTS = (2, 5, 8, 13, 30)
PARTS = (1, 2, 3, 4)


def convolve(x, kernel, stride, dilation):
    width = (len(kernel) - 1) * dilation + 1
    starts = range(0, len(x) - width + 1, stride)
    return np.array([np.dot(x[s : s + width : dilation], kernel) for s in starts])


def transpose(x, kernel, stride, dilation=1):
    width = (len(kernel) - 1) * dilation + 1
    y = np.zeros((len(x) - 1) * stride + max(width, stride))
    for j, value in enumerate(x):
        y[j * stride : j * stride + width : dilation] += value * kernel
    return y


def moved(x, parts, windows, everywhere=False):
    """What each part has after all parts have carried out their moves."""
    owned = [(0, len(x))] * parts if everywhere else geometry.bounds(len(x), parts)
    pieces = [x[begin:end] for begin, end in owned]
    moves = [geometry.move(len(x), parts, windows, part, everywhere) for part in range(parts)]
    mail = {(p, q): pieces[p][slice(*rows)] for p, move in enumerate(moves) for q, rows in move.sends}
    found = []
    for part, move in enumerate(moves):
        assert move.extent == len(pieces[part])
        blocks = [mail.pop((other, part)) for other, _ in move.receives]
        assert [len(block) for block in blocks] == [rows for _, rows in move.receives]
        inside = np.concatenate([*blocks[: move.lower], pieces[part][slice(*move.own)], *blocks[move.lower :]])
        found.append(np.pad(inside, move.pads))
        assert len(found[-1]) == move.rows == windows[part][1] - windows[part][0]
    assert not mail, "what is sent is received"
    return found


def padded(x, before, after):
    return np.pad(x, (max(before, 0), max(after, 0)))[max(-before, 0) : len(x) + max(before, 0) + max(after, 0)]


@pytest.mark.parametrize("parts", PARTS)
def test_borders_add_what_own_rows_lack(parts):
    rng = np.random.default_rng(0)
    computed = []
    for extent, kernel, stride, dilation in itertools.product(
        (*EXTENTS, 16, 17, 24, 48), (1, 2, 3, 4, 5, 6), (1, 2, 3), (1, 2, 3)
    ):
        axis = geometry.Windowed.of_layer(extent, kernel, stride, dilation, "same")
        sides = [geometry.borders(axis, parts, part) for part in range(parts)]
        if None in sides:
            continue
        computed.append((extent, kernel, stride, dilation))
        x, weights = rng.normal(size=extent), rng.normal(size=kernel)
        expected = convolve(np.pad(x, axis.sides), weights, stride, dilation)[: axis.outputs]
        owned = geometry.bounds(extent, parts)
        windows = [axis.window(*rows) for rows in geometry.bounds(axis.outputs, parts)]
        moves = [geometry.move(extent, parts, windows, part) for part in range(parts)]
        # What each part sends, cut out of its rows, and then sent by the moves of that alone.
        sent = [np.concatenate([x[slice(*owned[p])][slice(*rows)] for _, rows in m.sends] or [x[:0]])
                for p, m in enumerate(moves)]  # fmt: skip
        mail = {(p, q): sent[p][slice(*rows)] for p, m in enumerate(moves) for q, rows in m.borders.sends}
        for part, (begin, end) in enumerate(geometry.bounds(axis.outputs, parts)):
            move = moves[part].borders
            assert move.extent == len(sent[part])
            assert move.own == move.pads == (0, 0)
            received = np.concatenate([mail.pop((other, part)) for other, _ in move.receives] or [x[:0]])
            own = x[slice(*owned[part])]
            alone = geometry.Windowed.of_layer(len(own), kernel, stride, dilation, "same")
            y = convolve(np.pad(own, alone.sides), weights, stride, dilation)[: alone.outputs]
            for border in sides[part]:
                rows, received = received[: border.rows], received[border.rows :]
                first, last = border.outputs
                if border.changes:
                    assert min(border.pads) >= 0
                    added = convolve(np.pad(rows, border.pads), weights, stride, dilation)
                    assert len(added) == last - first
                    y[first:last] += added
                else:
                    assert border.rows == 0
            assert len(received) == 0
            np.testing.assert_allclose(y, expected[begin:end], atol=1e-12)
        assert not mail
    assert {(48, 3, 1, 1), (48, 5, 2, 1), (24, 3, 2, 1), (48, 3, 1, 2), (48, 6, 2, 1)} <= {*computed}


@pytest.mark.parametrize("padding", ["same", "valid", "causal"])
@pytest.mark.parametrize("parts", PARTS)
def test_windows_of_convolutions(padding, parts):
    rng = np.random.default_rng(0)
    for extent, kernel, stride, dilation in itertools.product(EXTENTS, (1, 2, 3, 5, 6), (1, 2, 3), (1, 2, 3)):
        axis = geometry.Windowed.of_layer(extent, kernel, stride, dilation, padding)
        if axis.outputs < parts:
            continue
        x, weights = rng.normal(size=extent), rng.normal(size=kernel)
        after = (axis.outputs - 1) * stride - axis.before + axis.width - extent
        expected = convolve(padded(x, axis.before, after), weights, stride, dilation)[: axis.outputs]
        assert len(expected) == axis.outputs
        rows = geometry.bounds(axis.outputs, parts)
        windows = [axis.window(*part) for part in rows]
        for everywhere in (False, True):
            pieces = moved(x, parts, windows, everywhere)
            found = [convolve(piece, weights, stride, dilation) for piece in pieces]
            assert [len(part) for part in found] == [end - begin for begin, end in rows]
            np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-12)
        if dilation == 1:
            ones = convolve(padded(np.ones(extent), axis.before, after), np.ones(kernel), stride, 1)
            assert axis.counts(0, axis.outputs) == list(ones[: axis.outputs])


@pytest.mark.parametrize("parts", PARTS)
def test_windows_of_transposed_convolutions(parts):
    rng = np.random.default_rng(0)
    for extent, kernel, stride, dilation in itertools.product(EXTENTS, (1, 2, 3, 4), (1, 2, 3, 5), (1, 2)):
        width = (kernel - 1) * dilation + 1
        for cut in range(width):
            for outputs in {extent * stride, (extent - 1) * stride + max(width, stride) - cut}:
                if outputs < parts:
                    continue
                axis = geometry.Transposed(extent, outputs, width, stride, cut)
                x, weights = rng.normal(size=extent), rng.normal(size=kernel)
                full = np.pad(transpose(x, weights, stride, dilation), (0, outputs + cut))
                rows = geometry.bounds(outputs, parts)
                pieces = moved(x, parts, [axis.window(*part) for part in rows])
                found = [
                    transpose(piece, weights, stride, dilation)[slice(*axis.crop(*part))]
                    for piece, part in zip(pieces, rows, strict=True)
                ]
                assert [len(part) for part in found] == [end - begin for begin, end in rows]
                np.testing.assert_allclose(np.concatenate(found), full[cut : cut + outputs], atol=1e-12)


@pytest.mark.parametrize("reach", [0, 1])
@pytest.mark.parametrize("parts", PARTS)
def test_windows_of_upsampling(parts, reach):
    def upsampled(x, factor):
        if not reach:
            return np.repeat(x, factor)
        centres = (np.arange(len(x) * factor) + 0.5) / factor - 0.5
        return np.interp(centres, np.arange(len(x)), x)  # repeats at the edges

    rng = np.random.default_rng(0)
    for extent, factor in itertools.product(EXTENTS, (1, 2, 3, 4)):
        axis = geometry.Upsampled(extent, factor, reach)
        if axis.outputs < parts:
            continue
        x = rng.normal(size=extent)
        rows = geometry.bounds(axis.outputs, parts)
        pieces = moved(x, parts, [axis.window(*part) for part in rows])
        found = [upsampled(piece, factor)[slice(*axis.crop(*part))] for piece, part in zip(pieces, rows, strict=True)]
        np.testing.assert_allclose(np.concatenate(found), upsampled(x, factor), atol=1e-12)


@pytest.mark.parametrize("parts", PARTS)
def test_padding_and_cropping_are_shifted_windows(parts):
    for extent, before, after in itertools.product(EXTENTS, (-2, 0, 1, 7), (-1, 0, 2, 8)):
        outputs = extent + before + after
        if outputs < parts or -before >= extent or -after >= extent:
            continue
        axis = geometry.Windowed(extent, outputs, before=before)
        x = np.arange(1.0, extent + 1)
        windows = [axis.window(*part) for part in geometry.bounds(outputs, parts)]
        expected = padded(x, before, after)[:outputs]
        np.testing.assert_array_equal(np.concatenate(moved(x, parts, windows)), expected)


@pytest.mark.parametrize("parts", PARTS)
def test_the_moves_read_backward_are_their_adjoint(parts):
    """<move(x), g> = <x, adjoint(g)>, and what is gathered is all of it: windows at random."""
    rng = np.random.default_rng(parts)
    for _ in range(200):
        extent = int(rng.integers(parts, 20))
        windows = [tuple(sorted(rng.integers(-4, extent + 5, 2))) for _ in range(parts)]
        x = rng.normal(size=extent)
        pieces = moved(x, parts, windows)
        upstream = [rng.normal(size=len(piece)) for piece in pieces]
        gradients = [np.zeros(end - begin) for begin, end in geometry.bounds(extent, parts)]
        moves = [geometry.move(extent, parts, windows, part) for part in range(parts)]
        for move, gradient, values in zip(moves, gradients, upstream, strict=True):
            at = move.pads[0]
            for number, (other, rows) in enumerate(move.receives):
                at += (move.own[1] - move.own[0]) if number == move.lower else 0
                (target,) = [mine for receiver, mine in moves[other].sends if receiver == moves.index(move)] or [None]
                gradients[other][slice(*target)] += values[at : at + rows]
                at += rows
            lower = sum(rows for _, rows in move.receives[: move.lower])
            begin = move.pads[0] + lower
            gradient[slice(*move.own)] += values[begin : begin + move.own[1] - move.own[0]]
        expected = sum(np.dot(a, b) for a, b in zip(pieces, upstream, strict=True))
        np.testing.assert_allclose(np.dot(x, np.concatenate(gradients)), expected, atol=1e-10)


def test_parts_cover_an_axis_once():
    for extent, parts in itertools.product(range(1, 40), range(1, 8)):
        assert_even(geometry.bounds(extent, parts), extent)


def test_places_of_ranks():
    grid = geometry.Grid((2, 3, 2))
    assert grid.size == 12
    places = [grid.place(rank) for rank in range(12)]
    assert places == list(itertools.product(range(2), range(3), range(2)))
    assert [grid.rank(place) for place in places] == list(range(12))
    assert grid.line(7, 0) == [1, 7]
    assert grid.line(7, 1) == [7, 9, 11]
    assert grid.line(7, 2) == [6, 7]


@pytest.mark.parametrize(
    ("before", "after", "parts", "kept"),
    [
        ((8, 5, 6), (8, 5, 2, 3), 3, {1, 2}),  # channels in groups
        ((8, 5, 2, 3), (8, 5, 6), 3, {1, 2}),
        ((8, 5, 6), (8, 30), 3, {1}),
        ((8, 2, 5), (16, 5), 4, {1}),  # rows are merged, two by two, and divided
        ((16, 5), (8, 2, 5), 4, {1}),
        ((7, 2, 5), (14, 5), 2, set()),  # of which 7 are cut elsewhere than 14
        ((8, 5), (5, 8), 2, set()),
        ((8, 5, 1), (8, 5), 2, {1, 2}),
        ((1, 8, 5), (8, 5), 2, set()),  # the second axis has become the first one
        ((8, 5), (1, 8, 5), 2, set()),
        ((8, 5), (40,), 2, {1}),
        ((8, 0, 5), (8, 0, 7), 2, {1}),
    ],
)
def test_each_part_of_what_is_reshaped_is_a_part_of_the_result(before, after, parts, kept):
    found = geometry.reshaped((None, *before), (None, *after), [parts] * len(before))
    assert found - {0} == kept
    x = np.arange(2 * np.prod(before)).reshape(2, *before)
    y = x.reshape(2, *after)
    for axis in found - {0}:
        cuts = [geometry.bounds(shape[axis - 1], parts) for shape in (before, after)]
        for rows, expected in zip(*cuts, strict=True):
            shape = [2, *after]
            shape[axis] = expected[1] - expected[0]
            part = x[(slice(None),) * axis + (slice(*rows),)].reshape(shape)
            np.testing.assert_array_equal(part, y[(slice(None),) * axis + (slice(*expected),)])


@pytest.mark.parametrize("samples", [(4, 8), (None, None)])
def test_samples_are_no_positions(samples):
    assert geometry.reshaped((samples[0], 6), (samples[1], 3), [1]) == set()
    assert geometry.reshaped((samples[0], 2, 2, 5), (samples[1], 2, 5), [2]) == set()  # of as many columns as rows
