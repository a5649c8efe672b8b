# SPDX-License-Identifier: Apache-2.0
"""Ranks to measure, and the report on them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_hpc.errors import LaunchError
from keras_hpc.job import launch
from keras_hpc.tools import launchers, tables
from keras_hpc.tools.bench import machine


def check(count: int | None, plot: Path | None) -> None:
    """Refuse what cannot be measured.

    Args:
        count: ranks that are wanted, in all.
        plot: a file to draw into.
    """
    if plot and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    if count is not None and count < 2:
        sys.exit(f"One rank has nothing to reduce. Expected two or more. Received: --ranks {count}")


def start(command: Sequence[str], count: int) -> int:
    """Run a command on so many ranks of this machine, and return its exit status."""
    try:
        mpiexec = launchers.find_mpiexec(launchers.find_library())
        environment = os.environ | launchers.mpiexec_environment(count, placed=False, pinned=True)
        environment |= tables.environment()
        environment.setdefault("OMP_NUM_THREADS", "1")
        return subprocess.call([*launchers.mpiexec_command(mpiexec, count), *command], env=environment)
    except LaunchError as error:
        sys.exit(str(error))


def world(*wanted: int | None) -> launch.World:
    """Connect to the ranks that a launcher has started; each takes a core, if there are enough.

    Args:
        *wanted: numbers of ranks or hosts that the user asks us to start, which is too late.
    """
    if any(wanted):
        sys.exit(
            f"--ranks and --hosts start ranks, but there is a launcher already: {launch.ranks_started()}. Leave them "
            "out."
        )
    found = launch.connect(None)
    cores = sorted(os.sched_getaffinity(0))
    local = [rank for rank in range(found.size) if found.node_of_rank[rank] == found.node]
    if len(cores) >= len(local):
        os.sched_setaffinity(0, {cores[local.index(found.rank)]})
    return found


def begin_report(world: launch.World, kind: str, mbit: int | None = None) -> dict[str, Any]:
    """Say on the first rank what is measured, and begin a report with that.

    Args:
        world: the ranks.
        kind: of the report.
        mbit: bandwidth of each node's link, Mbit/s, if it is known; 0: no limit.
    """
    nodes = len(set(world.node_of_rank))
    report: dict[str, Any] = {
        "kind": kind,
        "machine": machine.describe(),
        "mpi": launch.mpi_version(world),
        "ranks": world.size,
        "nodes": nodes,
    }
    if mbit is not None:
        report["mbit"] = mbit
    if world.rank == 0:
        network = "" if mbit is None else f" ({mbit} Mbit/s each way)" if mbit else " (links without a limit)"
        print(f"{world.size} ranks on {nodes} node(s){network}, {report['mpi']}; {report['machine']}", flush=True)
    return report


def end_report(world: launch.World, report: dict[str, Any], file: Path | None) -> None:
    """Write a report, on the first rank."""
    if world.rank == 0 and file:
        file.write_text(json.dumps(report, indent=2) + "\n")


def printer(world: launch.World, table: Callable[..., str]) -> Callable[[Any], None]:
    """Return what prints rows on the first rank as soon as they are known, the first of them with a header."""
    first = True

    def show(rows: Any) -> None:
        nonlocal first
        if world.rank == 0:
            print(table(rows, header=first), flush=True)
        first = False

    return show


def without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the words of a command without these options and their values."""
    kept = []
    for before, word in zip(["", *words], words, strict=False):
        if before not in options and word not in options and not word.startswith(tuple(f"{o}=" for o in options)):
            kept.append(word)
    return kept
