# SPDX-License-Identifier: Apache-2.0
"""Lets the C library keep what a step frees: the next one needs as much, and new pages cost more than to copy them.

By default glibc gives blocks of more than 32 MiB back to the kernel at once, and the ends of its heaps soon; the kernel
must then clear each page again in every step. JAX and PyTorch allocate through it on CPUs, TensorFlow mostly not.
"""

from __future__ import annotations

import ctypes
import functools
import os

# Of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
# What glibc itself reads; whoever sets one of them knows better.
_VARIABLES = (
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


def keep_freed() -> bool:
    """Lets glibc keep freed memory, in one heap for all threads: those of threads are of 64 MiB at most.

    Returns:
        Whether it does so now: not where the user has set glibc's own variables, nor with another C library.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    return all([libc.mallopt(parameter, value) == 1 for parameter, value in settings])


@functools.cache
def give_back() -> None:
    """Gives freed memory back to the kernel: before the first training, what loading the data has left. Once only."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
