"""The engine's exchanges with ranks as threads: windows and their adjoints against NumPy, ranks late, errors."""

import ctypes
import threading
import time

import numpy as np
import pytest
from device_steps import engine
from in_process import DTYPES, EPSILON, NODES, as_bytes, run

from keras_hpc import _native
from keras_hpc.spatial import geometry


def make(team, rank, windows, extent, name="conv", fill=0.0, cells=1, sides=(0, 0)):
    """The exchange that gives each rank its window, and pads each row of it, of `cells`."""
    move = geometry.move(extent, len(windows), windows, rank)
    sends = [(other, *rows) for other, rows in move.sends]
    terms = f"{extent} rows, windows {windows}"
    args = (move.extent, move.own, move.pads, fill, sends, list(move.receives), move.lower, cells, sides)
    return _native.make_exchange(team, name, terms, *args), move


def exchange(made, x, adjoint=False, padded=None):
    """The window of x, (outer, rows, inner), or what the owners get of gradients of it. Its rows are of `padded`."""
    one, move = made
    outer, _, inner = x.shape
    shape = (outer, move.extent if adjoint else move.rows, inner if padded is None else padded)
    inner = min(inner, shape[-1])
    out = np.full(shape, 77, x.dtype)
    one.run(as_bytes(x), as_bytes(out), outer, inner, x.dtype.name, adjoint)
    return out


def window_of(whole, window, fill=0.0):
    begin, end = window
    extent = whole.shape[1]
    pads = [(0, 0), (max(0, -begin), max(0, end - extent)), (0, 0)]
    padded = np.pad(whole.astype(np.float64), pads, constant_values=fill)
    return padded[:, begin + pads[1][0] : end + pads[1][0]]


def adjoint_of(windows, gradients, extent):
    total = np.zeros((gradients[0].shape[0], extent, gradients[0].shape[2]))
    for (begin, end), gradient in zip(windows, gradients, strict=True):
        low, high = max(begin, 0), min(end, extent)
        if low < high:
            total[:, low:high] += gradient[:, low - begin : high - begin].astype(np.float64)
    return total


def late(rng, rank):
    if rng.random() < 0.3:
        time.sleep(rng.random() * 0.01)


def random_windows(rng, ranks, extent):
    """Halos, gathers, shifts, and windows at random."""
    rows = geometry.bounds(extent, ranks)
    kind = rng.integers(4)
    if kind == 0:
        above, below = rng.integers(-1, 4, 2)
        return [(begin - above, max(end + below, begin - above)) for begin, end in rows]
    if kind == 1:
        return [(0, extent)] * ranks
    if kind == 2:
        shift = int(rng.integers(-5, 6))
        return [(begin + shift, end + shift) for begin, end in rows]
    return [tuple(sorted(map(int, rng.integers(-3, extent + 4, 2)))) for _ in rows]


def test_only_neighbours_have_memory_for_each_other():
    """However many ranks a node has; and what is there serves later exchanges, too."""
    ranks, extent = 8, 16
    rows = geometry.bounds(extent, ranks)

    def work(team, rank):
        before = team.report()["segment_bytes"]
        taken = []
        for name, reach in (("conv1", 1), ("conv2", 2), ("all", extent)):
            windows = [(max(begin - reach, 0), min(end + reach, extent)) for begin, end in rows]
            made = make(team, rank, windows, extent, name)
            whole = np.arange(extent, dtype=np.float32).reshape(1, extent, 1)
            begin, end = rows[rank]
            found = exchange(made, np.ascontiguousarray(whole[:, begin:end]))
            np.testing.assert_array_equal(found, window_of(whole, windows[rank]))
            taken.append(team.report()["segment_bytes"] - before)
        return taken

    for first, second, third in run([0] * ranks, work):
        assert 2 * 256 << 10 < first < 3 * 256 << 10
        assert second == first
        assert 8 * 256 << 10 < third < 9 * 256 << 10  # an end had one, and lacks six


