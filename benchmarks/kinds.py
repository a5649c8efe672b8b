# SPDX-License-Identifier: Apache-2.0
"""The measurements of `python -m benchmarks`: what each takes, and how it runs on its ranks, prints and reports."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks import (
    checkpoint,
    crowded,
    gradients,
    hosted,
    local_steps,
    overlap,
    page,
    pipelined,
    scaling,
    simulations,
    timeline,
)
from keras_hpc.job import launch
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team
from keras_hpc.tools import bench
from keras_hpc.tools import timeline as timelines
from keras_hpc.tools.bench import ranks
from keras_hpc.tools.bench.arguments import numbers, sizes


def add_commands(commands: Any) -> None:
    """Adds a subcommand for each measurement."""
    for add in (
        _allreduce,
        _overlap,
        _crowded,
        _pipelined,
        _checkpoint,
        _local,
        _timeline,
        simulations.add_scaling,
        simulations.add_validation,
        _page,
    ):
        add(commands)


def _allreduce(commands: Any) -> None:
    sub = commands.add_parser(
        "allreduce",
        help="time an allreduce against MPI_Allreduce and against memory",
        description="Times a sum of float32 over all ranks, in turns with MPI_Allreduce in the same process. Paths: "
        "'private', an array of the process; 'segment', one made by keras_hpc.empty; 'fusion', 32 "
        "tensors of a training step. "
        f"{hosted.OWN_RANKS}",
    )
    hosted.add_ranks(sub)
    bench.add_options(sub)
    sub.set_defaults(run=run_allreduce)


def run_allreduce(arguments: argparse.Namespace) -> int:
    return bench.measure(hosted.world_of(arguments), arguments, hosted.mbit())


def _overlap(commands: Any) -> None:
    sub = hosted.add_command(
        commands,
        "overlap",
        "time a reduction behind computing",
        "Times steps that compute in pieces and start the reduction of one tensor after each, with and "
        "without it, for each way to wait for other ranks, and of a pipelined team, whose steps take the"
        " average of the step before. Each rank computes and communicates on one core. "
        f"{hosted.OWN_RANKS}",
        run_overlap,
    )
    sub.add_argument(
        "--backend",
        choices=gradients.BACKENDS,
        help="time small gradients on their way from it to the engine and back instead",
    )
    sub.add_argument("--tensors", type=int, metavar="N", help="of a step (default: 8, with --backend 160)")
    sub.add_argument("--bytes", type=sizes, metavar="SIZE", help="of each tensor (default: 1Mi, with --backend 1Ki)")
    sub.add_argument("--compute-ms", type=float, default=4.0, metavar="MS", help="computing of a step (default: 4)")
    sub.add_argument("--steps", type=int, default=100, metavar="N", help="timed steps of each kind (default: 100)")


def run_overlap(arguments: argparse.Namespace) -> int:
    if arguments.bytes and len(arguments.bytes) != 1:
        sys.exit(f"--bytes is the size of each tensor. Expected one. Received: {len(arguments.bytes)} sizes")
    if arguments.backend:
        return run_gradients(arguments)
    tensors, nbytes = arguments.tensors or 8, (arguments.bytes or [2**20])[0]
    world = hosted.world_of(arguments)
    report = ranks.begin_report(world, "overlap", hosted.mbit())
    show = ranks.printer(world, overlap.table)

    def team_that_waits(threads: int, waiting: str) -> Team:
        return make_team(world, 0, threads, timeout_seconds=300, stall_seconds=30, waiting=waiting)

    seconds = arguments.compute_ms / 1e3
    report["rows"] = overlap.measure(team_that_waits, tensors, nbytes, seconds, arguments.steps, done=show)
    ranks.end_report(world, report, arguments.json)
    return 0


def run_gradients(arguments: argparse.Namespace) -> int:
    os.environ["KERAS_BACKEND"] = arguments.backend
    world = hosted.world_of(arguments)
    import keras_hpc
    from keras_hpc.job import current

    keras_hpc.init()
    report = ranks.begin_report(world, "gradients", hosted.mbit())
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


def _crowded(commands: Any) -> None:
    sub = hosted.add_command(
        commands,
        "crowded",
        "time what many ranks on few cores and many plans cost",
        "Times a step of one small plan, CPU of all ranks, alone and beside idle plans, and how long a "
        "plan takes to make whose tensors live in the ranks' segment. "
        f"{hosted.OWN_RANKS}",
        run_crowded,
    )
    sub.add_argument("--lanes", type=int, default=0, metavar="N", help="communication threads (default: 0)")
    sub.add_argument("--plans", type=int, default=600, metavar="N", help="idle ones (default: 600)")
    sub.add_argument("--mebibytes", type=int, default=256, metavar="M", help="of each rank's large plan (default: 256)")
    sub.add_argument("--steps", type=int, default=200, metavar="N", help="of each batch (default: 200)")


def run_crowded(arguments: argparse.Namespace) -> int:
    """Times small steps of many ranks, beside idle plans, and the start of a large plan."""
    world = hosted.world_of(arguments)
    team = make_team(world, 0, threads=arguments.lanes, timeout_seconds=300, stall_seconds=60)
    report = ranks.begin_report(world, "crowded", hosted.mbit())
    report["rows"] = crowded.measure(team, arguments.plans, arguments.mebibytes, arguments.steps)
    ranks.printer(world, crowded.table)(report["rows"])
    team.barrier()
    team.close()
    ranks.end_report(world, report, arguments.json)
    return 0


def _pipelined(commands: Any) -> None:
    sub = hosted.add_command(
        commands,
        "pipelined",
        "time pipelined steps behind a slow link",
        "Times steps of ResNet50, whose computing is a sleep, without communication, synchronous and "
        "pipelined. For --hosts with a slow link (needs root and iproute2).",
        run_pipelined,
    )
    sub.add_argument("--step-ms", type=float, default=1000.0, metavar="MS", help="of a step alone (default: 1000)")
    sub.add_argument("--lanes", type=int, default=1, metavar="N", help="communication threads (default: 1)")
    sub.add_argument("--steps", type=int, default=8, metavar="N", help="timed, of each way (default: 8)")


def run_pipelined(arguments: argparse.Namespace) -> int:
    """Times synchronous and pipelined steps of a model on hosts with a slow link."""
    world = hosted.world_of(arguments)
    known = timelines.read(scaling.TIMELINES / "resnet50.json").scaled(arguments.step_ms / 1e3)
    report = ranks.begin_report(world, "pipelined", hosted.mbit())
    report["rows"] = pipelined.measure(world, known, arguments.lanes, arguments.steps)
    report["lanes"] = arguments.lanes
    ranks.printer(world, pipelined.table)(report["rows"])
    ranks.end_report(world, report, arguments.json)
    return 0


def _checkpoint(commands: Any) -> None:
    sub = hosted.add_command(
        commands,
        "checkpoint",
        "time checkpoints behind training",
        "Times how long callbacks.Checkpoint makes training wait, beside the old way, in which the first"
        " rank writes and all wait, and how much steps slow down while it writes. "
        f"{hosted.OWN_RANKS}",
        run_checkpoint,
    )
    sub.add_argument("--backend", choices=gradients.BACKENDS, default="tensorflow", help="(default: tensorflow)")
    sub.add_argument("--bytes", type=sizes, default=[2**30], metavar="SIZE", help="weights and optimizer, about")
    sub.add_argument("--saves", type=int, default=3, metavar="N", help="timed ones of each kind (default: 3)")
    sub.add_argument("--folder", type=Path, help="on which disk (default: the temporary files')")


def run_checkpoint(arguments: argparse.Namespace) -> int:
    os.environ["KERAS_BACKEND"] = arguments.backend
    world = hosted.world_of(arguments)
    import keras_hpc

    keras_hpc.init()
    report = ranks.begin_report(world, "checkpoint", hosted.mbit())
    row = {"backend": arguments.backend} | checkpoint.measure(arguments.bytes[0], arguments.saves, arguments.folder)
    if world.rank == 0:
        print(checkpoint.table(row), flush=True)
    report["rows"] = [row]
    ranks.end_report(world, report, arguments.json)
    keras_hpc.finalize()
    return 0


def _local(commands: Any) -> None:
    sub = hosted.add_command(
        commands,
        "local",
        "time steps on a slow network, with local steps",
        "Trains a network of examples/cnn on noise alone, with gradients averaged at every step, and "
        "with local steps. "
        f"{hosted.OWN_RANKS}",
        run_local,
    )
    sub.add_argument("--backend", choices=gradients.BACKENDS, default="torch", help="(default: torch)")
    sub.add_argument("--model", default="hep_cnn", help="of examples/cnn/networks.py (default: hep_cnn)")
    sub.add_argument("--batch-size", type=int, default=16, metavar="B", help="of each rank (default: 16)")
    sub.add_argument("--every", type=numbers, default=[8, 32], metavar="LIST", help="periods (default: 8,32)")
    sub.add_argument("--overlap", type=int, default=0, metavar="N", help="the longest with so many overlapped, too")
    sub.add_argument("--steps", type=int, default=32, metavar="N", help="timed ones of each way (default: 32)")
    sub.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each way (default: 3)")


def run_local(arguments: argparse.Namespace) -> int:
    os.environ["KERAS_BACKEND"] = arguments.backend
    world = hosted.world_of(arguments)
    report = ranks.begin_report(world, "local", hosted.mbit())
    report["rows"] = local_steps.measure(
        arguments.model, arguments.batch_size, arguments.every, arguments.overlap, arguments.steps, arguments.rounds
    )
    for row in report["rows"] if world.rank == 0 else ():
        print(local_steps.table(row), flush=True)
    ranks.end_report(world, report, arguments.json)
    return 0


def _timeline(commands: Any) -> None:
    sub = commands.add_parser(
        "timeline",
        help="record when a training step has which gradient",
        description="Trains a model of keras.applications on noise, traced, and writes when a step has which "
        "gradient, and how much steps vary: what the simulator needs. Starts its own ranks, or is run by"
        " a launcher's.",
    )
    sub.add_argument("--model", choices=list(timeline.SIZES), required=True)
    sub.add_argument("--ranks", type=int, metavar="N", help="start so many ranks on this machine (default: 2)")
    sub.add_argument("--batch-size", type=int, default=8, metavar="B", help="of each rank (default: 8)")
    sub.add_argument("--steps", type=int, default=14, metavar="N", help="of which two warm up (default: 14)")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="the timeline")
    sub.set_defaults(run=run_timeline)


def run_timeline(arguments: argparse.Namespace) -> int:
    if not launch.ranks_started():
        return hosted.start_ranks(arguments.ranks or 2, None, 0)
    timeline.record(arguments.model, arguments.batch_size, arguments.steps, arguments.out)
    return 0


def _page(commands: Any) -> None:
    sub = commands.add_parser(
        "page",
        help="make a Markdown page of reports",
        description="Makes a Markdown page of reports that `--json` wrote.",
    )
    sub.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="JSON files")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page")
    sub.set_defaults(run=run_page)


def run_page(arguments: argparse.Namespace) -> int:
    missing = [str(file) for file in arguments.reports if not file.is_file()]
    if missing:
        sys.exit(f"No such report: {', '.join(missing)}")
    arguments.out.write_text(page.page([json.loads(file.read_text()) for file in arguments.reports]))
    return 0
