# SPDX-License-Identifier: Apache-2.0
"""Lets the C library keep what a step frees: the next one needs as much, and new pages cost more than to copy them.

By default glibc gives blocks of more than 32 MiB back to the kernel at once, and the ends of its heaps soon; the kernel
must then clear each page again in every step. JAX and PyTorch allocate through it on CPUs, TensorFlow mostly not.
"""

from __future__ import annotations

import ctypes
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

_holds_more = False  # than glibc would by itself, and nothing was given back since


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
    global _holds_more
    _holds_more = all([libc.mallopt(parameter, value) == 1 for parameter, value in settings])
    return _holds_more


def give_back() -> None:
    """Gives back to the kernel, once, what `keep_freed` has kept: before a training, what loading the data has left."""
    global _holds_more
    if _holds_more:
        _holds_more = False
        ctypes.CDLL(None).malloc_trim(0)
