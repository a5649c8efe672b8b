# SPDX-License-Identifier: Apache-2.0
"""What a rank takes of its node: its share of the cores, and the memory that steps free.

Frameworks would start a thread for every core, on every rank.

By default glibc gives blocks of more than 32 MiB back to the kernel at once, and the ends of its heaps soon; the kernel
must then clear each page again in every step. JAX and PyTorch allocate through glibc on CPUs, TensorFlow mostly not. So
freed memory is kept: the next step needs as much, and new pages cost more than to copy them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence

# Set for libraries that are loaded later; what the user has set stays.
_OMP = "OMP_NUM_THREADS"
_NO_POOL = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
# What `keras_hpc run` has set it to, where it has: that is not the user's wish.
BY_RUN = "KERAS_HPC_RUN_OMP_NUM_THREADS"


def share_cores(
    cores_of_node: int,
    ranks_of_node: int,
    communication_threads: int,
    limit: Callable[[int], tuple[list[str], list[str]]],
    virtual: bool = False,
) -> str:
    """Limits this rank's compute threads to its share of the cores, where the user has not set them.

    Args:
        cores_of_node: cores that this node's ranks may use together.
        ranks_of_node: number of ranks on this node.
        communication_threads: threads of this rank that communicate; they come off its share.
        limit: the backend's `limit_threads`.
        virtual: whether there are virtual ranks: the number of threads can change bits, so it is one, whatever cores
            as many ranks get.

    Returns:
        What was set, and what could not be, as one line.
    """
    share = max(1, cores_of_node // ranks_of_node - communication_threads)
    if virtual:
        share = 1
        if os.environ.get(BY_RUN) == os.environ.get(_OMP):  # which depends on the number of ranks, too
            os.environ.pop(_OMP, None)
    done, failed = limit(share)
    if _OMP not in os.environ:
        os.environ[_OMP] = str(share)
        done.append(f"{_OMP}={share}")
    text = f"{ranks_of_node} rank{_s(ranks_of_node)} on {cores_of_node} core{_s(cores_of_node)} of this node"
    if done:
        text += f"; set {', '.join(done)}"
    if failed:
        text += f"; could not set {', '.join(failed)}: the backend had started its threads before keras_hpc.init()"
    return text


_THREADS = (_OMP, "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC")


def settings(names: Sequence[str] = _THREADS) -> dict[str, str]:
    """Return what the environment says of threads."""
    return {name: os.environ[name] for name in names if name in os.environ}


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Afterwards the environment says of threads, and of TensorFlow's pool, what it said before."""
    names = (*_THREADS, _NO_POOL)
    before = settings(names)
    try:
        yield
    finally:
        for name in settings(names).keys() - before.keys():
            del os.environ[name]


def _s(count: int) -> str:
    return "s" * (count != 1)


# Numbers from <malloc.h>, with what `keep_freed` sets and what glibc begins with.
_KEEPING = {-8: 1, -4: 0, -1: -1}  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
_USUAL = {-8: 0, -4: 65536, -1: 128 * 1024}
# What glibc itself reads; whoever sets one of them knows better.
_VARIABLES = (
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)

_MMAP_THRESHOLD, _LARGE = -3, 4 << 20  # M_MMAP_THRESHOLD, bytes

_holds_more = False  # than glibc would by itself, and nothing was given back since


def return_large() -> None:
    """Lets glibc give large blocks back to the kernel as soon as they are freed.

    By itself it keeps blocks of up to 32 MiB, once it has seen one, in a heap that shrinks at its end only. Not where
    the user has set glibc's own variables. It cannot be undone: glibc does not go back to a threshold that moves.
    """
    libc = _tunable_libc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)


def keep_freed() -> bool:
    """Lets glibc keep freed memory, in one heap for all threads: those of threads are of 64 MiB at most.

    Returns:
        Whether it does so now: not where the user has set glibc's own variables, nor with another C library.
    """
    libc = _tunable_libc()
    if libc is None:
        return False
    global _holds_more
    _holds_more = all([libc.mallopt(parameter, value) == 1 for parameter, value in _KEEPING.items()])
    return _holds_more


def _tunable_libc() -> ctypes.CDLL | None:
    """Return glibc; None where it is another C library, or the user has set its variables."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return None
    if any(name in os.environ for name in _VARIABLES) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    return libc


def pool_nothing() -> None:
    """Lets TensorFlow take its memory from the C library, unless it has begun to, or the user has said how.

    Its own pool gives nothing back and grows by doubling: what a rank saves by a smaller part of something stays there.
    """
    os.environ.setdefault(_NO_POOL, "true")


def keep_no_longer() -> None:
    """Lets glibc work as usual again, and gives back to the kernel what was kept."""
    libc = ctypes.CDLL(None)
    for parameter, value in _USUAL.items():
        libc.mallopt(parameter, value)
    trim()


def give_back() -> None:
    """Give back to the kernel, once, what `keep_freed` has kept: before a training, what loading the data has left."""
    global _holds_more
    if _holds_more:
        _holds_more = False
        trim()


def trim() -> None:
    """Give back to the kernel all pages of the heap that hold nothing; not with another C library than glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
