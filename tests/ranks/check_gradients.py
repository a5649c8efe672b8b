# SPDX-License-Identifier: Apache-2.0
"""The gradient of allreduce, and its calls inside compiled functions, on every backend."""

import functools

import keras
import numpy as np
import pytest
from mpi4py import MPI

import keras_hpc

# What PyTorch's compiler says of itself, when it looks at results of functions that it left for.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
BACKEND = keras.backend.backend()
X = np.array([1.0, 2.0, -3.0], np.float32) + rank
ops = keras.ops
if BACKEND == "jax":
    import jax

    compiled = jax.jit

    def gradient(function):
        return jax.grad(function)

elif BACKEND == "torch":
    import torch

    compiled = functools.partial(torch.compile, backend="eager")

    def gradient(function):
        def of(x):
            x = x.clone().requires_grad_()
            function(x).backward()
            return x.grad

        return of

else:
    import tensorflow as tf

    compiled = tf.function

    def gradient(function):
        def of(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            return tape.gradient(y, x)

        return of


@pytest.fixture(scope="module", autouse=True)
def job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


@pytest.fixture(params=["eagerly", "compiled"])
def gradient_at_x(request):
    def run(function):
        # PyTorch compiles the function, and not what differentiates it.
        if request.param == "compiled":
            of = gradient(compiled(function)) if BACKEND == "torch" else compiled(gradient(function))
        else:
            of = gradient(function)
        return ops.convert_to_numpy(of(ops.convert_to_tensor(X)))

    return run


def test_gradients_of_each_operation(gradient_at_x):
    """Each rank weighs the result its own way: what comes back is the gradient of all losses together."""
    total = size * (size + 1) / 2
    wants = {
        "sum": np.full(3, total),
        "mean": np.full(3, total / size),
        "max": np.full(3, total * (rank == size - 1)),
        "min": np.full(3, total * (rank == 0)),
    }
    for op, want in wants.items():
        got = gradient_at_x(lambda x, op=op: ops.sum(x * x) / 2 + (rank + 1) * ops.sum(keras_hpc.allreduce(x, op)))
        np.testing.assert_allclose(got, X + want, rtol=1e-6)


def test_gradients_where_ranks_hold_the_same_extreme(gradient_at_x):
    got = gradient_at_x(lambda x: ops.sum(keras_hpc.allreduce(x - float(rank), "max")))
    np.testing.assert_allclose(got, np.ones(3), rtol=1e-6)


def test_gradients_of_structures_and_parts(gradient_at_x):
    def structure(x):
        reduced = keras_hpc.allreduce({"a": x, "b": [2 * x]}, "sum")
        return ops.sum(reduced["a"]) + (rank + 1) * ops.sum(reduced["b"][0])

    np.testing.assert_allclose(gradient_at_x(structure), np.full(3, size + size * (size + 1)), rtol=1e-6)
    weights = np.concatenate([np.full(-(-3 * (r + 1) // size) - -(-3 * r // size), r + 1.0) for r in range(size)])
    np.testing.assert_allclose(
        gradient_at_x(lambda x: (rank + 1.0) * ops.sum(keras_hpc.reduce_scatter(x))), weights, rtol=1e-6
    )


def test_second_gradients():
    if BACKEND == "torch":
        x = torch.tensor(X, requires_grad=True)
        (first,) = torch.autograd.grad((keras_hpc.allreduce(x * x, "sum") ** 2).sum() / 2, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    else:
        second = gradient(
            lambda v: ops.sum(gradient(lambda x: ops.sum(keras_hpc.allreduce(x * x, "sum") ** 2) / 2)(v))
        )(ops.convert_to_tensor(X))
    # Of sum_r first_r by x, with first_r = 2 x_r size S and S the sum of the squares.
    everyone = np.stack([np.array([1.0, 2.0, -3.0]) + r for r in range(size)])
    want = 2 * size * (everyone**2).sum(axis=0) + 4 * X * size * everyone.sum(axis=0)
    np.testing.assert_allclose(ops.convert_to_numpy(second), want, rtol=1e-5)


def test_a_product_has_no_gradient(gradient_at_x):
    with pytest.raises(TypeError, match="no gradient of a product"):
        gradient_at_x(lambda x: ops.sum(keras_hpc.allreduce(x, "product")))
    keras_hpc.barrier()


def test_calls_in_a_program_keep_their_order():
    """Of equal shape, dtype and operation, independent of each other, and step after step."""

    @compiled
    def step(x):
        return [keras_hpc.allreduce((i + 1) * x, "sum") for i in range(8)]

    x = ops.convert_to_tensor(X)
    total = sum(np.array([1.0, 2.0, -3.0], np.float32) + r for r in range(size))
    for _ in range(20):
        for i, y in enumerate(step(x)):
            np.testing.assert_allclose(ops.convert_to_numpy(y), (i + 1) * total, rtol=1e-6)
        assert keras_hpc.allreduce(1, "sum") == size


def test_ranks_need_not_trace_alike():
    """One rank compiles anew in each step, the other once; and Python's own calls come right after."""
    step = compiled(lambda x: keras_hpc.allreduce(ops.sum(x), "sum"))
    for length in (3, 4, 5, 3):
        mine = np.ones(length if rank == 0 else 3, np.float32)
        later = step(ops.convert_to_tensor(mine))
        assert keras_hpc.allreduce(rank, "max") == size - 1
        assert float(later) == length + 3 * (size - 1)


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's control flow")
def test_calls_in_loops_branches_and_maps():
    @jax.jit
    def step(x):
        x = jax.lax.cond(x.sum() > -100, lambda v: keras_hpc.allreduce(v, "sum"), lambda v: v, x)
        x, _ = jax.lax.scan(lambda carry, _: (keras_hpc.allreduce(carry, "mean") + 1, None), x, None, length=3)
        x = jax.lax.fori_loop(0, 2, lambda _, carry: keras_hpc.allreduce(carry, "max"), x)
        return x + jax.vmap(lambda v: keras_hpc.allreduce(v, "sum"))(jax.numpy.ones(3))

    total = sum(np.array([1.0, 2.0, -3.0], np.float32) + r for r in range(size))
    np.testing.assert_allclose(step(X), total + 3 + size, rtol=1e-6)
    remat = jax.checkpoint(lambda v: keras_hpc.allreduce(v * v, "sum"))
    np.testing.assert_allclose(jax.jit(jax.grad(lambda v: remat(v).sum()))(X), 2 * size * X, rtol=1e-6)


@pytest.mark.skipif(size == 1, reason="one rank agrees with itself")
def test_mismatches_in_programs():
    errors = {"jax": "JaxRuntimeError, or XlaRuntimeError", "tensorflow": "InternalError", "torch": "PlanMismatchError"}
    step = compiled(lambda x: keras_hpc.allreduce(x, "sum"))
    with pytest.raises(Exception, match=r"shape \(1,\).* on rank 0; .*shape \(2,\)") as info:
        ops.convert_to_numpy(step(ops.convert_to_tensor(np.ones(1 + rank, np.float32))))
    assert info.typename in errors[BACKEND]  # JAX 0.5 has another name
    one = ops.convert_to_tensor(np.ones(3, np.float32))
    np.testing.assert_array_equal(ops.convert_to_numpy(step(one)), np.full(3, size))
    keras_hpc.barrier()
