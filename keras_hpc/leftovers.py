# SPDX-License-Identifier: Apache-2.0
"""Files that MPI libraries would leave in /dev/shm if the job were killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"
# MPICH makes one file per job and node. MPI_Finalize removes it, which a job that aborts or is killed never calls.
_PREFIX = "mpich_shm_"


def unlink_shared_memory() -> None:
    """Removes the names of the files in /dev/shm through which MPI has mapped this node's shared memory.

    The memory itself stays until the last rank unmaps it, however that rank ends. Call it on one rank of each node,
    after all ranks of the node have gone through MPI_Init.
    """
    mapped = (line.rstrip("\n").partition(_SHARED_MEMORY)[2] for line in Path("/proc/self/maps").open())
    for name in {name for name in mapped if name.startswith(_PREFIX) and not name.endswith(" (deleted)")}:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(_SHARED_MEMORY + name)
