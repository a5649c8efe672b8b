"""The engine with ranks as threads: every algorithm, 1 to 16 ranks, any shape of nodes, against NumPy in float64."""

import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import DTYPES, NODES, as_bytes, check, data_of, few_nodes, reduce_plan, run, soak

from keras_hpc import _native


@pytest.mark.parametrize("threads", [0, 2, *soak(1)])
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES.keys())
def test_plan_on_any_shape_of_nodes(nodes, threads):
    counts = [1, 7, 0, 300, 300_000, 64, 5, 100_003, 2]
    dtypes = ["float32"] * 5 + ["float64", "int64", "float16", "bfloat16"]

    def work(team, rank):
        plan = None
        for step in range(3):
            arrays = data_of(rank, counts, dtypes, step)
            plan = reduce_plan(team, arrays, dtypes, "sum", False, 1.0, plan)
        return arrays

    check(run(nodes, work, threads), nodes, counts, dtypes, "sum", step=2)


@pytest.mark.parametrize("threads", [0, 2, *soak(1)])
@pytest.mark.parametrize("nodes", [*soak([0, 0], [0, 1], [0, 0, 0]), [0, 0, 1]], ids=str)
def test_a_plan_with_more_buckets_than_places(nodes, threads):
    """11 MB: buckets take each other's places in shared memory, in a step and from one step to the next."""
    counts = [70_000, 1_800_000, 5, 900_000, 1]
    dtypes = ["float32"] * len(counts)
    weights = [1.0 + rank for rank in range(len(nodes))]

    def work(team, rank):
        plan, steps = None, []
        for step in range(3):
            arrays = data_of(rank, counts, dtypes, step)
            order = range(len(counts)) if rank == 0 else reversed(range(len(counts)))
            plan = reduce_plan(team, arrays, dtypes, "mean", True, weights[rank], plan, order)
            steps.append(arrays)
        return steps

    results = run(nodes, work, threads)
    for step in range(3):
        check([steps[step] for steps in results], nodes, counts, dtypes, "mean", weights, step)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 0], [0, 1, 1]], ids=str)
@pytest.mark.parametrize("in_segment", [False, True], ids=["", "in segment"])
def test_a_rank_that_is_ahead_changes_no_weight_of_the_step_before(nodes, in_segment):
    """Each rank's weight is another one in each step, and small buckets let a rank go on before others are done."""

    def work(team, rank):
        plan = team.plan("test", [("t", "float32", 3)], "mean", True, in_segment=in_segment)
        means = []
        for step in range(2000):
            x = np.full(3, float(rank), np.float32)
            plan.start(0, as_bytes(x), float((rank + step) % 3))
            plan.wait(0)
            means.append((plan.memory(0).view(np.float32) if in_segment else x).tolist())
        return means

    want = []
    for step in range(2000):
        weights = [float((rank + step) % 3) for rank in range(len(nodes))]
        want.append([np.average(range(len(nodes)), weights=weights)] * 3)
    for means in run(nodes, work):
        np.testing.assert_allclose(means, want, rtol=1e-6)


@pytest.mark.parametrize("nodes", [*soak([0, 0]), [0, 0, 1]], ids=str)
def test_a_plan_that_no_cache_holds(nodes):
    """40 MB, whose results are written past the caches; tensors begin anywhere in a cache line."""
    counts = [3, 1_000_003, 7_000_001, 17, 2_000_005]
    dtypes = ["float32"] * len(counts)

    def work(team, rank):
        arrays = [np.append(np.float32(0), data)[1:] for data in data_of(rank, counts, dtypes)]
        reduce_plan(team, arrays, dtypes, "mean", False, 1.0)
        return arrays

    check(run(nodes, work, 0), nodes, counts, dtypes, "mean")


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", few_nodes())
def test_tensors_that_live_in_the_segment(name, threads):
    nodes = NODES[name]
    counts = [1, 7, 300, 300_000, 64, 5, 100_003, 2]
    dtypes = ["float32"] * 6 + ["float64", "bfloat16"]
    weights = [float(rank % 3) if len(nodes) > 1 else 1.0 for rank in range(len(nodes))]

    def work(team, rank):
        specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(counts, dtypes, strict=True))]
        plan = team.plan("test", specs, "mean", True, "", True)
        arrays = [plan.memory(i).view(DTYPES[dtype]) for i, dtype in enumerate(dtypes)]
        for step in range(3):
            for i, data in enumerate(data_of(rank, counts, dtypes, step)):
                if i % 2:  # written there, or copied there
                    arrays[i][:] = data
                    data = arrays[i]
                plan.start(i, as_bytes(data), weights[rank])
                if i % 2 == 0:
                    data[:] = 0
            for i in range(len(arrays)):
                plan.wait(i)
        return arrays  # they outlive the team

    check(run(nodes, work, threads), nodes, counts, dtypes, "mean", weights, step=2)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 1], [0, 1, 2]], ids=str)
