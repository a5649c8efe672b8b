# SPDX-License-Identifier: Apache-2.0
"""`keras-hpc bench`: how long an allreduce takes here, ours, the MPI library's, and what memory alone would allow."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from keras_hpc.job import launch
from keras_hpc.job.team_making import make_team
from keras_hpc.tools import reports, tables
from keras_hpc.tools.bench import allreduce, ranks
from keras_hpc.tools.bench.arguments import seconds, sizes

_SIZES = "4,256,2Ki,16Ki,128Ki,1Mi,8Mi,64Mi"


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "bench",
        allow_abbrev=False,  # `--ranks` is not for the ranks that we start, and is known by its name
        help="time an allreduce against the MPI library's",
        description="Times a sum of float32 over all ranks, in turns with MPI_Allreduce in the same process. Paths: "
        "'private', an array of the process; 'segment', one made by keras_hpc.empty; 'fusion', 32 tensors of a "
        "training step. Starts its own ranks, or measures those that a launcher has started.",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="start so many ranks on this machine (default: 2)")
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is measured and where reports go."""
    parser.add_argument("--bytes", type=sizes, default=sizes(_SIZES), metavar="LIST", help=f"sizes (default: {_SIZES})")
    parser.add_argument("--seconds", type=seconds, default=3.0, metavar="S", help="time for each size (default: 3)")
    parser.add_argument(
        "--wire-dtype",
        choices=["float16", "bfloat16"],
        help="round our values, not MPI's, to 16 bits on their way between nodes",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time and bandwidth there (PNG; needs matplotlib)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure the ranks that a launcher has started, or start some. Collective."""
    ranks.check(arguments.ranks, arguments.plot)
    if not launch.ranks_started():
        # -P: in a clone, the folder of sources is not what was installed.
        command = [sys.executable, "-P", "-m", "keras_hpc", *ranks.without(sys.argv[1:], ("--ranks",))]
        return ranks.start(command, arguments.ranks or 2)
    return measure(ranks.world(arguments.ranks), arguments)


def measure(world: launch.World, arguments: argparse.Namespace, mbit: int | None = None) -> int:
    """Measure, and print a table on the first rank. Collective.

    Args:
        world: the ranks.
        arguments: what `add_options` has added.
        mbit: bandwidth of each node's link, Mbit/s, if it is known.
    """
    reports.check(world, arguments.json, arguments.plot)
    team = make_team(world, 0, threads=0, timeout_seconds=300, stall_seconds=30)
    report = ranks.begin_report(world, "allreduce", mbit)
    if arguments.wire_dtype:
        report["wire_dtype"] = arguments.wire_dtype
    grid = tables.Grid(allreduce.COLUMNS)

    def show(rows: list[allreduce.Row]) -> None:
        if world.rank == 0:
            grid.show([allreduce.cells(row) for row in rows])

    report["rows"] = allreduce.measure(
        team, arguments.bytes, arguments.seconds, done=show, wire_dtype=arguments.wire_dtype, mbit=mbit
    )
    ranks.end_report(world, report, arguments.json)
    if world.rank == 0 and arguments.plot:
        allreduce.plot(report, arguments.plot)
    team.barrier()
    team.close()
    return 0
