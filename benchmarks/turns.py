# SPDX-License-Identifier: Apache-2.0
"""Two ways to train, measured in turns, so that both meet the machine as it is then; what was found, as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any


def in_turns(run: Callable[[bool], Any], rounds: int) -> dict[bool, list[Any]]:
    """Return what `run(False)` and `run(True)` return, called `rounds` times each: without, with, with, without."""
    found: dict[bool, list[Any]] = {False: [], True: []}
    for turn in range(2 * rounds):
        way = turn % 4 in (1, 2)
        found[way].append(run(way))
    return found


def write(row: dict[str, Any]) -> None:
    """Write a row as JSON, with the number of ranks, on the first one."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(json.dumps(row | {"ranks": MPI.COMM_WORLD.size}) + "\n")
