# SPDX-License-Identifier: Apache-2.0
"""The collectives that users call, over real MPI, against mpi4py and NumPy."""

import functools

import keras
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import keras_hpc
from keras_hpc.job import current

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
if keras.backend.backend() == "jax":
    import jax

    compiled = jax.jit
elif keras.backend.backend() == "torch":
    import torch

    compiled = functools.partial(torch.compile, backend="eager")
else:
    import tensorflow as tf

    compiled = tf.function
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64]


@pytest.fixture(scope="module", autouse=True)
def job():
    keras_hpc.init(teams=2)
    yield
    keras_hpc.finalize()


def test_ranks_are_those_of_mpi():
    assert (keras_hpc.rank(), keras_hpc.size()) == (rank, size)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    assert (keras_hpc.local_rank(), keras_hpc.local_size()) == (node.rank, node.size)
    assert keras_hpc.node_count() == 1
    assert keras_hpc.node() == 0


@pytest.mark.parametrize("count", [0, 1, size - 1, size + 1, 1000, 300_001, 3_000_000])
def test_allreduce_equals_mpi(count):
    x = np.random.default_rng(rank).normal(size=count).astype(np.float32)
    want = np.empty_like(x)
    for op, theirs in (("sum", MPI.SUM), ("min", MPI.MIN), ("max", MPI.MAX)):
        world.Allreduce(x, want, theirs)
        got = keras_hpc.allreduce(x, op=op)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert world.allgather(got.tobytes()) == [got.tobytes()] * size
    mean = keras_hpc.allreduce(x, team=1)
    world.Allreduce(x, want, MPI.SUM)
    np.testing.assert_allclose(mean, want / size, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_allreduce_dtypes(dtype):
    x = np.arange(50).reshape(5, 10).astype(dtype)
    got = keras_hpc.allreduce(x, op="sum")
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    np.testing.assert_array_equal(got.astype(np.float64), size * np.arange(50).reshape(5, 10))
    np.testing.assert_array_equal(x.astype(np.float64), np.arange(50).reshape(5, 10))  # not in place


def test_arrays_that_all_ranks_of_a_node_reach():
    x = keras_hpc.empty((300, 1001))
    assert x.dtype == np.float32
    for step in range(3):
        x[...] = rank + step
        assert keras_hpc.allreduce(x, op="sum", out=x) is x
        assert np.all(x == sum(range(step, step + size)))
    part = x[10:20]  # a part of it, and a private result
    out = np.empty_like(part)
    x[...] = rank
    assert keras_hpc.allreduce(part, out=out) is out
    assert np.all(out == (size - 1) / 2)
    assert np.all(x == rank)
    assert keras_hpc.allreduce(part, out=part) is part
    assert np.all(part == (size - 1) / 2)
    assert np.all(x[:10] == rank)
    assert np.all(x[20:] == rank)
    assert keras_hpc.empty((2, 0), "int64", team=1).shape == (2, 0)
    with pytest.raises(TypeError, match="Expected a writeable"):
        keras_hpc.allreduce(x, out=x[:, ::2])
    with pytest.raises(ValueError, match=r"Expected shape \(300, 1001\)"):
        keras_hpc.allreduce(x, out=np.empty(3, np.float32))
    if size > 1:
        with pytest.raises(keras_hpc.PlanMismatchError, match="shapes and dtypes"):
            keras_hpc.empty(3 + rank)


def test_allreduce_keeps_the_kind():
    assert keras_hpc.allreduce(rank + 1, op="sum") == size * (size + 1) // 2
    assert keras_hpc.allreduce(float(rank)) == pytest.approx((size - 1) / 2)
    assert keras_hpc.allreduce(2 * rank) == pytest.approx(size - 1)
    tensor = keras.ops.convert_to_tensor(np.full((2, 3), rank, np.float32))
    reduced = keras_hpc.allreduce(tensor, op="max")
    assert keras.ops.is_tensor(reduced)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(reduced), size - 1)
    assert type(keras_hpc.allreduce(np.float32(1))) is np.float32
    for odd in (np.arange(10.0)[::2], np.arange(6.0).reshape(2, 3).T, np.arange(4, dtype=">f8"), np.array(3.0)):
        mean = keras_hpc.allreduce(odd)
        np.testing.assert_array_equal(mean, odd)
        assert mean.shape == odd.shape
        assert mean.dtype.isnative


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "uint64", "int32", "int64"])
def test_integers_of_every_width(dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = np.array([high - rank, low + rank, 3, rank], dtype)
    everyone = np.stack([np.array([high - r, low + r, 3, r], dtype) for r in range(size)])
    wants = {
        "sum": everyone.sum(axis=0, dtype=dtype),  # wraps around
        "product": everyone.prod(axis=0, dtype=dtype),
        "min": everyone.min(axis=0),
        "max": everyone.max(axis=0),
    }
    for op, want in wants.items():
        got = keras_hpc.allreduce(x, op)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, want)
    mean = keras_hpc.allreduce(x)
    assert mean.dtype == np.float64
    np.testing.assert_allclose(mean, everyone.astype(np.float64).mean(axis=0))
    out = x.copy()
    assert keras_hpc.allreduce(out, "max", out=out) is out
    np.testing.assert_array_equal(out, wants["max"])


