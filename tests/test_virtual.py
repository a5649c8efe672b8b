"""Sums over the parts of virtual ranks: the same bits on any number of ranks and nodes. Ranks are threads here."""

import numpy as np
import pytest
from in_process import run

from keras_hpc import _native
from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.team import Team
from keras_hpc.job.virtual import CHUNK, TreeSum, Virtual, allreduce, whole_branches

LENGTH = 1003
# 1 to 8 ranks, on a node and on several.
PLACES = (
    [0],
    [0, 0],
    [0, 1],
    [0, 0, 0],
    [0, 0, 1],
    [0] * 4,
    [0, 0, 1, 1],
    [0] * 5,
    [0, 1, 0, 1, 2, 2],
    [0] * 7,
    [0] * 8,
)


def part(number, length):
    """Values of very different sizes, whose sum depends on its order."""
    random = np.random.default_rng(number)
    return (random.standard_normal(length) * 10.0 ** random.integers(-6, 6, length)).astype("float32")


def in_tree_order(first, end, length, part=part):
    """The same sum, written down as the tree is defined."""
    if end - first == 1:
        return part(first, length)
    middle = first + max(2**k for k in range(8) if 2**k < end - first)
    return in_tree_order(first, middle, length, part) + in_tree_order(middle, end, length, part)


@pytest.mark.parametrize("length", [LENGTH, 3, 0])
@pytest.mark.parametrize("parts", [8, 11])
def test_any_number_of_ranks_gets_the_bits_of_the_tree(parts, length):
    expected = in_tree_order(0, parts, length)

    def work(native, rank):
        virtual = Virtual(parts, rank, len(places))
        fold = TreeSum(parts)
        for number in virtual.mine:
            leaf = fold.begin(number, length, "float32")
            leaf.write(0, part(number, length), 1.0)
            fold.end(number, leaf)
        return allreduce(virtual, Team(0, native, range(len(places))), fold.sums)

    for places in PLACES:
        for rank, got in enumerate(run(places, work)):
            assert got.tobytes() == expected.tobytes(), f"{places}, rank {rank}"


WEIGHTS = [0.3, 0.7, 0.0, 1.1, 0.2, 0.5, 0.9, 0.4, 0.6]


def weighted(number, length):
    """One with a weight of 0 is zeros, whatever it holds."""
    weight = np.float32(WEIGHTS[number])
    return part(number, length) * weight if weight else np.zeros(length, "float32")


@pytest.mark.parametrize("in_segment", [False, True])
@pytest.mark.parametrize(
    "places", [*([0] * n for n in (2, 3, 4, 7)), [0, 1], [0, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 4]], ids=str
)
def test_a_plan_adds_up_in_the_order_of_the_tree(places, in_segment):
    """Of one part a rank: a few numbers, which every rank adds up for itself, and many, which owners do."""
    lengths = [5, 100_003]

    def work(native, rank):
        team = Team(0, native, range(len(places)))
        specs = [TensorSpec(str(length), (length,), "float32") for length in lengths]
        plan = team.plan("tree", specs, op="sum", in_segment=in_segment, in_tree=True)
        results = []
        for _ in range(2):
            arrays = [part(rank, n) if WEIGHTS[rank] else np.full(n, np.nan, "float32") for n in lengths]
            for tensor, array in enumerate(arrays):
                plan.start(tensor, array, WEIGHTS[rank])
            plan.wait_all()
            results += [plan.array(tensor).copy() for tensor in range(2)] if in_segment else arrays
        return results

    expected = [in_tree_order(0, len(places), length, weighted) for length in lengths] * 2
    for rank, found in enumerate(run(places, work)):
        for got, wanted in zip(found, expected, strict=True):
            assert got.tobytes() == wanted.tobytes(), f"rank {rank}"


@pytest.mark.parametrize("places", [[0, 1, 0, 1], [0, 1, 1], [0, 0, 0, 1, 1, 1]], ids=str)
def test_a_plan_cannot_where_nodes_have_no_branches(places):
    def work(native, rank):
        team = Team(0, native, range(len(places)))
        assert not team.adds_in_tree
        with pytest.raises(_native.Error, match="branches of the tree"):
            team.plan("tree", [TensorSpec("x", (3,), "float32")], op="sum", in_tree=True)

    run(places, work)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_part_is_written_onto_the_one_before_with_the_same_bits(dtype):
    first, second = (np.clip(part(number, CHUNK + 7), -999, 999).astype(dtype) for number in range(2))
    first[:3] = second[:3] = -0.0
    fold = TreeSum(2)
    for number, (values, weight) in enumerate([(first, 0.3), (second, 0.7)]):
        leaf = fold.begin(number, len(values) + 2, "float32")
        leaf.write(2, values, weight)
        leaf.clear(0, 2)
        fold.end(number, leaf)
    ((_, _, found),) = fold.sums
    products = [np.float32(w) * v.astype("float32") for w, v in ((0.3, first), (0.7, second))]
    assert found.tobytes() == np.concatenate([np.zeros(2, "float32"), products[0] + products[1]]).tobytes()


def test_zeros_are_added_as_if_they_were_an_array():
    fold = TreeSum(2)
    leaf = fold.begin(0, 1, "float32")
    leaf.write(0, np.array([-0.0], "float32"), 1.0)
    fold.end(0, leaf)
    leaf = fold.begin(1, 1, "float32")
    leaf.clear(0, 1)
    fold.end(1, leaf)
    assert fold.sums[0][2].tobytes() == np.zeros(1, "float32").tobytes()


def test_the_order_matters_here():
    """Or the test before could not fail."""
    plain = np.sum([part(number, LENGTH) for number in range(8)], axis=0, dtype="float32")
    assert plain.tobytes() != in_tree_order(0, 8, LENGTH).tobytes()


def test_ranks_with_whole_branches_send_one_sum():
    for size in (1, 2, 4, 8):
        assert all(len(whole_branches(8, Virtual(8, rank, size).mine)) == 1 for rank in range(size))
    assert [whole_branches(8, Virtual(8, rank, 3).mine) for rank in range(3)] == [
        [(0, 2), (2, 3)],
        [(3, 4), (4, 6)],
        [(6, 8)],
    ]
