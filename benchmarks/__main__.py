# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: how fast the engine is on this machine, with this MPI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import gradients, kinds, timeline
from benchmarks.hosted import add_ranks
from keras_hpc.tools import bench
from keras_hpc.tools.bench.arguments import numbers, sizes


def main() -> int:
    """Runs the measurement that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measures the engine of keras_hpc against the MPI library."
    )
    commands = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    sub = commands.add_parser(
        "allreduce",
        help="time an allreduce against MPI_Allreduce and against memory",
        description="Times a sum of float32 over all ranks, in turns with MPI_Allreduce in the same process. Paths: "
        "'private', an array of the process; 'segment', one made by keras_hpc.empty; 'fusion', 32 tensors of a "
        "training step. Starts its own ranks, or measures those that a launcher has started.",
    )
    add_ranks(sub)
    bench.add_options(sub)
    sub.set_defaults(run=kinds.run_allreduce)
    sub = commands.add_parser(
        "overlap",
        help="time a reduction behind computing",
        description="Times steps that compute in pieces and start the reduction of one tensor after each, with and "
        "without it, for each way to wait for other ranks, and of a pipelined team, whose steps take the average of "
        "the step before. Each rank computes and communicates on one core. Starts its own ranks, or measures those "
        "that a launcher has started.",
    )
    add_ranks(sub)
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
    sub.set_defaults(run=kinds.run_overlap, plot=None)
    sub = commands.add_parser(
        "crowded",
        help="time what many ranks on few cores and many plans cost",
        description="Times a step of one small plan, CPU of all ranks, alone and beside idle plans, and how long a "
        "plan takes to make whose tensors live in the ranks' segment. Starts its own ranks, or measures those that a "
        "launcher has started.",
    )
    add_ranks(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--lanes", type=int, default=0, metavar="N", help="communication threads (default: 0)")
    sub.add_argument("--plans", type=int, default=600, metavar="N", help="idle ones (default: 600)")
    sub.add_argument("--mebibytes", type=int, default=256, metavar="M", help="of each rank's large plan (default: 256)")
    sub.add_argument("--steps", type=int, default=200, metavar="N", help="of each batch (default: 200)")
    sub.set_defaults(run=kinds.run_crowded, plot=None)
    sub = commands.add_parser(
        "pipelined",
        help="time pipelined steps behind a slow link",
        description="Times steps of ResNet50, whose computing is a sleep, without communication, synchronous and "
        "pipelined. For --hosts with a slow link (needs root and iproute2).",
    )
    add_ranks(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--step-ms", type=float, default=1000.0, metavar="MS", help="of a step alone (default: 1000)")
    sub.add_argument("--lanes", type=int, default=1, metavar="N", help="communication threads (default: 1)")
    sub.add_argument("--steps", type=int, default=8, metavar="N", help="timed, of each way (default: 8)")
    sub.set_defaults(run=kinds.run_pipelined, plot=None)
    sub = commands.add_parser(
        "checkpoint",
        help="time checkpoints behind training",
        description="Times how long callbacks.Checkpoint makes training wait, beside the old way, in which the first "
        "rank writes and all wait, and how much steps slow down while it writes. Starts its own ranks, or measures "
        "those that a launcher has started.",
    )
    add_ranks(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--backend", choices=gradients.BACKENDS, default="tensorflow", help="(default: tensorflow)")
    sub.add_argument("--bytes", type=sizes, default=[2**30], metavar="SIZE", help="weights and optimizer, about")
    sub.add_argument("--saves", type=int, default=3, metavar="N", help="timed ones of each kind (default: 3)")
    sub.add_argument("--folder", type=Path, help="on which disk (default: the temporary files')")
    sub.set_defaults(run=kinds.run_checkpoint, plot=None)
    sub = commands.add_parser(
        "local",
        help="time steps on a slow network, with local steps",
        description="Trains a network of examples/cnn on noise alone, with gradients averaged at every step, and with "
        "local steps. Starts its own ranks, or measures those that a launcher has started.",
    )
    add_ranks(sub)
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--backend", choices=gradients.BACKENDS, default="torch", help="(default: torch)")
    sub.add_argument("--model", default="hep_cnn", help="of examples/cnn/networks.py (default: hep_cnn)")
    sub.add_argument("--batch-size", type=int, default=16, metavar="B", help="of each rank (default: 16)")
    sub.add_argument("--every", type=numbers, default=[8, 32], metavar="LIST", help="periods (default: 8,32)")
    sub.add_argument("--overlap", type=int, default=0, metavar="N", help="the longest with so many overlapped, too")
    sub.add_argument("--steps", type=int, default=32, metavar="N", help="timed ones of each way (default: 32)")
    sub.add_argument("--rounds", type=int, default=3, metavar="N", help="turns of each way (default: 3)")
    sub.set_defaults(run=kinds.run_local, plot=None)
    sub = commands.add_parser(
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
    sub.set_defaults(run=kinds.run_timeline)
    sub = commands.add_parser(
        "scaling",
        help="simulate training steps on 2 to 1,024 nodes",
        description="Simulates training steps of the engine on 2 to 1,024 nodes with SimGrid, with the timelines of "
        "docs/performance/timelines.",
    )
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw efficiency there (PNG; needs matplotlib)")
    sub.add_argument("--jobs", type=int, default=2, metavar="N", help="simulations at a time (default: 2)")
    sub.add_argument("--build", type=Path, default=Path("build/simulator"), metavar="FOLDER", help="for the simulator")
    sub.set_defaults(run=kinds.run_scaling)
    sub = commands.add_parser(
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
    sub.set_defaults(run=kinds.run_validation)
    sub = commands.add_parser(
        "page",
        help="make a Markdown page of reports",
        description="Makes a Markdown page of reports that `--json` wrote.",
    )
    sub.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="JSON files")
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page")
    sub.set_defaults(run=kinds.run_page)
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
