"""Algorithms between nodes, with ranks as threads: each against NumPy in float64, on any number of nodes."""

import ml_dtypes
import numpy as np
import pytest
from in_process import ALGORITHMS, DTYPES, EVERY_SIZE, NODES, as_bytes, check, data_of, reduce_plan, run, soak

from keras_hpc import _native


def use(team, algorithm):
    team.add_choice("network", 0, EVERY_SIZE, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 11, 16, *soak(6, 9, 10, 12, 13, 14, 15)])
def test_sums_on_2_to_16_nodes(size, algorithm):
    nodes = list(range(size))
    counts = [0, 1, size - 1, size, size + 1, 1023, 70_001]
    dtypes = ["float32"] * len(counts)

    def work(team, rank):
        use(team, algorithm)
        arrays = data_of(rank, counts, dtypes)
        for x in arrays:
            team.allreduce(as_bytes(x), "float32", "sum", "staged")
        planned = data_of(rank, counts, dtypes)
        reduce_plan(team, planned, dtypes, "sum", False, 1.0)
        return arrays + planned

    results = run(nodes, work)
    check([arrays[: len(counts)] for arrays in results], nodes, counts, dtypes, "sum")
    check([arrays[len(counts) :] for arrays in results], nodes, counts, dtypes, "sum")


@pytest.mark.parametrize("size", [24, 136])
def test_radix_k_with_two_and_three_digits(size):
    def work(team, rank):
        use(team, "radix_k")
        x = np.arange(1003, dtype=np.float32) % 7 + rank
        team.allreduce(as_bytes(x), "float32", "sum", "staged")
        np.testing.assert_array_equal(x, size * (np.arange(1003) % 7) + size * (size - 1) // 2)

    run(list(range(size)), work, 0, timeout=60)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("shape", ["3 x 1", "3 + 2 + 2 scattered"])
def test_every_dtype_and_operation(shape, op, algorithm):
    nodes = NODES[shape]
    dtypes = [dtype for dtype in DTYPES if op != "mean" or "int" not in dtype]
    counts = [5003] * len(dtypes)

    def work(team, rank):
        use(team, algorithm)
        arrays = data_of(rank, counts, dtypes)
        for x, dtype in zip(arrays, dtypes, strict=True):
            team.allreduce(as_bytes(x), dtype, op, "staged")
        return arrays

    check(run(nodes, work), nodes, counts, dtypes, op)


@pytest.mark.parametrize("nodes", [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("count", [7_000, 9_000, 12_500, 17_000])
def test_nodes_of_different_size_cut_small_plans_alike(nodes, count):
    """How many ranks of a node own a slice depends on a plan's bytes and the ranks of a node: the same everywhere."""

    def work(team, rank):
        arrays = data_of(rank, [count], ["float32"])
        reduce_plan(team, arrays, ["float32"], "sum", False, 1.0)
        return arrays

    check(run(nodes, work), nodes, [count], ["float32"], "sum")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 2], [0, 0, 1, 1, 1], list(range(7))], ids=str)
def test_weights_travel_with_the_data_of_small_plans(nodes, algorithm):
    """Other weights in each step: some are 0, all are, or they are no whole numbers. Data of any length and type."""
    size, steps = len(nodes), 4

    def weights(step):
        return [[rank % 3, 0, 0.1 + rank, 1e-18][step] for rank in range(size)]

    def plans():
        for count in (1, 3, 257, 4096, 4097):  # the last one of float32 is too long for it
            for dtype in ("float32", "float64", "bfloat16", "float16"):
                yield [count], [dtype], False
        yield [3, 5, 2], ["float32", "float64", "float32"], False  # the first bucket has it
        yield [3, 5, 2], ["float32", "float64", "float32"], True

    def work(team, rank):
        use(team, algorithm)
        results = []
        for number, (counts, dtypes, in_segment) in enumerate(plans()):
            specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(counts, dtypes, strict=True))]
            plan = team.plan(f"p{number}", specs, "mean", True, "", in_segment)
            for step in range(steps):
                arrays = data_of(rank, counts, dtypes, step)
                reduce_plan(team, arrays, dtypes, "mean", True, weights(step)[rank], plan)
                if in_segment:
                    arrays = [plan.memory(i).view(DTYPES[dtype]).copy() for i, dtype in enumerate(dtypes)]
                results.append(arrays)
        return results

    found = iter(zip(*run(nodes, work), strict=True))
    for counts, dtypes, _ in plans():
        for step in range(steps):
            results = next(found)
            if sum(weights(step)) > 0:
                check(results, nodes, counts, dtypes, "mean", weights(step), step)
            else:
                assert not any(x.any() for arrays in results for x in arrays)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nodes", [[0, 1, 2], *soak([0, 1], [0, 0, 1, 1])], ids=str)
@pytest.mark.parametrize("path", ["staged", *soak("push")])
def test_many_segments_on_the_way(nodes, algorithm, path):
    n = 3_000_001

    def work(team, rank):
        use(team, algorithm)
        x = team.empty(4 * n).view(np.float32) if path == "push" else np.empty(n, np.float32)
        for step in range(2):
            x[:] = rank + step + np.arange(n) % 7
            team.allreduce(as_bytes(x), "float32", "sum", path)
            np.testing.assert_array_equal(x, sum(r + step + np.arange(n) % 7 for r in range(len(nodes))))

    run(nodes, work, 0, timeout=60)


