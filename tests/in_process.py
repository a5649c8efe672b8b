"""Ranks as threads of one process: what the engine's tests start, feed and compare."""

import concurrent.futures
import contextlib
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from keras_hpc import _native

NODES = {
    "1 rank": [0],
    "2 on 1": [0, 0],
    "3 on 1": [0, 0, 0],
    "5 on 1": [0] * 5,
    "2 x 1": [0, 1],
    "3 x 1": [0, 1, 2],
    "5 x 1": [0, 1, 2, 3, 4],
    "2 x 2": [0, 0, 1, 1],
    "2 x 2 interleaved": [0, 1, 0, 1],
    "2 + 1": [0, 0, 1],
    "1 + 3": [0, 1, 1, 1],
    "3 + 2 + 2 scattered": [0, 1, 2, 0, 1, 2, 0],
    "8 x 2": [i // 2 for i in range(16)],
    "4 x 4": [i % 4 for i in range(16)],
}
FEW = ("3 on 1", "2 + 1", "3 + 2 + 2 scattered")  # of them, where `make test` has no time for all
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
    "int64": np.int64,
}
EPSILON = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6, "float64": 1e-14, "int32": 0, "int64": 0}


ALGORITHMS = ["recursive_doubling", "rabenseifner", "ring", "pairwise", "radix_k"]
EVERY_SIZE = 2**62
SOON = 5.0  # seconds in which ranks learn of each other's errors: a grace of two, and time to look


def soak(*values):
    """Returns cases for `parametrize` that `make test` leaves out for their time."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


def few_nodes():
    """Returns names of NODES for `parametrize`, of which `make test` runs a few."""
    return [*FEW, *soak(*(name for name in NODES if name not in FEW))]


def run(nodes, work, threads=1, timeout=20.0, measured=False, copy=0):
    """Calls work(team, rank) on one thread per rank; returns the results in rank order.

    How slices go between nodes is measured only where a test asks for it: with more ranks than cores that takes longer
    than most tests. `copy`: see `_native.in_process_transports`.
    """
    transports = _native.in_process_transports(nodes, copy)
    everyone = threading.Barrier(len(nodes))

    def rank_main(rank):
        team = _native.Team(transports[rank], 0, threads, timeout, timeout)
        with contextlib.closing(team):
            if not measured:
                team.add_choice("network", 0, EVERY_SIZE, ALGORITHMS[len(nodes) % len(ALGORITHMS)])
            result = work(team, rank)
            everyone.wait(30)  # a team is closed by all ranks together
            return result

    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(len(nodes))]
        return [future.result(60) for future in futures]


def run_with_limits(nodes, work, threads, limit_of, measured=False):
    """As in_process.run, with a time limit for each rank."""
    transports = _native.in_process_transports(nodes)
    errors = []

    def rank_main(rank):
        try:
            team = _native.Team(transports[rank], 0, threads, limit_of(rank), 60.0)
            if not measured:
                team.add_choice("network", 0, EVERY_SIZE, "pairwise")
            with contextlib.closing(team):
                work(team, rank)
        except BaseException as error:  # noqa: BLE001 - raised by the test's own thread
            errors.append(error)

    ranks = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(nodes))]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def caught(work):
    """Returns the error of the engine that `work` raises, and after how many seconds."""
    begin = time.monotonic()
    with pytest.raises(_native.Error) as info:
        work()
    return str(info.value), time.monotonic() - begin


def as_bytes(array):
    return array.reshape(-1).view(np.uint8)


def data_of(rank, counts, dtypes, step=0):
    rng = np.random.default_rng(1000 * step + rank)
    return [
        (rng.integers(-50, 50, n) if "int" in dtype else rng.standard_normal(n, np.float32)).astype(DTYPES[dtype])
        for n, dtype in zip(counts, dtypes, strict=True)
    ]


def reduce_plan(team, arrays, dtypes, op, weighted, weight, plan=None, order=None, bucket_bytes=0):
    if plan is None:
        specs = [(f"t{i}", dtype, a.size) for i, (a, dtype) in enumerate(zip(arrays, dtypes, strict=True))]
        plan = team.plan("test", specs, op, weighted, bucket_bytes=bucket_bytes)
    for i in order if order is not None else range(len(arrays)):
        plan.start(i, as_bytes(arrays[i]), weight)
    for i in range(len(arrays)):
        plan.wait(i)
    return plan


def expected(all_arrays, op, weights=None):
    stack = np.stack([np.asarray(a, np.float64) for a in all_arrays])
    if op == "mean":
        return np.average(stack, axis=0, weights=weights) if stack.size else stack[0]
    return {"sum": np.sum, "min": np.min, "max": np.max}[op](stack, axis=0)


def check(results, nodes, counts, dtypes, op, weights=None, step=0):
    inputs = [data_of(rank, counts, dtypes, step) for rank in range(len(nodes))]
    for i, dtype in enumerate(dtypes):
        want = expected([arrays[i] for arrays in inputs], op, weights)
        got = [np.asarray(arrays[i], np.float64) for arrays in results]
        scale = np.maximum(np.max(np.abs([np.asarray(a[i], np.float64) for a in inputs]), axis=0), 1e-30)
        factor = 1 if op in ("min", "max") else len(nodes)
        assert np.all(np.abs(got[0] - want) <= EPSILON[dtype] * factor * scale), (i, dtype)
        for rank in range(1, len(nodes)):
            assert results[rank][i].tobytes() == results[0][i].tobytes(), f"rank {rank} differs from rank 0"
