# SPDX-License-Identifier: Apache-2.0
"""What `make demo` runs: train.py on 1 rank and on 2, one core and one thread for each rank, and what came of it.

Without MPI for the one rank, by `keras_hpc run` for the two.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path

from examples import launch

TIME_LIMIT_S = 600


def train(ranks, output, options):
    """Runs train.py and returns its summary."""
    launcher = f"keras_hpc run -n {ranks} -m" if ranks > 1 else ""
    print(" ".join(filter(None, ["\n--- python -m", launcher, "examples.cnn.train", *options])))
    launch.run("examples.cnn.train", ["--output", output, *options], ranks=ranks, timeout=TIME_LIMIT_S)
    return json.loads((output / "summary.json").read_text())


def history(output):
    with (output / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]}


def draw(results, summaries, samples, folder):
    """Writes loss.png and throughput.png with the numbers they show beside them as CSV."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    curves = {n: history(folder / f"{n}_ranks") for n in summaries}
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for color, (n, curve) in zip(("C0", "C1"), curves.items(), strict=True):
        label = f"{n} rank{'s' * (n > 1)}"
        axes.plot(curve["epoch"], curve["loss"], color=color, label=f"{label}, training")
        axes.plot(curve["epoch"], curve["val_loss"], color=color, linestyle="--", label=f"{label}, test")
    axes.set(xlabel="epoch", ylabel="loss", yscale="log", title=f"{samples:,} digits, small CNN")
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=150)
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ranks", "epoch", "loss", "val_loss"])
        for n, curve in curves.items():
            for row in zip(curve["epoch"], curve["loss"], curve["val_loss"], strict=True):
                writer.writerow([n, *row])

    figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
    ranks = list(summaries)
    rates = [summaries[n]["samples_per_second"] for n in ranks]
    bars = axes.bar([str(n) for n in ranks], rates, color=["C0", "C1"], width=0.5)
    axes.bar_label(bars, fmt="{:.0f}")
    axes.plot([-0.3, 1.3], [rates[0] * ranks[-1]] * 2, color="0.5", linestyle=":", label="twice one rank")
    axes.set(
        xlabel="ranks, one core each", ylabel="samples/s", title="Throughput", ylim=(0, 1.3 * max(2 * rates[0], *rates))
    )
    axes.legend(loc="upper left")
    figure.savefig(folder / "throughput.png", dpi=150)
    with (folder / "throughput.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(results))
        writer.writeheader()
        writer.writerow(results)


def mpi_version():
    """Asked in a process of its own: an MPI started here would disturb later launches."""
    code = "from mpi4py import MPI; print(' '.join(MPI.Get_library_version().split('\\n')[0].split()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip().split(", package")[0] or "none"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--results", type=Path, default=Path("results") / "demo", help="folder for charts and tables")
    args = parser.parse_args()

    options = ["--backend", args.backend, "--epochs", str(args.epochs), "--samples", str(args.samples)]
    summaries = {n: train(n, args.results / f"{n}_ranks", options) for n in (1, 2)}
    one, two = summaries[1], summaries[2]
    results = {
        "samples_per_second_1_rank": round(one["samples_per_second"]),
        "samples_per_second_2_ranks": round(two["samples_per_second"]),
        "ratio": round(two["samples_per_second"] / one["samples_per_second"], 3),
        "test_accuracy_1_rank": one["test_accuracy"],
        "test_accuracy_2_ranks": two["test_accuracy"],
    }
    draw(results, summaries, args.samples, args.results)

    cores = len(os.sched_getaffinity(0))
    print(f"\n=== keras_hpc demo: a CNN on {args.samples:,} handwritten digits")
    print(f"ranks           1 and {two['ranks']}, one core and one thread each ({cores} cores here)")
    print(f"backend         {two['backend']}")
    print(f"MPI             {mpi_version()}")
    print(f"throughput      {one['samples_per_second']:.0f} samples/s on 1 rank, {two['samples_per_second']:.0f} on 2")
    print(f"                ratio {results['ratio']:.2f}")
    print(f"test accuracy   {one['test_accuracy']:.2%} on 1 rank, {two['test_accuracy']:.2%} on 2")
    print(f"replicas        {'identical' if two['replicas_identical'] else 'DIFFERENT'} (keras_hpc.check_replicas)")
    print(f"charts, tables  {args.results}/: loss.png, loss.csv, throughput.png, throughput.csv")
    if cores < two["ranks"]:
        print("With fewer cores than ranks, the ranks shared a core: the ratio says nothing.")


if __name__ == "__main__":
    main()
