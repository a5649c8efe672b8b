# SPDX-License-Identifier: Apache-2.0
"""Collectives that hand values on: broadcast, allgather, alltoall, and those of Python values."""

import keras
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import keras_hpc
from keras_hpc.job import current

RANKS = {"torch": (3,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
last = size - 1
several = pytest.mark.skipif(size == 1, reason="one rank agrees with itself")


@pytest.fixture(scope="module", autouse=True)
def job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


@pytest.mark.parametrize(
    ("root", "others"),
    [(7, 0.0), (np.float32(1.5), 0.0), (True, 0), (2.5, 1), (np.int64(3), np.float64(0)), ("best", None), (None, 0)],
    ids=str,
)
def test_broadcast_gives_numbers_of_the_roots_kind(root, others):
    got = keras_hpc.broadcast(root if rank == last else others, root=np.int64(last))
    assert got == root
    assert type(got) is type(root)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float64", "uint8", "bool", "complex64", ">f8", "S3"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays_of_every_dtype(dtype, shape):
    mine = np.full(shape, rank + 1).astype(dtype)
    got = keras_hpc.broadcast(mine, root=last)
    np.testing.assert_array_equal(got, np.full(shape, size).astype(dtype))
    assert got.dtype == mine.dtype.newbyteorder("=")
    assert got.shape == shape
    if shape:
        np.testing.assert_array_equal(keras_hpc.allgather(mine.T), np.concatenate(world.allgather(mine.T)))


def test_tensors_stay_tensors():
    x = keras.ops.convert_to_tensor(np.full((rank + 1, 2), rank, np.float32))
    gathered = keras_hpc.allgather(x)
    assert keras.ops.is_tensor(gathered)
    want = np.concatenate([np.full((r + 1, 2), r, np.float32) for r in range(size)])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(gathered), want)
    sent = keras_hpc.alltoall(keras.ops.convert_to_tensor(np.full(size, rank, np.int32)))
    assert keras.ops.is_tensor(sent)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(sent), np.arange(size))
    got = keras_hpc.broadcast(keras.ops.convert_to_tensor(np.float32(rank)), root=last)
    assert keras.ops.is_tensor(got)
    assert float(got) == last


