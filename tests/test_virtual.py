"""Sums over the parts of virtual ranks: the same bits on any number of ranks and nodes. Ranks are threads here."""

import numpy as np
import pytest
from in_process import run

from keras_hpc.job.team import Team
from keras_hpc.job.virtual import TreeSum, Virtual, allreduce, whole_branches

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


def in_tree_order(first, end, length):
    """The same sum, written down as the tree is defined."""
    if end - first == 1:
        return part(first, length)
    middle = first + max(2**k for k in range(8) if 2**k < end - first)
    return in_tree_order(first, middle, length) + in_tree_order(middle, end, length)


@pytest.mark.parametrize("length", [LENGTH, 3, 0])
@pytest.mark.parametrize("parts", [8, 11])
def test_any_number_of_ranks_gets_the_bits_of_the_tree(parts, length):
    expected = in_tree_order(0, parts, length)

    def work(native, rank):
        virtual = Virtual(parts, rank, len(places))
        fold = TreeSum(parts)
        for number in virtual.mine:
            mine = fold.empty(length, "float32")
            mine[:] = part(number, length)
            fold.add(number, number + 1, mine)
        return allreduce(virtual, Team(0, native, range(len(places))), fold.sums)

    for places in PLACES:
        for rank, got in enumerate(run(places, work)):
            assert got.tobytes() == expected.tobytes(), f"{places}, rank {rank}"


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
