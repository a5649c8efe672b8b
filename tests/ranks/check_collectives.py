# SPDX-License-Identifier: Apache-2.0
"""The collectives that users call, over real MPI, against mpi4py and NumPy."""

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
    strided = np.arange(10.0)[::2]
    np.testing.assert_array_equal(keras_hpc.allreduce(strided), strided)


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
    with pytest.raises(TypeError, match="mean of integers"):
        keras_hpc.allreduce(np.ones(3, np.int32))
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