def test_structures():
    weights = np.full((2, 3), rank, np.float32)
    mine = {"w": keras.ops.convert_to_tensor(weights), "epoch": rank, "more": [(weights.T, f"rank {rank}"), {}]}
    got = keras_hpc.broadcast(mine, root=last)
    assert keras.ops.is_tensor(got["w"])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(got["w"]), np.full((2, 3), last))
    assert got["epoch"] == last
    ((array, text), nothing) = got["more"]
    np.testing.assert_array_equal(array, np.full((3, 2), last))
    assert (text, nothing) == (f"rank {last}", {})
    assert keras_hpc.broadcast([1.0 * rank, [rank]], root=last) == [1.0 * last, [last]]
    assert keras_hpc.broadcast({}) == {}


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch's modules")
def test_modules_of_torch():
    import torch

    torch.manual_seed(rank)
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module[1].running_mean += rank
    state = keras_hpc.broadcast(module.state_dict(), root=last)
    assert keras_hpc.broadcast(module, root=last) is module
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    everyone = world.allgather([value.numpy().tolist() for value in module.state_dict().values()])
    assert everyone == everyone[:1] * size
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's trees")
def test_trees_of_jax():
    import jax

    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, *children):
            self.children = children

        def tree_flatten(self):
            return self.children, None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    got = keras_hpc.broadcast(Pair(jax.numpy.full(2, rank), rank), root=last)
    assert isinstance(got.children[0], jax.Array)
    np.testing.assert_array_equal(got.children[0], [last, last])
    assert got.children[1] == last
    total = keras_hpc.allreduce(Pair(jax.numpy.full(2, rank), rank), "sum")
    np.testing.assert_array_equal(total.children[0], np.full(2, size * last // 2))


def test_alltoall():
    x = np.arange(2 * size + 1).reshape(-1, 1) + 100 * rank
    bounds = [-(-len(x) * r // size) for r in range(size + 1)]
    want = np.concatenate([(x - 100 * rank + 100 * r)[bounds[rank] : bounds[rank + 1]] for r in range(size)])
    np.testing.assert_array_equal(keras_hpc.alltoall(x), want)
    mine = np.repeat(np.arange(size), np.arange(size)) + 10.0 * rank  # r rows for rank r
    np.testing.assert_array_equal(
        keras_hpc.alltoall(mine, splits=range(size)), np.repeat(10.0 * np.arange(size) + rank, rank)
    )
    with pytest.raises(ValueError, match=r"sum 3.*Received: splits="):
        keras_hpc.alltoall(np.zeros(3), splits=[4] * size)


def test_python_values():
    mine = {"name": f"r{rank}", 3: (rank, None, b"\x00\xff"), "weights": np.full((2, 2), rank, np.float32)}
    everyone = keras_hpc.allgather_object(mine)
    assert [other["name"] for other in everyone] == [f"r{r}" for r in range(size)]
    assert [other[3] for other in everyone] == [(r, None, b"\x00\xff") for r in range(size)]
    for r, other in enumerate(everyone):
        np.testing.assert_array_equal(other["weights"], np.full((2, 2), r))
    assert keras_hpc.broadcast_object({"epoch": 7} if rank == last else object(), root=last) == {"epoch": 7}
    assert keras_hpc.allgather_object(None) == [None] * size


def _rows(width, dtype="float32"):
    return lambda: keras_hpc.allgather(np.ones((1 + rank, width), dtype))


@several
@pytest.mark.parametrize(
    ("mine", "others", "text"),
    [
        (_rows(2), _rows(3), r"float32 rows of shape \(2,\).*float32 rows of shape \(3,\)|\(3,\).*\(2,\)"),
        (_rows(2), _rows(2, "int32"), "int32"),
        (lambda: keras_hpc.broadcast(np.ones(4)), lambda: keras_hpc.broadcast(np.ones((2, 2))), r"\(2, 2\)"),
        (lambda: keras_hpc.broadcast(np.ones(4)), lambda: keras_hpc.broadcast(np.ones(4, "f4")), "float32"),
        (lambda: keras_hpc.broadcast(np.ones(0)), lambda: keras_hpc.broadcast(np.ones(2)), r"\(0,\)"),
        (lambda: keras_hpc.broadcast(np.ones(2)), lambda: keras_hpc.broadcast(1.0), "a number, text or None"),
        (lambda: keras_hpc.broadcast(np.ones(2), root=last), lambda: keras_hpc.broadcast(np.ones(2)), f"rank {last}"),
        (lambda: keras_hpc.broadcast({"a": np.ones(2)}), lambda: keras_hpc.broadcast({"b": np.ones(2)}), r"\['b'\]"),
        (lambda: keras_hpc.broadcast({"a": np.ones(2)}), lambda: keras_hpc.broadcast(np.ones(2)), "values given to"),
        (lambda: keras_hpc.alltoall(np.ones((2, 2))), lambda: keras_hpc.alltoall(np.ones((2, 3))), r"\(3,\)"),
        (lambda: keras_hpc.broadcast_object(1), lambda: keras_hpc.allgather_object(1), "keras_hpc.allgather_object"),
        (lambda: keras_hpc.broadcast_object(1, last), lambda: keras_hpc.broadcast_object(1), "value of rank 0"),
        (lambda: current.job().teams[0].allgather_object(1, "a"), lambda: keras_hpc.allgather_object(1), "'a: "),
    ],
)
def test_what_differs_is_an_error_on_every_rank(mine, others, text):
    with pytest.raises(keras_hpc.PlanMismatchError, match=text):
        (mine if rank == last else others)()
    assert keras_hpc.allreduce(1, "sum") == size
    np.testing.assert_array_equal(keras_hpc.allgather(np.array([rank])), np.arange(size))


@several
@pytest.mark.parametrize(
    ("mine", "error", "text"),
    [
        (lambda: keras_hpc.allgather_object(object()), TypeError, "value of type object"),
        (lambda: keras_hpc.broadcast_object({"a": {1}}, root=last), TypeError, r"value\['a'\] of type set"),
        (lambda: keras_hpc.broadcast(np.array([None])), TypeError, "Expected a number"),
        (lambda: keras_hpc.broadcast(1, root=size), ValueError, "`root` is a rank"),
        (lambda: keras_hpc.broadcast(1, root=True), ValueError, "root=True"),
        (lambda: keras_hpc.allgather(1.0), ValueError, "at least one axis"),
        (lambda: keras_hpc.alltoall(np.ones(2), splits=[1]), ValueError, "`splits`"),
        (lambda: keras_hpc.average({"loss": "x"}), ValueError, "convert"),
        (lambda: keras_hpc.empty("x"), TypeError, "integer"),
        (lambda: keras_hpc.empty(-1), ValueError, "negative"),
    ],
)
def test_what_one_rank_refuses_is_told_to_the_others(mine, error, text):
    with pytest.raises(error if rank == last else keras_hpc.PlanMismatchError, match=text):
        mine() if rank == last else keras_hpc.broadcast_object(1, root=last)
    assert keras_hpc.allreduce(1, "sum") == size
