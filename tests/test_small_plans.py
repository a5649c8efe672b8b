"""Small plans of many tensors, between nodes and on one: who starts or waits for them goes on with what is there."""

import contextlib
import threading
import time

import numpy as np
import pytest
from in_process import NODES, SOON, as_bytes, caught, check, data_of, reduce_plan, run, run_with_limits

from keras_hpc import _native

SHAPES = ["2 on 1", "2 x 1", "3 x 1", "2 x 2 interleaved", "1 + 3", "3 + 2 + 2 scattered", "8 x 2"]


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("nodes", [NODES[shape] for shape in SHAPES], ids=SHAPES)
def test_many_small_tensors(nodes, threads):
    counts = [1 + 37 * i % 120 for i in range(32)]
    dtypes = ["float32"] * 30 + ["float64"] * 2
    weights = [1.0 + rank % 3 for rank in range(len(nodes))]

    def work(team, rank):
        specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(counts, dtypes, strict=True))]
        plan = team.plan("small", specs, "mean", True)
        order = np.random.default_rng(rank)
        results = []
        for step in range(4):
            arrays = data_of(rank, counts, dtypes, step)
            reduce_plan(team, arrays, dtypes, "mean", True, weights[rank], plan, order.permutation(32))
            results.append(arrays)
        return results

    for step, results in enumerate(zip(*run(nodes, work, threads), strict=True)):
        check(results, nodes, counts, dtypes, "mean", weights, step)


@pytest.mark.parametrize(
    ("nodes", "in_segment", "nbytes"), [([0, 1], False, 448), ([0, 1], True, 2048), ([0, 0], False, 2048)]
)
def test_between_nodes_small_tensors_have_no_gaps(nodes, in_segment, nbytes):
    """31 tensors of 12 bytes, and one of another dtype, which begins a cache line."""

    def work(team, rank):
        specs = [(f"t{i}", "float32", 3) for i in range(31)] + [("last", "float64", 1)]
        team.plan("p", specs, "sum", False, "", in_segment)
        return team.report()["plan_bytes"]

    assert run(nodes, work) == [nbytes] * 2


@pytest.mark.parametrize("bucket_bytes", [0, 100, 700, 4096])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1], [0, 1, 1, 1]], ids=str)
def test_tensors_that_are_cut_beside_small_ones(nodes, bucket_bytes):
    """Empty ones, small ones of each dtype, and large ones, in a random order, in buckets of any size."""
    mixed = np.random.default_rng(bucket_bytes)
    counts = mixed.choice([0, 1, 3, 7, 10, 33, 127, 128, 129, 1000, 3001], 60).tolist()
    dtypes = mixed.choice(["float16", "float32", "float64", "int32"], 60, p=[0.1, 0.6, 0.1, 0.2]).tolist()

    def work(team, rank):
        arrays = data_of(rank, counts, dtypes)
        reduce_plan(team, arrays, dtypes, "sum", False, 1.0, bucket_bytes=bucket_bytes)
        return arrays

    check(run(nodes, work), nodes, counts, dtypes, "sum")


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1], [0, 0, 1, 1]], ids=str)
def test_who_starts_a_tensor_goes_on_with_those_before(nodes):
    """Without a thread: rank 0 waits for nothing, and each message of the others' first tensor takes its answer."""
    count, small = 20_000, 8
    through = threading.Barrier(len(nodes))

    def work(team, rank):
        specs = [("a", "float32", count), *((f"t{i}", "float32", 3) for i in range(small + 1))]
        plan = team.plan("p", specs, "sum", False, bucket_bytes=64 << 10)
        arrays = [np.full(n, rank + 1, np.float32) for _, _, n in specs]
        if rank > 0:
            time.sleep(0.05)  # rank 0 has started its first tensor, and nobody has answered it
        plan.start(0, as_bytes(arrays[0]))
        if rank == 0:
            for i in range(1, small + 1):  # not the last one: no bucket becomes whole
                time.sleep(0.05)
                plan.start(i, as_bytes(arrays[i]))
        else:
            plan.wait(0)
        through.wait(30)
        for i in range(1 if rank > 0 else small + 1, small + 2):
            plan.start(i, as_bytes(arrays[i]))
        for i in range(0 if rank == 0 else 1, small + 2):
            plan.wait(i)
        return arrays

    ranks = len(nodes)
    for arrays in _limited(nodes, work, "pairwise"):
        assert all(np.all(a == ranks * (ranks + 1) / 2) for a in arrays)


def _limited(nodes, work, algorithm):
    """As in_process.run, without a thread, with slices that go between nodes as `algorithm` says."""

    def with_choice(team, rank):
        team.add_choice("network", 0, 2**62, algorithm)
        return work(team, rank)

    return run(nodes, with_choice, threads=0, timeout=5.0, measured=True)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1], [0, 0, 1, 1]], ids=str)
def test_threads_of_a_rank_wait_for_different_plans(nodes, threads):
    counts, plans, steps = [5, 1, 64, 200], 3, 25
    dtypes = ["float32"] * len(counts)

    def work(team, rank):
        specs = [(f"t{i}", "float32", n) for i, n in enumerate(counts)]
        made = [team.plan(f"p{p}", specs, "sum", False) for p in range(plans)]
        results, errors = [None] * plans, []

        def use(p):
            try:
                for step in range(steps):
                    arrays = data_of(rank, counts, dtypes, step * plans + p)
                    reduce_plan(team, arrays, dtypes, "sum", False, 1.0, made[p])
                    results[p] = arrays
            except BaseException as error:  # noqa: BLE001 - raised by the rank's own thread
                errors.append(error)

        users = [threading.Thread(target=use, args=(p,)) for p in range(plans)]
        for user in users:
            user.start()
        for user in users:
            user.join(60)
            assert not user.is_alive()
        if errors:
            raise errors[0]
        return results

    for p, results in enumerate(zip(*run(nodes, work, threads), strict=True)):
        check(results, nodes, counts, dtypes, "sum", step=(steps - 1) * plans + p)


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1]], ids=str)
def test_a_time_limit_ends_a_small_plan_whose_message_never_comes(nodes, threads):
    """The caller itself is inside: it has sent what is its own, gives up, and uses its memory for something else."""
    given_up, everyone = threading.Event(), threading.Barrier(len(nodes))
    small = 32

    def work(team, rank):
        plan = team.plan("p", [(f"t{i}", "float32", 7) for i in range(small)], "sum", False)
        x = np.full((small, 7), rank + 1, np.float32)
        last = len(nodes) - 1

        def step():
            for i in range(small):
                plan.start(i, as_bytes(x[i]))
            for i in range(small):
                plan.wait(i)

        everyone.wait(30)
        if rank == last:
            assert given_up.wait(30)
            # Whoever got its sum in spite of that has the right one, and whoever did not has an error.
            with contextlib.suppress(_native.Error):
                step()
                assert np.all(x == len(nodes) * (len(nodes) + 1) / 2)
        else:
            text, seconds = caught(step)
            assert "of plan 'p'" in text or f"given up waiting for rank {last}" in text
            assert seconds < SOON
            x[:] = -7
            if rank == 0:
                given_up.set()
        everyone.wait(30)
        assert rank == last or np.all(x == -7)

    run_with_limits(nodes, work, threads, lambda rank: 0.3 if rank < len(nodes) - 1 else 0.8)