def test_bools_are_counted_or_combined():
    x = np.array([True, rank == 0, False])
    assert keras_hpc.allreduce(x, "max").tolist() == [True, True, False]
    assert keras_hpc.allreduce(x, "min").tolist() == [True, size == 1, False]
    assert keras_hpc.allreduce(x, "sum").tolist() == [size, 1, 0]
    assert keras_hpc.allreduce(rank == 0, "max") is True
    np.testing.assert_allclose(keras_hpc.allreduce(x), [1, 1 / size, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_products(dtype):
    x = np.array([rank + 1, 2, 0.5 if np.dtype(dtype).kind != "i" else 3], dtype)
    everyone = np.stack([np.array([r + 1, *x[1:].astype(np.float64)]) for r in range(size)])
    np.testing.assert_allclose(keras_hpc.allreduce(x, "product").astype(np.float64), everyone.prod(axis=0))


@pytest.mark.parametrize("run", ["eagerly", "compiled"])
def test_tensors_of_integers_and_bools(run):
    function = compiled if run == "compiled" else lambda f: f
    small = np.array([200, rank], np.uint8)
    for x, op, want in (
        (small, "sum", [200 * size % 256, size * (size - 1) // 2]),
        (small, "max", [200, size - 1]),
        (small, "mean", [200, (size - 1) / 2]),
        (np.array([True, rank == 0]), "sum", [size, 1]),
        (np.array([True, rank == 0]), "min", [True, size == 1]),
    ):
        got = function(lambda v, op=op: keras_hpc.allreduce(v, op))(keras.ops.convert_to_tensor(x))
        assert keras.ops.is_tensor(got)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(got), want)


@pytest.mark.parametrize("run", ["eagerly", "compiled"])
def test_structures(run):
    function = compiled if run == "compiled" else lambda f: f
    to_tensor = keras.ops.convert_to_tensor

    def work(a, b):
        return keras_hpc.allreduce({"a": a, "rest": [b, (2 * a, keras.ops.cast(a, "int32"))]}, "sum")

    a, b = np.full((2, 3), rank + 1, np.float32), np.full((), rank, np.float32)
    got = function(work)(to_tensor(a), to_tensor(b))
    ones, zeros = size * (size + 1) // 2, size * (size - 1) // 2
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(got["a"]), np.full((2, 3), ones))
    assert float(got["rest"][0]) == zeros
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(got["rest"][1][0]), np.full((2, 3), 2 * ones))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(got["rest"][1][1]), np.full((2, 3), ones))
    assert keras_hpc.allreduce([rank, {"x": float(rank)}], "sum") == [zeros, {"x": float(zeros)}]
    assert keras_hpc.allreduce({}) == {}


