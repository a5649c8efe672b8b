# SPDX-License-Identifier: Apache-2.0
"""JAX: what XLA's compiler takes. What it has freed goes back to the kernel before the program runs."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.monitoring

from keras_hpc.job import current, resources

_COMPILED = "/jax/core/compile/backend_compile_duration"
_LONG = 0.5  # seconds; what a shorter compilation leaves is not worth a look through all of the heap
# One of XLA's two makers of kernels has a compiler of its own for each, all at once, 0.7 MiB of memory for a kernel. A
# part of a model has twice the kernels of a whole one.
_EMITTERS = "xla_cpu_use_fusion_emitters"


@functools.cache
def watch() -> None:
    """Give memory back after each long compilation, while a job runs: a program and its compiler peak one by one.

    In a heap of many small holes glibc keeps what was freed, up to hundreds of MiB.
    """
    jax.monitoring.register_event_duration_secs_listener(_event)


def _event(event: str, seconds: float, **_: Any) -> None:
    if event == _COMPILED and seconds > _LONG and current.is_initialized():
        resources.trim()


def in_less_memory(jit: Callable[..., Any]) -> Callable[..., Any]:
    """Return `jax.jit` as it compiles programs for CPUs in a fraction of the memory, if this XLA can.

    Their steps may compute longer, by up to a quarter.
    """
    return functools.partial(jit, compiler_options={_EMITTERS: False}) if _has_emitters() else jit


@functools.cache
def _has_emitters() -> bool:
    """Return whether XLA knows the option, which is not a stable one, and the user has not set it."""
    if _EMITTERS in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        jax.jit(lambda: 0, compiler_options={_EMITTERS: False}).lower().compile()
    except jax.errors.JaxRuntimeError:  # "No such compile option"
        return False
    return True