def test_pipelined_steps_give_each_average_once(nodes, threads):
    counts, dtypes = [3, 0, 70_000], ["float32"] * 3
    first, pipelined, steps = 2, 5, 10

    def work(team, rank):
        plan = team.plan("test", [(f"t{i}", "float32", n) for i, n in enumerate(counts)], "mean", True, pipelined=True)
        plan.set_schedule(first, pipelined)
        applied = []
        for step in range(steps):
            arrays = data_of(rank, counts, dtypes, step)
            for i in (2, 0, 1):
                plan.start(i, as_bytes(arrays[i]), 1.0 + rank)
            for i in range(3):
                plan.wait(i)
            updates = plan.updates()
            assert updates == {first: 0, first + pipelined: 2}.get(step, 1)
            assert plan.outstanding() == (first <= step < first + pipelined or updates == 2)
            if updates > 0:
                applied.append(arrays)
            if updates == 2:
                own = [np.empty_like(x) for x in arrays]
                for i in range(3):
                    plan.second(i, as_bytes(own[i]))
                applied.append(own)
            if step == 4:
                # A look at what is outstanding changes nothing.
                seen = [np.empty(n, np.float32) for n in counts]
                assert plan.take([as_bytes(x) for x in seen], True)
        assert not plan.take([as_bytes(x) for x in seen], False)
        assert all((a == b).all() for a, b in zip(seen, applied[4], strict=True))
        return applied

    results = run(nodes, work, threads)
    weights = [1.0 + rank for rank in range(len(nodes))]
    assert len(results[0]) == steps
    for step in range(steps):
        check([applied[step] for applied in results], nodes, counts, dtypes, "mean", weights, step)


def test_a_pipelined_step_must_be_whole():
    def work(team, rank):
        plan = team.plan("test", [("a", "float32", 1), ("b", "float32", 1)], "sum", False, pipelined=True)
        plan.start(0, as_bytes(np.zeros(1, np.float32)))
        with pytest.raises(_native.Error, match="before all of its tensors were started"):
            plan.wait(0)
        with pytest.raises(_native.Error, match=r"'a' of plan 'test'.*started twice without a wait"):
            plan.start(0, as_bytes(np.zeros(1, np.float32)))
        plan.start(1, as_bytes(np.zeros(1, np.float32)))
        plan.wait(1)
        with pytest.raises(_native.Error, match=r"'b' of plan 'test'.*waited for but not started"):
            plan.wait(1)
        ordinary = team.plan("ordinary", [("a", "float32", 1)], "sum", False)
        with pytest.raises(_native.Error, match="not pipelined"):
            ordinary.set_schedule(0, 1)

    run([0], work)


def test_a_step_that_is_not_over_gives_no_average_away():
    def work(team, rank):
        plan = team.plan("test", [("a", "float32", 1), ("b", "float32", 1)], "sum", False, pipelined=True)
        plan.set_schedule(0, 9)
        arrays = [as_bytes(np.full(1, rank + 1.0, np.float32)) for _ in range(2)]
        for waits in (2, 1):
            for i in range(2):
                plan.start(i, arrays[i])
            for i in range(waits):
                plan.wait(i)
        with pytest.raises(_native.Error, match="is not over: no average can be taken"):
            plan.take(arrays, False)
        with pytest.raises(_native.Error, match="is not over: no average can be put"):
            plan.put(arrays)
        plan.wait(1)
        seen = [np.empty(1, np.float32) for _ in range(2)]
        assert plan.take([as_bytes(x) for x in seen], False)
        return np.concatenate(seen).tolist(), np.concatenate(arrays).view(np.float32).tolist()

    # Gradients 1 and 2 on two ranks; the second step's are what the first one, which has no average, left in place.
    assert run([0, 0], work) == [([3.0, 3.0], [3.0, 3.0])] * 2


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [NODES["3 on 1"], NODES["3 x 1"], NODES["1 + 3"]], ids=["node", "network", "uneven"])
def test_dtypes_and_operations(nodes, dtype, op):
    if op == "mean" and "int" in dtype:
        with pytest.raises(_native.Error, match="mean of integers"):
            run([0], lambda team, rank: team.plan("p", [("t", dtype, 3)], op, False))
        return
    counts = [1, 2, 3, 4, 1000, 33_000]
    dtypes = [dtype] * len(counts)

    def work(team, rank):
        arrays = data_of(rank, counts, dtypes)
        reduce_plan(team, arrays, dtypes, op, False, 1.0)
        return arrays

    check(run(nodes, work), nodes, counts, dtypes, op)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_plan(data):
    size = data.draw(st.integers(1, 6), "ranks")
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size), "nodes")
    counts = data.draw(st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 1000, 70_000, 262_145]), min_size=1, max_size=6))
    n = len(counts)
    dtypes = data.draw(st.lists(st.sampled_from(["float32", "float64", "bfloat16"]), min_size=n, max_size=n))
    threads = data.draw(st.integers(0, 2), "threads")
    bucket_bytes = data.draw(st.sampled_from([0, 4096, 100_000, 8 << 20]), "bucket_bytes")
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 5.0, 24.0]), min_size=size, max_size=size), "weights")
    orders = [data.draw(st.permutations(range(len(counts)))) for _ in nodes]
    if sum(weights) == 0:
        weights[0] = 1.0

    def work(team, rank):
        plan = None
        for step in range(2):
            arrays = data_of(rank, counts, dtypes, step)
            plan = reduce_plan(team, arrays, dtypes, "mean", True, weights[rank], plan, orders[rank], bucket_bytes)
        return arrays

    check(run(nodes, work, threads), nodes, counts, dtypes, "mean", weights, step=1)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 1, 0], [0, 1, 2, 3]])
