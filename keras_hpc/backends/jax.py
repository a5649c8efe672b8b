# SPDX-License-Identifier: Apache-2.0
"""JAX: one FFI call per tensor that starts its reduction, and one for all of them that completes it."""

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge  # the only way to ask whether JAX has started

from keras_hpc.backends import library_path

# Without one, `done` would block one of the few threads that XLA computes with.
NEEDS_THREAD = True

_START, _DONE = "khpc_jax_start", "khpc_jax_done"


@functools.cache
def load() -> None:
    """Registers the FFI handlers. Starts JAX's backends.

    Raises:
        RuntimeError: JAX computes on something else than one CPU device.
        ImportError: the library does not fit this JAX.
    """
    # Only with the CPU backend running is a handler registered, or refused, at once. Registered earlier, a handler
    # that XLA refuses would take the whole CPU backend with it when that starts.
    devices = jax.local_devices()
    if len(devices) != 1 or devices[0].platform != "cpu":
        raise RuntimeError(
            "keras_hpc drives one CPU device per rank. Set JAX_PLATFORMS=cpu, and ask XLA for one host device. "
            f"Received: {devices}"
        )
    path = library_path("keras_hpc_jax")
    library = ctypes.CDLL(path)
    for name in (_START, _DONE):
        try:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            raise ImportError(f"{path} does not fit jax {jax.__version__}: {error}") from error


def limit_threads(count: int) -> tuple[list[str], list[str]]:
    """Limits the threads that XLA computes with, where the user has not set them. Before JAX starts its backends.

    Returns:
        What was set, and what could not be.
    """
    if "NPROC" in os.environ:
        return [], []
    if xla_bridge.backends_are_initialized():
        return [], ["XLA's threads"]
    os.environ["NPROC"] = str(count)  # XLA's name for the size of its pool
    return [f"{count} XLA threads"], []


def reduce(plan: Any, tensors: Sequence[Any], weight: Any = None, active: Any = None) -> list[jax.Array]:
    """Reduces the tensors of a plan over the ranks of its team.

    Collective. XLA starts each reduction when its tensor exists and does what depends on the results after all of
    them. Start and completion must be in one program; outside of `jax.jit` a program of their own serves.

    Args:
        plan: the `Plan` of these tensors.
        tensors: one array for each of the plan's, in its order, of the same shape and dtype.
        weight: this rank's weight in a weighted mean, a number or a scalar array. Defaults to 1.
        active: `None`, or a scalar bool array, the same on all ranks: if false, nothing is communicated and the
            tensors are returned unchanged.

    Returns:
        The reduced arrays, in the plan's order.
    """
    for x, spec in zip(tensors, plan.tensors, strict=True):
        if x.dtype.name != spec.dtype or tuple(x.shape) != tuple(spec.shape):
            raise ValueError(
                f"A tensor does not fit the plan. Expected: {spec.name} of shape {spec.shape} and dtype "
                f"{spec.dtype}. Received: shape {tuple(x.shape)}, dtype {x.dtype.name}"
            )
    # Without x64, float64 is float32 here, which is exact for sample counts below 2^24.
    weight = jnp.asarray(1.0 if weight is None else weight, jnp.result_type(float))
    active = jnp.asarray(True if active is None else active, bool)
    if any(map(is_traced, (*tensors, weight, active))):
        return _start_and_done(plan.id, tensors, weight, active)
    reduced: list[jax.Array] = _program(plan.id)(tensors, weight, active)
    # Ranks agree on the order of reductions because each is complete before the next begins.
    jax.block_until_ready(reduced)
    return reduced


def is_traced(x: Any) -> bool:
    """Returns whether `x` stands for a value inside a transformation such as `jax.jit`."""
    return isinstance(x, jax.core.Tracer)


def to_numpy(x: Any) -> np.ndarray:
    """Returns a copy of the value of an array or variable."""
    return np.array(getattr(x, "value", x))


def assign(variable: Any, value: np.ndarray) -> None:
    """Sets a variable."""
    # JAX may go on reading NumPy's memory, or use it as its own, after it has returned. So it gets its own copy.
    variable.assign(jnp.asarray(np.array(value)))


@functools.cache
def _program(plan: int) -> Any:
    return jax.jit(functools.partial(_start_and_done, plan))


def _start_and_done(plan: int, tensors: Sequence[Any], weight: Any, active: Any) -> list[jax.Array]:
    buffers = [_call(_START, [x], [weight, active], plan=plan, tensor=i)[0] for i, x in enumerate(tensors)]
    return _call(_DONE, buffers, [active], plan=plan)


def _call(target: str, buffers: Sequence[Any], others: Sequence[Any], **attributes: int) -> list[jax.Array]:
    """Calls a handler that changes `buffers` in place."""
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in buffers],
        has_side_effect=True,
        input_output_aliases={i: i for i in range(len(buffers))},
    )
    results: list[jax.Array] = call(*buffers, *others, **{name: np.int32(value) for name, value in attributes.items()})
    return results