@pytest.mark.parametrize(
    "nodes", ["1 rank", "2 on 1", "3 on 1", "5 on 1", "2 x 1", "2 x 2 interleaved", "2 + 1", "3 + 2 + 2 scattered"]
)
def test_windows_and_adjoints(nodes):
    ranks = len(NODES[nodes])

    def work(team, rank):
        mine, all_ranks = np.random.default_rng(100 + rank), np.random.default_rng(7)
        for number in range(12):
            extent = int(all_ranks.integers(ranks, 4 * ranks + 9))
            windows = random_windows(all_ranks, ranks, extent)
            dtype = list(DTYPES)[all_ranks.integers(4)]
            fill = -np.inf if all_ranks.random() < 0.3 else 0.0
            cells = int(all_ranks.integers(1, 4))
            sides = tuple(map(int, all_ranks.integers(0, 3, 2))) if number % 2 else (0, 0)
            made = make(team, rank, windows, extent, f"layer{number}", fill, cells, sides)
            begin, end = geometry.bounds(extent, ranks)[rank]
            for _ in range(3):
                outer, inner = map(int, all_ranks.integers(0, 5, 2))
                cell = inner * 31
                inner, padded = cells * cell, (cells + sum(sides)) * cell
                whole = all_ranks.integers(-40, 40, (outer, extent, inner)).astype(DTYPES[dtype])
                sizes = [high - low for low, high in windows]
                gradients = [all_ranks.normal(size=(outer, size, padded)).astype(DTYPES[dtype]) for size in sizes]
                late(mine, rank)
                found = exchange(made, np.ascontiguousarray(whole[:, begin:end]), padded=padded)
                want = window_of(whole, windows[rank], fill)
                want = np.pad(want, [(0, 0), (0, 0), [n * cell for n in sides]], constant_values=fill)
                np.testing.assert_array_equal(found.astype(np.float64), want)
                late(mine, rank)
                back = exchange(made, gradients[rank], adjoint=True, padded=inner)
                inside = slice(sides[0] * cell, padded - sides[1] * cell)
                want = adjoint_of(windows, [g[..., inside] for g in gradients], extent)[:, begin:end]
                np.testing.assert_allclose(back.astype(np.float64), want, rtol=0, atol=20 * EPSILON[dtype])

    run(NODES[nodes], work, timeout=30.0)


@pytest.mark.parametrize("nodes", ["3 on 1", "2 + 1"])
def test_messages_larger_than_a_mailbox_and_the_same_bits_each_time(nodes):
    extent, ranks = 101, 3
    windows = [(0, extent)] * ranks

    def work(team, rank):
        made = make(team, rank, windows, extent)
        begin, end = geometry.bounds(extent, ranks)[rank]
        whole = np.random.default_rng(0).normal(size=(2, extent, 3001)).astype(np.float32)
        gradient = np.random.default_rng(rank).normal(size=whole.shape).astype(np.float32)
        np.testing.assert_array_equal(exchange(made, np.ascontiguousarray(whole[:, begin:end])), whole)
        back = [exchange(made, gradient, adjoint=True) for _ in range(3)]
        assert back[0].tobytes() == back[1].tobytes() == back[2].tobytes()
        return back[0]

    found = np.concatenate(run(NODES[nodes], work), axis=1)
    gradients = [np.random.default_rng(r).normal(size=(2, extent, 3001)).astype(np.float32) for r in range(ranks)]
    np.testing.assert_allclose(found, np.sum(gradients, axis=0, dtype=np.float64), atol=1e-5)


def test_several_are_under_way_and_are_waited_for_in_order():
    extent, windows = 40, [(-2, 22), (18, 42)]

    def work(team, rank):
        several = [make(team, rank, windows, extent, f"conv{n}") for n in range(4)]
        whole = np.random.default_rng(0).normal(size=(4, 1, extent, 5000)).astype(np.float32)
        begin, end = geometry.bounds(extent, 2)[rank]
        parts = [np.ascontiguousarray(x[:, begin:end]) for x in whole]
        for (one, _), x in zip(several, parts, strict=True):
            one.start(as_bytes(x), 1, 5000, "float32")
            time.sleep(0.01 * rank)
        for (one, move), x in zip(several, whole, strict=True):
            out = np.empty((1, move.rows, 5000), np.float32)
            one.wait(as_bytes(out))
            np.testing.assert_array_equal(out, window_of(x, windows[rank]).astype(np.float32))
        several[0][0].start(as_bytes(parts[0]), 1, 5000, "float32")
        with pytest.raises(_native.Error, match="a wait for exchange conv1 forward where exchange conv0 forward is"):
            several[1][0].wait(as_bytes(out))

    run(NODES["2 on 1"], work)