@pytest.mark.parametrize("pair", [("recursive_doubling", "rabenseifner")])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_algorithms_that_add_in_the_same_order(size, pair):
    def sums(algorithm):
        def work(team, rank):
            use(team, algorithm)
            x = np.random.default_rng(rank).normal(size=10_007).astype(np.float32)
            team.allreduce(as_bytes(x), "float32", "sum", "staged")
            return x.tobytes()

        return run(list(range(size)), work)

    assert sums(pair[0]) == sums(pair[1])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_pairwise_adds_in_rank_order(size):
    def work(team, rank):
        use(team, "pairwise")
        x = np.random.default_rng(rank).normal(size=10_007).astype(np.float32)
        team.allreduce(as_bytes(x), "float32", "sum", "staged")
        return x

    want = np.zeros(10_007, np.float32)
    for rank in range(size):
        want = want + np.random.default_rng(rank).normal(size=10_007).astype(np.float32)
    for x in run(list(range(size)), work):
        assert x.tobytes() == want.tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("nodes", [[0, 1, 1, 2], list(range(7)), *soak([0, 1], list(range(8)))], ids=str)
def test_16_bits_on_the_wire(nodes, wire, algorithm):
    """All ranks get the same bits, close to the sum of what was rounded."""
    counts = [1, 2, 3, 5_003, 300_001]

    def work(team, rank):
        use(team, algorithm)
        arrays = data_of(rank, counts, ["float32"] * len(counts))
        for x in arrays:
            team.allreduce(as_bytes(x), "float32", "sum", "staged", wire)
        planned = data_of(rank, counts, ["float32"] * len(counts))
        plan = team.plan("test", [(f"t{i}", "float32", n) for i, n in enumerate(counts)], "sum", False, wire)
        for i, x in enumerate(planned):
            plan.start(i, as_bytes(x))
        for i in range(len(planned)):
            plan.wait(i)
        whole = np.arange(1000)
        team.allreduce(as_bytes(whole), "int64", "sum", "", wire)
        np.testing.assert_array_equal(whole, len(nodes) * np.arange(1000))
        return arrays + planned

    results = run(nodes, work)
    inputs = [data_of(rank, counts, ["float32"] * len(counts)) for rank in range(len(nodes))]
    half = 2.0 ** (-11 if wire == "float16" else -8)  # of the last place, relative
    roundings = len(set(nodes))  # of one element, at most, and each of a sum that is no larger than `bound`
    for i, got in enumerate(results[0]):
        parts = [arrays[i % len(counts)].astype(np.float64) for arrays in inputs]
        bound = sum(np.abs(part) for part in parts)
        assert np.all(np.abs(got - sum(parts)) <= 1.1 * half * roundings * bound + 1e-6)
        assert np.any(got != sum(parts).astype(np.float32)), "nothing was rounded"
        assert {arrays[i].tobytes() for arrays in results} == {got.tobytes()}


def test_16_bits_are_rounded_to_the_nearest_and_summed_in_float32():
    """Two nodes: each element is the sum of what its owner has and of what the other sent, rounded once more."""
    kinds = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    x = [np.random.default_rng(rank).normal(size=10_000).astype(np.float32) for rank in range(2)]
    for wire, kind in kinds.items():

        def work(team, rank, wire=wire):
            use(team, "pairwise")
            mine = x[rank].copy()
            team.allreduce(as_bytes(mine), "float32", "sum", "staged", wire)
            return mine

        got = run([0, 1], work)[0]
        rounded = [a.astype(kind).astype(np.float32) for a in x]
        half = len(got) // 2
        np.testing.assert_array_equal(got[:half], (x[0] + rounded[1])[:half].astype(kind).astype(np.float32))
        np.testing.assert_array_equal(got[half:], (rounded[0] + x[1])[half:].astype(kind).astype(np.float32))


def test_one_node_rounds_nothing():
    def work(team, rank):
        x = np.full(100, 1 + 2.0**-20, np.float32)
        team.allreduce(as_bytes(x), "float32", "sum", "", "bfloat16")
        assert np.all(x == np.float32(2 + 2.0**-19))

    run([0, 0], work)


def test_what_cannot_be_sent_as_is_refused():
    def work(team, rank):
        x = np.ones(4, np.float32)
        with pytest.raises(ValueError, match="float16 or bfloat16"):
            team.allreduce(as_bytes(x), "float32", "sum", "", "int32")

    run([0, 1], work)


def test_ranks_that_disagree_on_the_wire_are_told():
    def work(team, rank):
        x = np.ones(100_000, np.float32)
        with pytest.raises(_native.PlanMismatchError, match="sent as float16"):
            team.allreduce(as_bytes(x), "float32", "sum", "staged", "float16" if rank else "")
        with pytest.raises(_native.PlanMismatchError, match="sent as bfloat16"):
            team.plan("p", [("t", "float32", 10)], "sum", False, "bfloat16" if rank else "")

    run([0, 1], work)
