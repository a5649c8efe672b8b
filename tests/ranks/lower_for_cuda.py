"""Prints what JAX makes of a training step's reductions for a GPU: the program that XLA's compiler gets.

`compile`: what XLA's compiler makes of it, for a GPU that need not be here.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import order
from keras_hpc.backends import jax as backend
from keras_hpc.backends import jax_device

jax_device._number = 0


def step(x, w1, w2, due):
    gradients = jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])))((w1, w2))
    weight = jnp.float32(len(x))
    reduced = backend._start_and_done(7, gradients[::-1], weight, None)
    *late, updates = backend._start_and_turn(8, gradients, weight, due)
    second = backend._second(8, late)
    total = backend.allreduce(type("Team", (), {"id": 3})(), x, "sum", "mine")
    return reduced, updates, second, total


matrix = jax.ShapeDtypeStruct((4, 4), np.float32)
arguments = (matrix, matrix, matrix, jax.ShapeDtypeStruct((), np.bool_))
if sys.argv[1:] == ["compile"]:
    order.need_no_gpu()
    text = order.compiled(step, *arguments)
else:
    lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = lowered.compiler_ir("hlo").as_hlo_text()
sys.stdout.write(text)
