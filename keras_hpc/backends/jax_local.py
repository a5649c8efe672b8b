# SPDX-License-Identifier: Apache-2.0
"""JAX: local steps. XLA orders by data: a step begins with a gradient, and weights are averaged after their anchors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core

from keras_hpc.backends import jax as backend
from keras_hpc.backends.jax_device import number_of_gpu


def begin(plan: Any, samples: Any, gradient: Any) -> tuple[jax.Array, jax.Array]:
    """Begin a step of a plan with local steps; see `local_steps`."""
    if number_of_gpu() is not None:
        raise RuntimeError(
            "On JAX, local steps are for CPUs so far. Expected another schedule, or init(device='cpu'). Received: a GPU"
        )
    gradient = jnp.asarray(gradient)
    samples = jnp.asarray(samples, jnp.result_type(float))
    if backend.is_traced(gradient) or backend.is_traced(samples):
        begun, mode = _begin(plan.id, gradient, samples)
    else:
        begun, mode = jax.block_until_ready(_program(_begin, plan.id)(gradient, samples))
    return begun, mode


def set_anchors(plan: Any, mode: Any, due: Any, values: Callable[[], Sequence[Any]]) -> jax.Array:
    """Give the engine the weights before a step's update, if it is due. What is returned is known only then."""
    weights = list(map(jnp.asarray, values()))
    if any(map(backend.is_traced, (mode, *weights))):
        return _set_anchors(plan.id, mode, weights)
    after: jax.Array = jax.block_until_ready(_program(_set_anchors, plan.id)(mode, weights))
    return after


def average(plan: Any, due: Any, variables: Sequence[Any]) -> None:
    """Give variables what a plan makes of them, if it is due."""
    values = backend.reduce(plan, [variable.value for variable in variables], active=due)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def choose(due: Any, average: Callable[[Any], Sequence[Any]], gradients: Sequence[Any]) -> Sequence[Any]:
    """Return the average of gradients, if it is due, or the gradients."""
    return average(due)


def update_if(due: Any, update: Callable[[], None], otherwise: Callable[[], None], kept: Sequence[Any]) -> None:
    """Make an update that changes, unless it is due, none of the variables `kept`; the rest of it is done anyway."""
    before = [variable.value for variable in kept]
    update()
    for variable, value in zip(kept, before, strict=True):
        variable.assign(jnp.where(due, variable.value, value))


@functools.cache
def _program(program: Callable[..., Any], plan: int) -> Any:
    return jax.jit(functools.partial(program, plan))


def _begin(plan: int, gradient: Any, samples: Any) -> list[jax.Array]:
    mode = core.ShapedArray((), np.dtype(np.int32))
    return backend._call("khpc_jax_local_begin", [gradient], [samples], [mode], plan=plan)


def _set_anchors(plan: int, mode: Any, weights: Sequence[Any]) -> jax.Array:
    zero = core.ShapedArray((), np.dtype(np.int32))
    zeros = [
        backend._call("khpc_jax_local_anchor", [], [value, mode], [zero], plan=plan, tensor=number)[0]
        for number, value in enumerate(weights)
    ]
    after: jax.Array = sum(zeros, start=mode)
    return after
