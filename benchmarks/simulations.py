# SPDX-License-Identifier: Apache-2.0
"""Measurements that simulate: steps on many nodes, and the simulator beside the engine."""

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

from benchmarks import hosted, page, scaling, validation
from keras_hpc.job import launch
from keras_hpc.tools import simulator
from keras_hpc.tools import timeline as timelines
from keras_hpc.tools.bench import machine, ranks
from keras_hpc.tools.bench.arguments import numbers

_VALIDATION = Path(__file__).resolve().parents[1] / "docs" / "performance" / "validation.json"


def add_scaling(commands: Any) -> None:
    sub = hosted.add_command(
        commands,
        "scaling",
        "simulate training steps on 2 to 4,096 nodes",
        "Simulates training steps of the engine on 2 to 1,024 nodes, or 4,096, with SimGrid, with the timelines of "
        "docs/performance/timelines.",
        run_scaling,
        on_ranks=False,
    )
    sub.add_argument("--large", action="store_true", help="simulate 1,024 and 4,096 nodes instead: an hour or more")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw efficiency there (PNG; needs matplotlib)")
    sub.add_argument("--jobs", type=int, default=2, metavar="N", help="simulations at a time (default: 2)")
    sub.add_argument("--build", type=Path, default=Path("build/simulator"), metavar="FOLDER", help="for the simulator")


def run_scaling(arguments: argparse.Namespace) -> int:
    try:
        program = simulator.build(arguments.build)
        known = {name: timelines.read(scaling.TIMELINES / f"{name}.json") for name in scaling.MODELS}
        begin = time.monotonic()
        rows = scaling.run(program, scaling.LARGE if arguments.large else scaling.CASES, known, arguments.jobs)
    except (simulator.SimulatorError, timelines.TimelineError) as error:
        sys.exit(str(error))
    report = {
        "kind": "scaling",
        "large": arguments.large,
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


def add_validation(commands: Any) -> None:
    sub = hosted.add_command(
        commands,
        "validation",
        "compare the simulator with the engine on throw-away hosts",
        "Times allreduces and steps of ResNet50, whose computing is a sleep, on hosts made of "
        "namespaces, one rank on each, and simulates the same (needs root, iproute2 and SimGrid).",
        run_validation,
        on_ranks=False,
    )
    sub.add_argument(
        "--hosts", type=numbers, default=[2, 4, 8], metavar="LIST", help="numbers of them (default: 2,4,8)"
    )
    sub.add_argument(
        "--mbit",
        type=numbers,
        default=[200, 1000, 2500],
        metavar="LIST",
        help="bandwidths of their links, Mbit/s, besides links without a limit (default: 200,1000,2500)",
    )
    sub.add_argument("--repeats", type=int, default=3, metavar="N", help="of which the median counts (default: 3)")
    sub.add_argument("--build", type=Path, default=Path("build/simulator"), metavar="FOLDER", help="for the simulator")


def run_validation(arguments: argparse.Namespace) -> int:
    known = timelines.read(scaling.TIMELINES / "resnet50.json")
    if launch.ranks_started():  # one of those that are started below
        world = launch.connect(None)
        mbit = int(os.environ.get(hosted.MBIT, 0))
        report = ranks.begin_report(world, "validation", hosted.mbit())
        report["rows"] = validation.measure(world, known, mbit, arguments.repeats)
        ranks.end_report(world, report, arguments.json)
        return 0
    rows: list[dict[str, Any]] = []
    try:
        program = simulator.build(arguments.build)
        with tempfile.TemporaryDirectory() as folder:
            for hosts, mbit in itertools.product(arguments.hosts, [0, *filter(None, arguments.mbit)]):
                file = Path(folder) / "measured.json"
                options = ["validation", "--repeats", str(arguments.repeats), "--json", str(file)]
                if (status := hosted.start_ranks(1, hosts, mbit, options)) != 0:
                    return status
                report = json.loads(file.read_text())
                if mbit == 0:
                    together = report["rows"][0]["together_gb_per_s"]
                rows += validation.add_simulated(program, report["rows"], hosts, mbit, together, known, Path(folder))
                print(page.validation_table(rows), flush=True)
    except simulator.SimulatorError as error:
        sys.exit(str(error))
    if arguments.json:
        report |= {"rows": rows, "ranks": max(arguments.hosts), "nodes": max(arguments.hosts)}
        report.pop("mbit", None)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0
