# SPDX-License-Identifier: Apache-2.0
"""JAX: what XLA's compiler has freed goes back to the kernel before the program runs."""

import functools
from typing import Any

import jax.monitoring

from keras_hpc.job import current, resources

_COMPILED = "/jax/core/compile/backend_compile_duration"
_LONG = 0.5  # seconds; what a shorter compilation leaves is not worth a look through all of the heap


@functools.cache
def watch() -> None:
    """Give memory back after each long compilation, while a job runs: a program and its compiler peak one by one.

    In a heap of many small holes glibc keeps what was freed, up to hundreds of MiB.
    """
    jax.monitoring.register_event_duration_secs_listener(_event)


def _event(event: str, seconds: float, **_: Any) -> None:
    if event == _COMPILED and seconds > _LONG and current.is_initialized():
        resources.trim()
