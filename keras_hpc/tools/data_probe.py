# SPDX-License-Identifier: Apache-2.0
"""How fast one rank reads files, and how fast all ranks do at once. For `doctor --data`."""

from __future__ import annotations

import glob
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from keras_hpc.job.current import Job

_BLOCK_BYTES = 4 << 20
_SECONDS = 3.0


def files_of(path: str) -> list[str]:
    """Return the files of a folder, a pattern or a file.

    Raises:
        FileNotFoundError: there are none with bytes in them.
    """
    if os.path.isdir(path):
        found = [str(file) for file in Path(path).rglob("*") if file.is_file()]
    else:
        found = [file for file in glob.glob(path) if os.path.isfile(file)]
    found = sorted(file for file in found if os.path.getsize(file))
    if not found:
        raise FileNotFoundError(f"Expected a file, a folder of files or a pattern. Received: {path!r} without any")
    return found


def measure(job: Job, files: list[str]) -> dict[str, Any]:
    """Read blocks of files at random, first by one rank, then by all at once. Collective; the same on all ranks.

    What the kernel has in memory of a block is dropped before, so that it comes from the disk or the file system: not
    where the file system does not let go of it, or a server has it in memory.

    Args:
        job: the ranks.
        files: what to read; the same on all ranks.

    Returns:
        bytes per second of `alone`, of the `slowest` and `fastest` rank among all, and of each node, `nodes`.
    """
    team = job.teams[0]
    team.barrier()
    alone = _read(files, 0) if job.rank == 0 else 0.0
    team.barrier()
    together = team.allgather(np.array([_read(files, 1 + job.rank)]))
    nodes = np.bincount(job.node_of_rank, weights=together)
    return {
        "alone": float(team.allgather(np.array([alone]))[0]),
        "slowest": float(together.min()),
        "fastest": float(together.max()),
        "nodes": nodes.tolist(),
    }


def describe(found: dict[str, Any]) -> str:
    """Return what was measured in words."""
    unit = 1e6
    nodes = found["nodes"]
    each = f", a node {min(nodes) / unit:,.0f} to {max(nodes) / unit:,.0f}" if len(nodes) > 1 else ""
    return (
        f"one rank alone {found['alone'] / unit:,.0f} MB/s; all at once: a rank {found['slowest'] / unit:,.0f} to "
        f"{found['fastest'] / unit:,.0f}{each}, together {sum(nodes) / unit:,.0f}"
    )


def _read(files: list[str], seed: int) -> float:
    """Return the bytes per second at which this rank reads for a while."""
    random = np.random.default_rng(seed)
    sizes = np.array([os.path.getsize(file) for file in files])
    blocks = -(-sizes // _BLOCK_BYTES)
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < _SECONDS:
        number = int(random.choice(len(files), p=blocks / blocks.sum()))
        offset = int(random.integers(blocks[number])) * _BLOCK_BYTES
        with open(files[number], "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), offset, _BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
            done += os.preadv(file.fileno(), [buffer], offset)
    return done / (time.perf_counter() - begin)
