# SPDX-License-Identifier: Apache-2.0
"""A training step on two ranks, with keras_hpc and with what else there is, each against its own step on one rank.

One core and one thread for each rank. All take turns, several rounds. Each peer gets an environment of its own, with
the versions of Keras and of its backend that are installed here, in benchmarks/peers/environments. The folder of --out
then holds MODEL.json, MODEL.csv and MODEL.png; with --mbit, MODEL-1000mbit.json and so on.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.peers.contenders import ALONE, CONTENDERS
from benchmarks.peers.installing import python_of, versions
from benchmarks.peers.ranks import run, tuned
from examples import tables
from examples.cnn.networks import NETWORKS
from keras_hpc.tools.bench import machine

MODELS = ("lenet", "resnet50", "mlp")  # which torch_ddp.py has, too


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="lenet")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        metavar="NAME",
        help=", ".join(CONTENDERS),
    )
    parser.add_argument("--batch-size", type=int, help="of each rank (default: the network's)")
    parser.add_argument("--steps", type=int, default=20, help="timed, of each run (default: 20)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument(
        "--mbit",
        type=int,
        metavar="M",
        help="give each rank a host made of namespaces, and M Mbit/s each way (as root)",
    )
    parser.add_argument("--shared", action="store_true", help="run peers in this environment, install nothing")
    parser.add_argument("--out", type=Path, default=Path("results") / "peers", help="(default: results/peers)")
    args = parser.parse_args(argv)
    args.batch_size = args.batch_size or NETWORKS[args.model].batch_size
    return args


def compare(args):
    """Yields, after each round, what `summary` makes of all so far, and the steps themselves.

    Who fails or takes too long is told of and left out from there on.

    Raises:
        SystemExit: at the end, if any failed.
    """
    contenders = {name: CONTENDERS[name] for name in args.contenders}
    pythons = {name: python_of(name, args.shared) for name in contenders}
    alone, two, failed = {}, {}, []

    def measure(name, times, number, *how, **more):
        try:
            found = run(*how, args, **more)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"round {number}/{args.rounds}, {name} failed and is left out: {error}", flush=True)
            failed.append(name)
        else:
            times.setdefault(name, []).append(found)
            ranks = f"{more['ranks']} rank{'s' * (more['ranks'] > 1)}"
            print(f"round {number}/{args.rounds}, {name}, {ranks}: {found:.1f} ms", flush=True)

    for number in range(1, args.rounds + 1):
        for name in dict.fromkeys(contender.alone for contender in contenders.values()):
            way = ALONE[name]
            python = python_of(way.environment, args.shared) if way.environment else Path(sys.executable)
            measure(name, alone, number, python, way.module, (), ranks=1, mpi=False, backend=way.backend)
        for name, contender in contenders.items():
            how = (pythons[name], contender.module, contender.options)
            if contender.alone not in failed:
                measure(name, two, number, *how, ranks=2, mpi=contender.mpi, backend=contender.backend)
        contenders = {
            name: contender for name, contender in contenders.items() if not {name, contender.alone} & set(failed)
        }
        yield summary(alone, two), {"1 rank": alone, "2 ranks": two}
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


def summary(alone, two):
    """Returns a line for each contender: steps on one rank and on two, efficiency, and what is exposed.

    Args:
        alone: steps on one rank, milliseconds, one for each round, by name.
        two: steps on two ranks.
    """
    lines = []
    for name, times in two.items():
        contender = CONTENDERS[name]
        before, after = float(np.median(alone[contender.alone])), float(np.median(times))
        lines.append(
            {
                "contender": name,
                "against": contender.alone,
                "1 rank ms": before,
                "2 ranks ms": after,
                "2 ranks ms lowest": min(times),
                "2 ranks ms highest": max(times),
                "efficiency": before / after,
                "exposed ms": after - before,
            }
        )
    return lines


def draw(lines, title, path):
    """Bars of efficiency and of what is exposed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    names = [line["contender"] for line in lines][::-1]
    colors = ["C0" if name.startswith("keras_hpc") else "0.6" for name in names]
    for axes, value, label in ((left, "efficiency", "{:.2f}"), (right, "exposed ms", "{:.1f}")):
        bars = axes.barh(names, [line[value] for line in lines][::-1], color=colors)
        axes.bar_label(bars, fmt=label)
        axes.set(xlabel=value)
        axes.margins(x=0.15)
    tables.write_figure(path, figure, title, lines)


def main(argv=None):
    args = arguments(argv)
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("Two ranks need two cores. Received: one")
    args.out.mkdir(parents=True, exist_ok=True)
    for number, (lines, steps) in enumerate(compare(args), 1):
        if lines:
            write(args, number, lines, steps)


def write(args, rounds, lines, steps):
    """Writes what is known after some rounds, and prints it."""
    runs = f"{rounds} round{'s' * (rounds > 1)} of {args.steps} steps"
    where = f"2 ranks on 2 hosts with {args.mbit} Mbit/s each way" if args.mbit else "2 ranks"
    how = f"{where}, one core each, {runs}, all with the memory settings of init()"
    how += "".join(f", {name}={value}" for name, value in tuned().items())
    title = f"{args.model}, batch {args.batch_size} of each rank, {how}; {machine.describe()}"
    path = args.out / f"{args.model}{f'-{args.mbit}mbit' if args.mbit else ''}.json"
    found = {
        "kind": "peers",
        "title": title,
        "versions": versions(args.contenders, args.shared),
        "lines": lines,
        "steps": steps,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    draw(lines, title, path.with_suffix(".png"))
    print(f"\n{title}\n{'':22}{'1 rank':>9}{'2 ranks':>9}{'efficiency':>12}{'exposed':>10}  against")
    for line in lines:
        times = f"{line['1 rank ms']:9.1f}{line['2 ranks ms']:9.1f}{line['efficiency']:12.3f}{line['exposed ms']:10.1f}"
        print(f"{line['contender']:22}{times}  {line['against']}", flush=True)


if __name__ == "__main__":
    main()
