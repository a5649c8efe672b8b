# SPDX-License-Identifier: Apache-2.0
"""JAX: says why a program cannot be transformed that calls the engine, where JAX would name only the primitive."""

from typing import Any

from jax.interpreters import ad, batching


def refusing(primitive: Any) -> Any:
    """Return a call of the engine, of which `jax.vmap` and derivatives raise an error that says what to do.

    Args:
        primitive: the call. It has one shape on all ranks, which was planned without the axis that `jax.vmap` adds.
    """
    batching.primitive_batchers[primitive] = _with_an_axis
    ad.primitive_jvps[primitive] = _differentiated
    return primitive


def _with_an_axis(*_: Any, target: str, **__: Any) -> Any:
    raise NotImplementedError(
        "keras_hpc cannot average gradients inside of jax.vmap. To train several models at once compute gradients in "
        "jax.vmap, and update outside of it: build the optimizer for variables that have the axis of the models, too. "
        f"Received: {target} in jax.vmap"
    )


def _differentiated(*_: Any, target: str, **__: Any) -> Any:
    raise NotImplementedError(
        "keras_hpc cannot differentiate the update of an optimizer, whose gradients it averages. For an inner step of "
        "learning to learn, update by hand: weight - rate * gradient, or keras_hpc.allreduce(gradient) for that of all "
        f"ranks, which has a gradient. Received: the derivative of {target}"
    )
