# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: how fast the engine is on this machine, with this MPI."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, gradients, local_steps, overlap, page, scaling, timeline, validation
from benchmarks.hosts import Hosts, HostsError
from keras_hpc.errors import LaunchError
from keras_hpc.job import launch
from keras_hpc.job.team import Team, make_team
from keras_hpc.tools import bench, launchers, simulator
from keras_hpc.tools import timeline as timelines
from keras_hpc.tools.bench import machine, ranks
from keras_hpc.tools.bench.arguments import numbers, sizes

_VALIDATION = Path(__file__).resolve().parents[1] / "docs" / "performance" / "validation.json"
_MBIT = "KERAS_HPC_BENCH_MBIT"  # tells the ranks how fast a network we made for them


def main() -> int:
    """Runs the measurement that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measures the engine of keras_hpc against the MPI library."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    sub = kinds.add_parser(
        "allreduce",
        help="time an allreduce against MPI_Allreduce and against memory",
        description="Times a sum of float32 over all ranks, in turns with MPI_Allreduce in the same process. Paths: "
        "'private', an array of the process; 'segment', one made by keras_hpc.empty; 'fusion', 32 tensors of a "
        "training step. Starts its own ranks, or measures those that a launcher has started.",
    )
    _add_ranks(sub)
    bench.add_options(sub)
    sub.set_defaults(run=_allreduce)
    sub = kinds.add_parser(
        "overlap",
        help="time a reduction behind computing",
        description="Times steps that compute in pieces and start the reduction of one tensor after each, with and "
        "without it, for each way to wait for other ranks, and of a pipelined team, whose steps take the average of "
        "the step before. Each rank computes and communicates on one core. Starts its own ranks, or measures those "
        "that a launcher has started.",
    )
    _add_ranks(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument(
        "--backend",
        choices=gradients.BACKENDS,
        help="time small gradients on their way from it to the engine and back instead",
    )
    sub.add_argument("--tensors", type=int, metavar="N", help="of a step (default: 8, with --backend 160)")
    sub.add_argument("--bytes", type=sizes, metavar="SIZE", help="of each tensor (default: 1Mi, with --backend 1Ki)")
    sub.add_argument("--compute-ms", type=float, default=4.0, metavar="MS", help="computing of a step (default: 4)")
    sub.add_argument("--steps", type=int, default=100, metavar="N", help="timed steps of each kind (default: 100)")
    sub.set_defaults(run=_overlap, plot=None)
    sub = kinds.add_parser(
        "checkpoint",
        help="time checkpoints behind training",
        description="Times how long callbacks.Checkpoint makes training wait, beside the old way, in which the first "
        "rank writes and all wait, and how much steps slow down while it writes. Starts its own ranks, or measures "
        "those that a launcher has started.",
    )
    _add_ranks(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--backend", choices=gradients.BACKENDS, default="tensorflow", help="(default: tensorflow)")
    sub.add_argument("--bytes", type=sizes, default=[2**30], metavar="SIZE", help="weights and optimizer, about")
    sub.add_argument("--saves", type=int, default=3, metavar="N", help="timed ones of each kind (default: 3)")
    sub.add_argument("--folder", type=Path, help="on which disk (default: the temporary files')")
    sub.set_defaults(run=_checkpoint, plot=None)
    sub = kinds.add_parser(
        "local",
        help="time steps on a slow network, with local steps",
        description="Trains a network of examples/cnn on noise alone, with gradients averaged at every step, and with "
        "local steps. Starts its own ranks, or measures those that a launcher has started.",
    )
    _add_ranks(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--backend", choices=gradients.BACKENDS, default="torch", help="(default: torch)")
    sub.add_argument("--model", default="hep_cnn", help="of examples/cnn/networks.py (default: hep_cnn)")
    sub.add_argument("--batch-size", type=int, default=16, metavar="B", help="of each rank (default: 16)")
    sub.add_argument("--every", type=numbers, default=[8, 32], metavar="LIST", help="periods (default: 8,32)")
    sub.add_argument("--overlap", type=int, default=0, metavar="N", help="the longest with so many overlapped, too")
    sub.add_argument("--steps", type=int, default=32, metavar="N", help="timed ones of each way (default: 32)")
    sub.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each way (default: 3)")
    sub.set_defaults(run=_local, plot=None)
    sub = kinds.add_parser(
        "timeline",
        help="record when a training step has which gradient",
        description="Trains a model of keras.applications on noise, traced, and writes when a step has which gradient, "
        "and how much steps vary: what the simulator needs. Starts its own ranks, or is run by a launcher's.",
    )
    sub.add_argument("--model", choices=list(timeline.SIZES), required=True)
    sub.add_argument("--ranks", type=int, metavar="N", help="start so many ranks on this machine (default: 2)")
    sub.add_argument("--batch-size", type=int, default=8, metavar="B", help="of each rank (default: 8)")
    sub.add_argument("--steps", type=int, default=14, metavar="N", help="of which two warm up (default: 14)")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="the timeline")
    sub.set_defaults(run=_timeline)
    sub = kinds.add_parser(
        "scaling",
        help="simulate training steps on 2 to 1,024 nodes",
        description="Simulates training steps of the engine on 2 to 1,024 nodes with SimGrid, with the timelines of "
        "docs/performance/timelines.",
    )
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw efficiency there (PNG; needs matplotlib)")
    sub.add_argument("--jobs", type=int, default=2, metavar="N", help="simulations at a time (default: 2)")
    sub.add_argument("--build", type=Path, default=Path("build/simulator"), metavar="FOLDER", help="for the simulator")
    sub.set_defaults(run=_scaling)
    sub = kinds.add_parser(
        "validation",
        help="compare the simulator with the engine on throw-away hosts",
        description="Times allreduces and steps of ResNet50, whose computing is a sleep, on hosts made of namespaces, "
        "one rank on each, and simulates the same (needs root, iproute2 and SimGrid).",
    )
    sub.add_argument(
        "--hosts", type=numbers, default=[2, 4, 8], metavar="LIST", help="numbers of them (default: 2,4,8)"
    )
    sub.add_argument(
        "--mbit",
        type=numbers,
        default=[200, 1000, 2500, 0],
        metavar="LIST",
        help="bandwidths of their links, Mbit/s; 0: no limit, where latency decides (default: 200,1000,2500,0)",
    )
    sub.add_argument("--repeats", type=int, default=3, metavar="N", help="of which the median counts (default: 3)")
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--build", type=Path, default=Path("build/simulator"), metavar="FOLDER", help="for the simulator")
    sub.set_defaults(run=_validation)
    sub = kinds.add_parser(
        "page",
        help="make a Markdown page of reports",
        description="Makes a Markdown page of reports that `--json` wrote.",
    )
    sub.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="JSON files")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page")
    sub.set_defaults(run=_page)
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    """Adds how many ranks are started, and where."""
    parser.add_argument("--ranks", type=int, metavar="N", help="start so many ranks on this machine (default: 2)")
    parser.add_argument(
        "--hosts",
        type=int,
        metavar="N",
        help="make so many throw-away hosts on this machine, with --ranks ranks each (needs root and iproute2)",
    )
    parser.add_argument("--mbit", type=int, metavar="M", help="bandwidth of each host, Mbit/s each way (default: 2500)")


def _world_of(arguments: argparse.Namespace) -> launch.World:
    """The ranks to measure: those that a launcher has started. Without any, starts some and exits with their status."""
    ranks.check(None if arguments.hosts else arguments.ranks, arguments.plot)
    if arguments.mbit and not arguments.hosts:
        sys.exit("--mbit is the bandwidth of the hosts that --hosts makes. Give both.")
    if not launch.ranks_started():
        sys.exit(_start_ranks(arguments.ranks or 2, arguments.hosts, arguments.mbit or 2500))
    return ranks.world(arguments.ranks, arguments.hosts)


def _mbit() -> int | None:
    """Bandwidth of the hosts that we have made for these ranks."""
    return int(os.environ[_MBIT]) if _MBIT in os.environ else None


def _allreduce(arguments: argparse.Namespace) -> int:
    return bench.measure(_world_of(arguments), arguments, _mbit())


def _overlap(arguments: argparse.Namespace) -> int:
    if arguments.bytes and len(arguments.bytes) != 1:
        sys.exit(f"--bytes is the size of each tensor. Expected one. Received: {len(arguments.bytes)} sizes")
    if arguments.backend:
        return _gradients(arguments)
    tensors, nbytes = arguments.tensors or 8, (arguments.bytes or [2**20])[0]
    world = _world_of(arguments)
    report = ranks.begin_report(world, "overlap", _mbit())
    first = True

    def show(row: dict[str, Any]) -> None:
        nonlocal first
        if world.rank == 0:
            print(overlap.table(row, header=first), flush=True)
        first = False

    def team_that_waits(threads: int, waiting: str) -> Team:
        return make_team(world, 0, threads, timeout_seconds=300, stall_seconds=30, waiting=waiting)

    seconds = arguments.compute_ms / 1e3
    report["rows"] = overlap.measure(team_that_waits, tensors, nbytes, seconds, arguments.steps, done=show)
    ranks.end_report(world, report, arguments.json)
    return 0


def _checkpoint(arguments: argparse.Namespace) -> int:
    os.environ["KERAS_BACKEND"] = arguments.backend
    world = _world_of(arguments)
    import keras_hpc

    keras_hpc.init()
    report = ranks.begin_report(world, "checkpoint", _mbit())
    row = {"backend": arguments.backend} | checkpoint.measure(arguments.bytes[0], arguments.saves, arguments.folder)
    if world.rank == 0:
        print(checkpoint.table(row), flush=True)
    report["rows"] = [row]
    ranks.end_report(world, report, arguments.json)
    keras_hpc.finalize()
    return 0


def _local(arguments: argparse.Namespace) -> int:
    os.environ["KERAS_BACKEND"] = arguments.backend
    world = _world_of(arguments)
    report = ranks.begin_report(world, "local", _mbit())
    report["rows"] = local_steps.measure(
        arguments.model, arguments.batch_size, arguments.every, arguments.overlap, arguments.steps, arguments.rounds
    )
    for row in report["rows"] if world.rank == 0 else ():
        print(local_steps.table(row), flush=True)
    ranks.end_report(world, report, arguments.json)
    return 0


def _gradients(arguments: argparse.Namespace) -> int:
    os.environ["KERAS_BACKEND"] = arguments.backend
    world = _world_of(arguments)
    import keras_hpc
    from keras_hpc.job import current

    keras_hpc.init()
    report = ranks.begin_report(world, "gradients", _mbit())
    row = gradients.measure(
        current.job().teams[0],
        arguments.backend,
        arguments.tensors or 160,
        (arguments.bytes or [1024])[0],
        arguments.steps,
    )
    if world.rank == 0:
        print(gradients.table(row), flush=True)
    report["rows"] = [row]
    ranks.end_report(world, report, arguments.json)
    keras_hpc.finalize()
    return 0


def _timeline(arguments: argparse.Namespace) -> int:
    if not launch.ranks_started():
        return _start_ranks(arguments.ranks or 2, None, 0)
    timeline.record(arguments.model, arguments.batch_size, arguments.steps, arguments.out)
    return 0


def _scaling(arguments: argparse.Namespace) -> int:
    try:
        program = simulator.build(arguments.build)
        known = {name: timelines.read(scaling.TIMELINES / f"{name}.json") for name in scaling.MODELS}
        begin = time.monotonic()
        rows = scaling.run(program, scaling.CASES, known, arguments.jobs)
    except (simulator.SimulatorError, timelines.TimelineError) as error:
        sys.exit(str(error))
    report = {
        "kind": "scaling",
        "machine": machine.describe(),
        "seconds": round(time.monotonic() - begin),
        "simgrid": simulator.version(),
        "assumptions": scaling.ASSUMPTIONS,
        "platforms": {name: dataclasses.asdict(platform) for name, platform in simulator.PLATFORMS.items()},
        "rows": rows,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if arguments.plot:
        known_errors = json.loads(_VALIDATION.read_text())["rows"]
        scaling.plot(rows, arguments.plot, validation.summary(known_errors))
    return 0


def _validation(arguments: argparse.Namespace) -> int:
    known = timelines.read(scaling.TIMELINES / "resnet50.json")
    if launch.ranks_started():  # one of those that are started below
        world = launch.connect(None)
        mbit = int(os.environ.get(_MBIT, 0))
        report = ranks.begin_report(world, "validation", _mbit())
        report["rows"] = validation.measure(world, known, validation.computing(mbit), arguments.repeats)
        ranks.end_report(world, report, arguments.json)
        return 0
    rows: list[dict[str, Any]] = []
    try:
        program = simulator.build(arguments.build)
        with tempfile.TemporaryDirectory() as folder:
            for hosts, mbit in itertools.product(arguments.hosts, arguments.mbit):
                file = Path(folder) / "measured.json"
                options = ["validation", "--repeats", str(arguments.repeats), "--json", str(file)]
                if (status := _start_ranks(1, hosts, mbit, options)) != 0:
                    return status
                report = json.loads(file.read_text())
                rows += validation.add_simulated(program, report["rows"], hosts, mbit, known, Path(folder))
                print(page.validation_table(rows), flush=True)
    except simulator.SimulatorError as error:
        sys.exit(str(error))
    if arguments.json:
        report |= {"rows": rows, "ranks": max(arguments.hosts), "nodes": max(arguments.hosts)}
        report.pop("mbit", None)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _page(arguments: argparse.Namespace) -> int:
    missing = [str(file) for file in arguments.reports if not file.is_file()]
    if missing:
        sys.exit(f"No such report: {', '.join(missing)}")
    arguments.out.write_text(page.page([json.loads(file.read_text()) for file in arguments.reports]))
    return 0


def _start_ranks(count: int, hosts: int | None, mbit: int, options: Sequence[str] | None = None) -> int:
    """Runs a command on `count` ranks, of each host if hosts are wanted; returns its exit status.

    Args:
        count: ranks, in all or on each host.
        hosts: how many to make; None: this machine is the only one.
        mbit: bandwidth of each host, Mbit/s; 0: no limit.
        options: of `python -m benchmarks`; None: those of this very command.
    """
    if options is None:
        options = ranks.without(sys.argv[1:], ("--ranks", "--hosts", "--mbit"))
    command = [sys.executable, "-m", "benchmarks", *options]
    if hosts is None:
        return ranks.start(command, count)
    try:
        mpiexec = launchers.find_mpiexec(launchers.find_library())
        environment = os.environ | launchers.mpiexec_environment(count * hosts, placed=True, pinned=True)
        environment.setdefault("OMP_NUM_THREADS", "1")
        with Hosts(hosts, mbit or None) as network:
            environment |= {_MBIT: str(mbit)} | network.environment
            everywhere = [(name, count) for name in network.names]
            launcher = launchers.mpiexec_command(mpiexec, count * hosts, everywhere, environment)
            return subprocess.call(network.on_head([*launcher, *command]), env=environment)
    except (LaunchError, HostsError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main())
