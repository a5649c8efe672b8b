"""Calls on arrays over real MPI: every way, private and shared arrays, two teams, against NumPy in float64."""

import resource

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import keras_hpc
from keras_hpc.job import current

RANKS = {"torch": (3,)}

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
DTYPES = {
    "float16": (np.float16, 4e-3),
    "bfloat16": (ml_dtypes.bfloat16, 4e-2),
    "float32": (np.float32, 1e-6),
    "float64": (np.float64, 1e-14),
    "int32": (np.int32, 0),
    "int64": (np.int64, 0),
}
LARGEST = 300_000


@pytest.fixture(scope="module", autouse=True)
def job():
    keras_hpc.init(teams=2)
    yield
    keras_hpc.finalize()


def _data(seed, rank, count, dtype):
    return np.random.default_rng([seed, rank]).integers(-50, 50, count).astype(dtype)


def _check(got, seed, count, dtype, op, tolerance):
    everyone = np.array([_data(seed, r, count, dtype) for r in range(size)], np.float64)
    want = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max}[op](everyone, axis=0)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance * 50 * size)
    assert MPI.COMM_WORLD.allgather(got.tobytes()) == [got.tobytes()] * size


@pytest.mark.parametrize("path", ["slot", "staged", "push", "library"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way(path, dtype):
    kind, tolerance = DTYPES[dtype]
    team = current.job().teams[0]
    if path == "library" and (size == 1 or "16" in dtype):
        return  # MPI has no 16-bit floats
    for seed, count in enumerate((0, 1, size - 1, size, size + 1, 4093, LARGEST)):
        x = keras_hpc.empty(count, kind) if path == "push" else np.empty(count, kind)
        if (path == "slot" and x.nbytes > 65536) or (path == "push" and count == 0):
            continue
        more = () if path == "library" or count == LARGEST else ("min", "max", *(["mean"] if "f" in dtype else []))
        for op in ("sum", *more):
            x[...] = _data(seed, rank, count, kind)
            team.native.allreduce(x.view(np.uint8), dtype, op, path)
            _check(x, seed, count, kind, op, tolerance)


def test_random_calls_on_two_teams():
    random = np.random.default_rng(7)  # the same on all ranks
    shared = [keras_hpc.empty(LARGEST, "float64", team=team) for team in (0, 1)]
    for seed in range(20):
        team = int(random.integers(2))
        dtype = str(random.choice(list(DTYPES)))
        kind, tolerance = DTYPES[dtype]
        count = int(LARGEST ** random.random())
        op = str(random.choice(["sum", "min", "max"]))
        begin = int(random.integers(LARGEST - count + 1))
        x = shared[team].view(kind)[begin : begin + count] if random.random() < 0.5 else np.empty(count, kind)
        x[...] = _data(seed, rank, count, kind)
        assert keras_hpc.allreduce(x, op, team=team, out=x) is x
        _check(x, seed, count, kind, op, tolerance)


def test_ten_thousand_calls_take_no_memory():
    x = np.ones(100, np.float32)
    team = current.job().teams[0]
    shared = keras_hpc.empty(100)
    for _ in range(100):
        team.allreduce(x, "max")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5000):
        team.allreduce(x, "max")
        team.allreduce(shared, "max")
    assert np.all(x == 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2048  # KiB


def test_areas_are_given_back():
    keras_hpc.empty(1 << 20)
    segments = _mapped()
    for _ in range(20):
        keras_hpc.empty(1 << 20)
    assert _mapped() <= segments


def _mapped():
    with open("/proc/self/maps") as file:
        return sum("memfd:keras_hpc" in line for line in file)