HALF = [(-1, 6), (4, 11)]


@pytest.mark.parametrize("nodes", ["2 on 1", "2 x 1"])
def test_ranks_in_different_exchanges_are_told(nodes):
    def work(team, rank):
        first, second = (make(team, rank, HALF, 10, name) for name in ("stem", "head"))
        x = np.ones((1, 5, 3), np.float32)
        with pytest.raises(_native.Error) as error:
            exchange(second if rank else first, x)
        return str(error.value)

    text = "\n".join(run(NODES[nodes], work, timeout=5.0))
    assert "Ranks disagree on what to exchange" in text
    assert "'exchange stem forward'" in text
    assert "'exchange head forward'" in text


@pytest.mark.parametrize("shapes", [[(3, 5, 3), (2, 5, 3)], [(2, 5, 3), (2, 5, 4)]], ids=["samples", "channels"])
@pytest.mark.parametrize("nodes", ["2 on 1", "2 x 1"])
def test_batches_of_different_sizes_are_an_error_and_no_result(nodes, shapes):
    """Also to the rank that gets less than it has memory for."""

    def work(team, rank):
        made = make(team, rank, HALF, 10)
        with pytest.raises(_native.Error) as error:
            exchange(made, np.ones(shapes[rank], np.float32))
        return str(error.value)

    texts = run(NODES[nodes], work, timeout=5.0)
    found = ["Do all ranks of a group get as many samples?" in text for text in texts]
    assert all(found) if nodes == "2 x 1" else any(found), texts


@pytest.mark.parametrize("nodes", ["2 on 1", "2 x 1"])
def test_no_samples_need_no_memory(nodes):
    """Frameworks may give a null pointer for an empty tensor."""

    def work(team, rank):
        (made, _), size = make(team, rank, HALF, 10), ctypes.c_int64
        assert engine.khpc_exchange_start(made.id, 0, None, size(0), size(3), b"float32") == 0
        assert engine.khpc_exchange_wait(made.id, 0, None) == 0
        made.start(as_bytes(np.ones((1, 5, 3), np.float32)), 1, 3, "float32")
        assert engine.khpc_exchange_wait(made.id, 0, None) == 1  # there are rows

    run(NODES[nodes], work, timeout=5.0)


def test_an_exchange_can_be_asked_for_its_rows_while_another_thread_waits():
    """Who asks holds Python's lock, which ranks may need before they send."""
    waits, asked = threading.Event(), []

    def work(team, rank):
        made = one, move = make(team, rank, HALF, 10)
        if rank == 1:
            waits.wait(20)
            time.sleep(0.1)
            asked.append(other[0].window)
        else:
            other.append(one)
            waits.set()
        return exchange(made, np.ones((1, 5, 3), np.float32)).shape[1] == move.rows

    other = []
    assert run([0, 0], work, timeout=3.0) == [True, True]
    assert asked == [7]


def test_who_waits_for_rows_does_not_keep_its_thread_from_work():
    """The thread that reduces a plan is woken, and not the one that waits for something else."""

    def work(team, rank):
        plan = team.plan("gradients", [("kernel", "float32", 100_000)], "sum", False)
        made, x, seconds = make(team, rank, HALF, 10), np.ones(100_000, np.float32), []
        for _ in range(2):
            team.barrier()
            if rank == 1:
                time.sleep(0.2)  # rank 0 and its thread sleep
            begin = time.monotonic()
            plan.start(0, as_bytes(x))
            if rank == 1:
                plan.wait(0)
                seconds.append(time.monotonic() - begin)
            exchange(made, np.ones((1, 5, 3), np.float32))
            if rank == 0:
                plan.wait(0)
        return seconds

    assert min(run([0, 0], work)[1]) < 0.4  # it would look after 0.8 seconds by itself


