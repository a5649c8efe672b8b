# SPDX-License-Identifier: Apache-2.0
"""The measurements that the command line names: each runs on its ranks, prints, and writes its report."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
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
    timeline,
    validation,
)
from keras_hpc.job import launch
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team
from keras_hpc.tools import bench, simulator
from keras_hpc.tools import timeline as timelines
from keras_hpc.tools.bench import machine, ranks

_VALIDATION = Path(__file__).resolve().parents[1] / "docs" / "performance" / "validation.json"


def run_allreduce(arguments: argparse.Namespace) -> int:
    return bench.measure(hosted.world_of(arguments), arguments, hosted.mbit())


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


def run_timeline(arguments: argparse.Namespace) -> int:
    if not launch.ranks_started():
        return hosted.start_ranks(arguments.ranks or 2, None, 0)
    timeline.record(arguments.model, arguments.batch_size, arguments.steps, arguments.out)
    return 0


def run_scaling(arguments: argparse.Namespace) -> int:
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


def run_validation(arguments: argparse.Namespace) -> int:
    known = timelines.read(scaling.TIMELINES / "resnet50.json")
    if launch.ranks_started():  # one of those that are started below
        world = launch.connect(None)
        mbit = int(os.environ.get(hosted.MBIT, 0))
        report = ranks.begin_report(world, "validation", hosted.mbit())
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
                if (status := hosted.start_ranks(1, hosts, mbit, options)) != 0:
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


def run_page(arguments: argparse.Namespace) -> int:
    missing = [str(file) for file in arguments.reports if not file.is_file()]
    if missing:
        sys.exit(f"No such report: {', '.join(missing)}")
    arguments.out.write_text(page.page([json.loads(file.read_text()) for file in arguments.reports]))
    return 0
