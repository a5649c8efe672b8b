# SPDX-License-Identifier: Apache-2.0
"""Files that commands write on the first rank of a job: what cannot be written is refused before it is measured."""

from __future__ import annotations

import sys
from pathlib import Path

from keras_hpc.job import launch


def check(world: launch.World, *files: Path | None) -> None:
    """End the command, on all ranks, if the first rank cannot write a file. Collective."""
    reason = ""
    if world.rank == 0:
        try:
            for file in filter(None, files):
                file.open("ab").close()
        except OSError as error:
            reason = str(error)
    if reason := launch.exchange(world, reason)[0]:
        sys.exit(f"keras-hpc: the report cannot be written. Received: {reason}" if world.rank == 0 else 1)