def test_ranks_agree_on_an_exchange_when_it_is_made():
    def work(team, rank):
        with pytest.raises(_native.PlanMismatchError, match=r"'conv' differ between ranks.*10 rows.*11 rows"):
            make(team, rank, HALF, 10 + rank)
        with pytest.raises(_native.Error, match="rows that this rank has"):
            _native.make_exchange(team, "x", "", 5, (0, 6), (0, 0), 0.0, [], [], 0)
        with pytest.raises(_native.Error, match="other ranks of the team"):
            _native.make_exchange(team, "x", "", 5, (0, 5), (0, 0), 0.0, [(rank, 0, 1)], [], 0)
        made = make(team, rank, HALF, 10)
        with pytest.raises(ValueError, match="other bytes than outer x rows x inner"):
            exchange(made, np.ones((1, 4, 3), np.float32))
        return exchange(made, np.full((1, 5, 3), rank, np.float32))[0, :, 0]

    found = run(NODES["2 on 1"], work)
    assert found[0].tolist() == [0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("nodes", ["2 on 1", "2 x 1"])
def test_a_rank_that_does_not_come_is_named_with_the_layer(nodes):
    there = threading.Barrier(2)

    def work(team, rank):
        made = make(team, rank, HALF, 10, "conv3")
        if rank == 1:
            there.wait(30)
            return None
        with pytest.raises(_native.TimeoutError) as error:
            exchange(made, np.ones((1, 5, 3), np.float32))
        there.wait(30)
        with pytest.raises(_native.TimeoutError):  # it stays
            exchange(made, np.ones((1, 5, 3), np.float32))
        return str(error.value)

    text = run(NODES[nodes], work, timeout=1.0)[0]
    assert "in exchange conv3 forward (team 0, rank 0), from rank 1." in text


def test_the_watchdog_sees_a_long_wait():
    transports = _native.in_process_transports([0, 0])
    seen, together, teams = threading.Event(), threading.Barrier(2), {}

    def work(rank):
        teams[rank] = team = _native.Team(transports[rank], 0, 1, 20.0, 0.1)
        made = make(team, rank, HALF, 10, "conv3")
        if rank == 1:
            assert seen.wait(20)
        exchange(made, np.ones((1, 5, 3), np.float32))
        together.wait()
        assert team.progress()["exchange"] == (1, [])
        team.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    stalls = []
    while not stalls and threads[0].is_alive():
        stalls = teams[0].stalls() if 0 in teams else []
        time.sleep(0.01)
    seen.set()
    for thread in threads:
        thread.join(30)
    what, number, detail, tensor, _, missing = stalls[0]
    assert (what, number, detail, tensor, missing) == ("exchange", 1, "conv3 forward", -1, [1])


@pytest.mark.parametrize("nodes", ["2 on 1", "3 on 1"])
def test_a_rank_that_closes_its_team_ends_the_waits_of_others(nodes):
    ranks = len(NODES[nodes])
    extent = 5 * ranks
    windows = [(begin - 1, end + 1) for begin, end in geometry.bounds(extent, ranks)]
    begin = time.monotonic()

    def work(team, rank):
        made = make(team, rank, windows, extent)
        x = np.ones((1, 5, 3), np.float32)
        exchange(made, x)
        if rank == 0:
            team.close()
            return
        with pytest.raises(_native.Error, match="rank 0"):
            [exchange(made, x) for _ in range(3)]

    run(NODES[nodes], work, timeout=30.0)
    assert time.monotonic() - begin < 10


def test_what_was_given_is_not_touched_after_an_error():
    """A start whose rows found no room: once the caller knows of the error, its memory is its own."""
    extent, windows = 2000, [(0, 2000), (0, 2000)]
    together = threading.Barrier(2)

    def work(team, rank):
        made, move = make(team, rank, windows, extent)
        x = np.full((1, move.extent, 300), rank + 1, np.float32)  # more than a mailbox
        made.start(as_bytes(x), 1, 300, "float32")
        together.wait()
        if rank == 0:
            team.close()
            x[:] = 99  # the caller has ended it, so it is its own again
            together.wait()
            return None
        together.wait()
        out = np.zeros((1, move.rows, 300), np.float32)
        with pytest.raises(_native.Error):
            made.wait(as_bytes(out))
        return out

    out = run(NODES["2 on 1"], work)[1]
    assert 99 not in out
