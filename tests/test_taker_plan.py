"""Plans of which each rank needs a part: it gets the bits that it gets where all ranks need all."""

import numpy as np
import pytest
from in_process import ALGORITHMS, DTYPES, NODES, as_bytes, data_of, few_nodes, run

from keras_hpc import _native

KINDS = ["float32"] * 6 + ["float64", "float16", "bfloat16", "float32"]
# The third has no element, and all ranks need all of the last.
COUNTS = [64, 7, 0, 300_000, 1_300_001, 5, 40_003, 33, 3000, 9]


def shares_of(tensor, size):
    """Who needs which elements: one rank all, or each a range, cut at multiples of 64 bytes."""
    count = COUNTS[tensor]
    if tensor == len(COUNTS) - 1:
        return []
    if tensor % 3 != 1:
        return [(count, tensor * 5 % size)]
    ends = [count * r // size // 32 * 32 for r in range(1, size)] + [count]
    return [(end, (r + tensor) % size) for r, end in enumerate(ends)]


def mine_of(tensor, size, rank):
    """This rank's elements."""
    mine = np.zeros(COUNTS[tensor], bool)
    begin = 0
    for end, taker in shares_of(tensor, size) or [(COUNTS[tensor], rank)]:
        mine[begin:end] = taker == rank
        begin = end
    return mine


def steps_of(team, rank, size, weighted, in_segment, wire, takers):
    specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(COUNTS, KINDS, strict=True))]
    given = [shares_of(i, size) for i in range(len(COUNTS))] if takers else []
    plan = team.plan("test", specs, "mean", weighted, wire_dtype=wire, in_segment=in_segment, takers=given)
    found = []
    for step in range(3):
        arrays = data_of(rank, COUNTS, KINDS, step)
        for i, array in enumerate(arrays):
            plan.start(i, as_bytes(array), (rank + step) % 3 if weighted else 1.0)
        plan.wait_all()
        if in_segment:
            arrays = [plan.memory(i).view(DTYPES[d]).copy() for i, d in enumerate(KINDS)]
        found.append(arrays)
    return found


@pytest.mark.parametrize("options", ["plain", "weighted", "in segment", "weighted, in segment", "wire"])
@pytest.mark.parametrize("name", few_nodes())
def test_takers_get_the_bits_of_all(name, options):
    nodes = NODES[name]
    size = len(nodes)
    how = ("weighted" in options, "in segment" in options, "bfloat16" if options == "wire" else "")

    def work(team, rank):
        return [steps_of(team, rank, size, *how, takers) for takers in (False, True)]

    for rank, (whole, parts) in enumerate(run(nodes, work)):
        for all_of_step, part_of_step in zip(whole, parts, strict=True):
            for tensor, (a, b) in enumerate(zip(all_of_step, part_of_step, strict=True)):
                mine = mine_of(tensor, size, rank)
                assert a[mine].tobytes() == b[mine].tobytes(), (tensor, rank)


def test_ranks_that_disagree_on_who_needs_what_are_told():
    def work(team, rank):
        with pytest.raises(Exception, match=r"to rank 0 up to 3.*to rank 1 up to 3"):
            team.plan("test", [("t", "float32", 3)], "mean", False, takers=[[(3, rank)]])

    run([0, 0], work)


@pytest.mark.parametrize(
    "shares", [[[(64, 0)], [(64, 1)]], [[(64, 2)]], [[(63, 0)]], [[(10, 0), (64, 1)]], [[(32, 0), (16, 1), (64, 0)]]]
)
def test_who_needs_what_is_checked(shares):
    def work(team, rank):
        with pytest.raises(Exception, match="Expected for each tensor of 'test'"):
            team.plan("test", [("t", "float32", 64)], "mean", False, takers=shares)

    run([0, 0], work)


def test_each_is_copied_once_on_a_node():
    """What a rank alone needs is added up by it, into its own tensor; the others keep theirs."""

    def work(team, rank):
        count = 1 << 20
        array = np.full(count, rank + 1, np.float32)
        plan = team.plan("test", [("t", "float32", count)], "mean", False, takers=[[(count // 2, 0), (count, 1)]])
        plan.start(0, as_bytes(array), 1.0)
        plan.wait_all()
        return array

    for rank, array in enumerate(run([0, 0], work)):
        mine = array.reshape(2, -1)[rank]
        other = array.reshape(2, -1)[1 - rank]
        assert (mine == 1.5).all()
        assert (other == rank + 1).all()


COUNT = 5040  # all parts of all algorithms are of equal size


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_less_travels_between_nodes(algorithm, ranks):
    whole = sum(_native.elements_sent(algorithm, ranks, COUNT, "all", []))
    extents = [(COUNT * r // ranks, COUNT * (r + 1) // ranks, (r * 7 + 1) % ranks) for r in range(ranks)]
    assert whole == sum(_native.elements_sent(algorithm, ranks, COUNT, "takers", [(0, COUNT, -1)]))
    one_way = (ranks - 1) * COUNT  # each element to its taker from all others, or from its giver to all
    for given in (extents, [(0, COUNT, ranks - 1)]):
        to, back = (sum(_native.elements_sent(algorithm, ranks, COUNT, flow, given)) for flow in ("takers", "givers"))
        assert back == one_way
        assert one_way <= to <= whole
        assert given is extents or to <= 1.75 * one_way


@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "recursive_doubling"), (3, "pairwise"), (4, "pairwise")])
def test_what_nodes_send_beside_an_allreduce(ranks, algorithm):
    """Two send as much: Allreduce::begin. More send 1 / 2 n more, as a sum may be taken elsewhere than it is needed."""
    given = [(0, COUNT, ranks // 2)]
    ways = [(algorithm, "takers"), (algorithm, "givers"), ("pairwise", "all")]
    to, back, whole = (sum(_native.elements_sent(how, ranks, COUNT, flow, given)) for how, flow in ways)
    assert (to + back) / whole == pytest.approx(1 + (ranks > 2) / (2 * ranks))
