# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc bench`: how fast the engine is on this machine, with this MPI."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_hpc import launch
from keras_hpc.bench import allreduce
from keras_hpc.teams import make_team

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_SIZES = "4,256,2Ki,16Ki,128Ki,1Mi,8Mi,64Mi"


def add_command(commands: Any) -> None:
    """Adds the subcommand to the parser."""
    parser = commands.add_parser("bench", help="measure the engine against the MPI library")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    sub = kinds.add_parser(
        "allreduce",
        help="time an allreduce against MPI_Allreduce and against memory",
        description="Times a sum of float32 over all ranks, in turns with MPI_Allreduce in the same process. Paths: "
        "'private', an array of the process; 'segment', one made by keras_hpc.empty; 'fusion', 32 tensors of a "
        "training step. Starts its own ranks, or measures those that a launcher has started.",
    )
    sub.add_argument("--ranks", type=int, metavar="N", help="start so many ranks on this machine (default: 2)")
    sub.add_argument("--bytes", type=_sizes, default=_sizes(_SIZES), metavar="LIST", help=f"sizes (default: {_SIZES})")
    sub.add_argument("--seconds", type=float, default=3.0, metavar="S", help="time for each size (default: 3)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw time and bandwidth there (PNG; needs matplotlib)")
    sub.set_defaults(run=_allreduce)
    sub = kinds.add_parser(
        "page",
        help="make a Markdown page of reports",
        description="Makes a Markdown page of reports that `bench allreduce --json` wrote.",
    )
    sub.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="JSON files")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page")
    sub.set_defaults(run=_page)


def _sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        number, unit = (word[:-2], _UNITS[word[-2:]]) if word[-2:] in _UNITS else (word, 1)
        if not number.strip().isdecimal() or int(number) * unit % 4 or int(number) == 0:
            raise argparse.ArgumentTypeError(
                f"a size is a number of bytes, a multiple of 4, such as 4, 2Ki or 64Mi. Received: {word!r}"
            )
        sizes.append(int(number) * unit)
    return sizes


def _allreduce(arguments: argparse.Namespace) -> int:
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    if arguments.ranks is not None and arguments.ranks < 2:
        sys.exit(f"One rank has nothing to reduce. Expected two or more. Received: --ranks {arguments.ranks}")
    if not launch.ranks_started():
        return _start_ranks(arguments.ranks or 2)
    if arguments.ranks:
        sys.exit(f"--ranks starts ranks, but there is a launcher already: {launch.ranks_started()}. Leave --ranks out.")
    world = launch.connect(None)
    _pin(world)
    team = make_team(world, 0, threads=0, timeout_seconds=300, stall_seconds=30)
    report: dict[str, Any] = {
        "machine": _machine(),
        "mpi": launch.library_name(world),
        "ranks": world.size,
        "nodes": team.node_count,
    }
    first = True

    def show(rows: Sequence[dict[str, Any]]) -> None:
        nonlocal first
        if world.rank == 0:
            print(allreduce.table(rows, header=first), flush=True)
        first = False

    if world.rank == 0:
        print(f"{report['ranks']} ranks on {report['nodes']} node(s), {report['mpi']}; {report['machine']}", flush=True)
    report["rows"] = allreduce.measure(team, arguments.bytes, arguments.seconds, done=show)
    if world.rank == 0:
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")
        if arguments.plot:
            allreduce.plot(report, arguments.plot)
    team.barrier()
    team.close()
    return 0


def _page(arguments: argparse.Namespace) -> int:
    missing = [str(file) for file in arguments.reports if not file.is_file()]
    if missing:
        sys.exit(f"No such report: {', '.join(missing)}")
    arguments.out.write_text(allreduce.page([json.loads(file.read_text()) for file in arguments.reports]))
    return 0


def _start_ranks(count: int) -> int:
    """Runs this very command on `count` ranks; returns its exit status."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("Found no mpiexec to start ranks with. Install an MPI (pip install mpich) or load your site's module.")
    given = sys.argv[1:]
    words = [
        w for i, w in enumerate(given) if not (w == "--ranks" or w.startswith("--ranks=") or given[i - 1] == "--ranks")
    ]
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if os.geteuid() == 0:  # Open MPI asks twice
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment.setdefault("PRTE_MCA_hwloc_default_binding_policy", "none")  # _pin binds ranks
    if count > len(os.sched_getaffinity(0)):
        environment.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    return subprocess.call([mpiexec, "-n", str(count), sys.executable, "-m", "keras_hpc", *words], env=environment)


def _pin(world: launch.World) -> None:
    """One core for each rank, where there are enough and nobody has pinned it already."""
    cores = sorted(os.sched_getaffinity(0))
    local = [rank for rank in range(world.size) if world.node_of_rank[rank] == world.node]
    if len(cores) >= len(local):
        os.sched_setaffinity(0, {cores[local.index(world.rank)]})


def _machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"