def test_reduce_scatter():
    rows = 2 * size + 1
    part = slice(*(-(-rows * r // size) for r in (rank, rank + 1)))
    x = np.arange(3.0 * rows).reshape(rows, 3) + rank
    want = size * np.arange(3.0 * rows).reshape(rows, 3) + size * (size - 1) / 2
    np.testing.assert_array_equal(keras_hpc.reduce_scatter(x), want[part])
    np.testing.assert_allclose(keras_hpc.reduce_scatter(x, "mean"), want[part] / size)
    with pytest.raises(ValueError, match="at least one axis"):
        keras_hpc.reduce_scatter(1.0)


@pytest.mark.skipif(size == 1, reason="one rank agrees with itself")
def test_what_differs_between_ranks_is_an_error_on_all_of_them():
    odd = rank == size - 1
    double, single = np.ones((2, 3)), np.ones((2, 3), np.float32)
    for mine, others, text in (
        (lambda: keras_hpc.allreduce(double.T), lambda: keras_hpc.allreduce(double), r"shape \(3, 2\)"),
        (lambda: keras_hpc.allreduce(double), lambda: keras_hpc.allreduce(single), "float64"),
        (lambda: keras_hpc.allreduce(double, "max"), lambda: keras_hpc.allreduce(double), "max of 6"),
        (
            lambda: keras_hpc.allreduce(np.ones(2, "i1"), "sum"),
            lambda: keras_hpc.allreduce(np.ones(2, "u1"), "sum"),
            "int8",
        ),
        (lambda: keras_hpc.allreduce([double]), lambda: keras_hpc.allreduce({"a": double}), r"\['a'\]"),
        (lambda: keras_hpc.barrier(), lambda: keras_hpc.allreduce(double), "'barrier' on rank"),
        (lambda: keras_hpc.barrier(), lambda: keras_hpc.broadcast(double), r"'keras_hpc\.broadcast: float64"),
        (lambda: keras_hpc.average({"a": 1}), lambda: keras_hpc.broadcast(double), r"keras_hpc\.average"),
    ):
        with pytest.raises(keras_hpc.PlanMismatchError, match=text):
            (mine if odd else others)()
        assert keras_hpc.allreduce(1, "sum") == size
    # What one rank refuses is its own error there, and is told to the others.
    for mine, error, text in (
        (lambda: keras_hpc.allreduce(np.ones(2, "c8")), TypeError, "complex64"),
        (lambda: keras_hpc.allreduce(double, "avg"), ValueError, "op='avg'"),
        (lambda: keras_hpc.allreduce(double, out=3), TypeError, "takes the result"),
        (lambda: keras_hpc.reduce_scatter(1.0), ValueError, "at least one axis"),
    ):
        with pytest.raises(error if odd else keras_hpc.PlanMismatchError, match=text):
            mine() if odd else keras_hpc.allreduce(double)
        assert keras_hpc.allreduce(1, "sum") == size


def test_broadcast_and_allgather():
    for root in range(size):
        got = keras_hpc.broadcast(np.arange(7) * (rank + 1), root=root)
        np.testing.assert_array_equal(got, np.arange(7) * (root + 1))
    assert keras_hpc.broadcast(rank) == 0
    gathered = keras_hpc.allgather(np.full((rank, 2), rank, np.float64))
    want = np.concatenate([np.full((r, 2), r, np.float64) for r in range(size)])
    np.testing.assert_array_equal(gathered, want)


def test_broadcast_changes_variables_in_place():
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    assert keras_hpc.broadcast(model, root=size - 1) is model
    keras_hpc.check_replicas(model)
    keras.utils.set_random_seed(size - 1)
    same = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    np.testing.assert_array_equal(model.get_weights()[0], same.get_weights()[0])


def test_average():
    assert keras_hpc.average({"b": rank, "a": 1.0}) == pytest.approx({"b": (size - 1) / 2, "a": 1.0})
    assert keras_hpc.average({}) == {}


@pytest.mark.skipif(size == 1, reason="one rank cannot differ")
def test_check_replicas_names_variable_and_rank():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="odd")]
    )
    keras_hpc.broadcast(model)
    keras_hpc.check_replicas(model)
    if rank == size - 1:
        value = np.array(keras.ops.convert_to_numpy(model.get_layer("odd").kernel))
        value.view(np.uint32)[0, 0] ^= 1  # one bit
        model.get_layer("odd").kernel.assign(value)
    with pytest.raises(keras_hpc.ReplicaMismatchError, match=r"odd/kernel.*on rank"):
        keras_hpc.check_replicas(model)


@pytest.mark.skipif(size == 1, reason="one rank agrees with itself")
def test_mismatches_are_errors_on_every_rank():
    with pytest.raises(keras_hpc.PlanMismatchError, match="The keys given"):
        keras_hpc.average({"loss": 1.0, f"odd{rank}": 2.0})
    with pytest.raises(keras_hpc.PlanMismatchError, match="The models of the ranks differ"):
        keras_hpc.check_replicas(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3 + rank)]))


def test_bad_arguments():
    with pytest.raises(ValueError, match="Received: op='avg'"):
        keras_hpc.allreduce(1.0, op="avg")
    with pytest.raises(ValueError, match="Received: team=2"):
        keras_hpc.allreduce(1.0, team=2)
    with pytest.raises(ValueError, match=f"Received: root={size}"):
        keras_hpc.broadcast(1.0, root=size)
    with pytest.raises(TypeError, match="Received: complex64"):
        keras_hpc.allreduce(np.ones(3, np.complex64), op="sum")
    with pytest.raises(ValueError, match="dtype float64"):
        keras_hpc.allreduce(np.ones(3, np.int32), out=np.ones(3, np.int32))
    with pytest.raises(TypeError, match="byte order"):
        keras_hpc.allreduce(np.ones(3, ">f4"), out=np.ones(3, ">f4"))
    with pytest.raises(TypeError, match="type object"):
        keras_hpc.allreduce(object())
    with pytest.raises(ValueError, match="at least one axis"):
        keras_hpc.allgather(1.0)
    with pytest.raises(RuntimeError, match="called twice"):
        keras_hpc.init()


def test_barrier_and_names_of_the_job():
    keras_hpc.barrier()
    assert keras_hpc.is_initialized()
    team = current.job().teams[1]
    assert team.ranks == tuple(range(size))
    assert team.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]


def test_finalize_and_init_again():
    keras_hpc.finalize()
    keras_hpc.finalize()
    with pytest.raises(keras_hpc.NotInitializedError, match=r"init\(\) first"):
        keras_hpc.rank()
    keras_hpc.init(teams=2)
    assert keras_hpc.allreduce(1, op="sum") == size
