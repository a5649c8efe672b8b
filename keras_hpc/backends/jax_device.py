# SPDX-License-Identifier: Apache-2.0
"""JAX on a GPU: which one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import xla_bridge  # the only way to ask whether JAX has started

_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_number: int | None = None


def number_of_gpu() -> int | None:
    """Return the number of the GPU on which JAX computes, among those that this process sees; None: the CPU."""
    return _number


def sees_gpus() -> bool:
    """Return whether JAX can compute on GPUs here: whether it has its plugin for CUDA, and may use it."""
    platforms = jax.config.jax_platforms or "cuda"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(map(importlib.util.find_spec, plugins)) and bool({"cuda", "gpu"} & set(platforms.split(",")))


@contextlib.contextmanager
def use_device(device: Any) -> Iterator[None]:
    """Compute on one GPU, or, with None, on the CPU, also where there are GPUs. Before JAX starts its backends.

    Args:
        device: the `Device` of this rank, or None.
    """
    global _number
    limited = False
    if not xla_bridge.backends_are_initialized():  # else `load` looks at what JAX has
        if device is None:
            jax.config.update("jax_platforms", "cpu")
        else:
            jax.config.update("jax_cuda_visible_devices", str(device.ordinal))
            limited = device.ranks > 1 and _MEMORY not in os.environ  # else the first one takes three quarters of it
    if limited:
        os.environ[_MEMORY] = f"{0.8 / device.ranks:.2f}"
    _number = None if device is None else device.ordinal
    yield
    _number = None
    if limited:
        os.environ.pop(_MEMORY, None)