def test_blocking_collectives(nodes, threads):
    size = len(nodes)

    def work(team, rank):
        for n in (1, 2, 1000, 262_144, 700_001):
            x = np.full(n, rank + 1.0, np.float32)
            team.allreduce(as_bytes(x), "float32", "sum")
            np.testing.assert_array_equal(x, size * (size + 1) / 2)
        for root in range(size):
            x = np.arange(10, dtype=np.uint8) * (rank == root)
            team.broadcast(x, root)
            np.testing.assert_array_equal(x, np.arange(10))
        counts = team.allgather_count(rank)
        assert counts == list(range(size))
        out = np.empty(sum(counts), np.uint8)
        team.allgather(np.full(rank, rank, np.uint8), out, counts)
        np.testing.assert_array_equal(out, np.repeat(np.arange(size), np.arange(size)))
        team.agree("things", ["a", "b"])

    run(nodes, work, threads)


def test_two_plans_in_opposite_orders_do_not_deadlock():
    """Ranks on different nodes reach two plans in different orders: no reduction waits for another."""

    def work(team, rank):
        plans = [team.plan(name, [("t", "float32", 300_000)], "sum", False) for name in "ab"]
        for _ in range(20):
            arrays = [np.full(300_000, rank + 1.0, np.float32) for _ in plans]
            order = [0, 1] if rank % 2 == 0 else [1, 0]
            for i in order:
                plans[i].start(0, as_bytes(arrays[i]))
            for i in order:
                plans[i].wait(0)
                assert arrays[i][0] == 10.0

    for nodes in ([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]):
        for threads in (0, 1):
            run(nodes, work, threads)


@pytest.mark.parametrize("local", [2, 3, 4])
@pytest.mark.parametrize("count", [2_000_000, 20_000_000])
def test_memory_of_a_plan(local, count):
    """On one rank: at most one more copy, and 4 MiB of it, 8 across nodes (and 1 MiB for blocking calls)."""

    def segment_bytes(team, rank):
        team.plan("p", [("t", "float32", count)], "mean", True)
        report = team.report()
        assert report["plan_bytes"] == 4 * count
        return report["segment_bytes"]

    others = (1 << 20) + 64 * 1024
    assert max(run([0] * local, segment_bytes)) <= min(4 * count, 4 << 20) + others
    assert max(run([0, 1], segment_bytes)) <= min(4 * count, 8 << 20) + others


def test_buckets_are_as_large_as_asked_for_and_as_fits_many_nodes():
    def segment_bytes(bucket_bytes):
        def work(team, rank):
            team.plan("p", [("t", "float32", 20_000_000)], "sum", False, bucket_bytes=bucket_bytes)
            return team.report()["segment_bytes"]

        return work

    others = (1 << 20) + 64 * 1024
    assert max(run([0, 0], segment_bytes(1 << 16))) <= (4 << 16) + others
    assert max(run([0, 0], segment_bytes(4 << 20))) > 7 << 20
    assert max(run(range(31), segment_bytes(0))) <= (8 << 20) + others
    assert max(run(range(32), segment_bytes(0))) > 30 << 20


def test_trace_records_starts_reductions_and_waits():
    _native.take_trace()
    _native.set_tracing(True)
    try:
        run([0, 0], lambda team, rank: reduce_plan(team, [np.ones(5, np.float32)], ["float32"], "sum", False, 1.0))
    finally:
        _native.set_tracing(False)
    events = json.loads(_native.take_trace())
    assert [kind for _, kind, *_ in events].count("start") == 2
    assert {kind for _, kind, *_ in events} == {"start", "reduce", "wait"}
    assert all(begin <= end for *_, begin, end in events)


def test_many_steps_leave_nothing_behind():
    before = threading.active_count()

    def work(team, rank):
        plan = team.plan("p", [("t", "float32", 1000), ("u", "float32", 10)], "mean", True)
        x, y = np.ones(1000, np.float32), np.ones(10, np.float32)
        for _ in range(3000):
            plan.start(0, as_bytes(x), 3.0)
            plan.start(1, as_bytes(y), 3.0)
            plan.wait(0)
            plan.wait(1)
        assert x[0] == 1.0
        assert team.report()["steps"] == 3000

    run([0, 0], work)
    assert threading.active_count() == before
