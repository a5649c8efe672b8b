# SPDX-License-Identifier: Apache-2.0
"""What `make gan3d` runs: the 3DGAN on 1 rank and on 2, synchronous and pipelined, and whether all learn the same.

Each rank has a core and a thread of its own. Runs on 1 and on 2 ranks take the same number of steps with the same
number of showers in each, so that they have seen as much. Every run is judged by showers that none was trained on.

The folder of --out then holds study.html, curves.csv and summary.csv with what it shows, validation/ with a full report
of the first run on 2 ranks, and a folder for each run. Started again, it goes on where it was.
"""

import argparse
import dataclasses
import itertools
from pathlib import Path

import numpy as np

from examples import launch, tables

EVENTS, ENERGIES_GEV = 20_000, (10, 100)
JUDGED = 2000  # showers
TIME_LIMIT_S = 1800  # of a run
WHO = ("discriminator", "generator")  # on team 0 and team 1


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        ranks: how many.
        schedule: of both teams.
        seed: of everything random.
    """

    ranks: int
    schedule: str
    seed: int

    @property
    def kind(self):
        """What it has in common with runs of other seeds."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.schedule}"

    @property
    def folder(self):
        """Name of its folder."""
        return f"{self.ranks}-{self.schedule}-{self.seed}"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results") / "gan3d", help="(default: results/gan3d)")
    parser.add_argument("--data", type=Path, help="HDF5 file of showers, 13 x 13 x 13 (default: made in --out)")
    parser.add_argument("--events", type=int, default=EVENTS, help=f"showers to make without --data ({EVENTS})")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--pipelined-seeds", type=int, default=1, help="the same, of pipelined ones (default: 1)")
    parser.add_argument("--cooldown-epochs", type=int, default=0, help="at the end of pipelined runs (default: 0)")
    parser.add_argument("--epochs", type=int, default=8, help="points of the curves (default: 8)")
    parser.add_argument("--steps", type=int, default=200, help="of each epoch (default: 200)")
    parser.add_argument("--batch-size", type=int, default=16, help="showers in a step, of all ranks (default: 16)")
    return parser.parse_args(argv)


def train(run, args, core=0):
    """Makes a run, or the rest of it. Its messages go to a file in its folder."""
    folder = args.out / run.folder
    options = {
        "--data": args.data,
        "--out": folder,
        "--epochs": args.epochs,
        "--steps": args.steps,
        "--batch-size": args.batch_size // run.ranks,
        "--seed": run.seed,
        "--schedule-d": run.schedule,
        "--schedule-g": run.schedule,
        "--cooldown-epochs": args.cooldown_epochs,
    }
    flags = ["--keep-generators", "--decay"]
    if list((folder / "checkpoint").glob("step-*")):
        flags.append("--resume")
    folder.mkdir(parents=True, exist_ok=True)
    if len(tables.read(folder / "epochs.csv")) < args.epochs:
        with (folder / "log.txt").open("a") as log:
            launch.run(
                "examples.gan3d.train",
                [*itertools.chain(*options.items()), *flags],
                ranks=run.ranks,
                core=core,
                timeout=TIME_LIMIT_S,
                output=log,
            )
    rate = np.mean([samples_per_second(row) for row in tables.read(folder / "epochs.csv")])
    print(f"{run.kind}, seed {run.seed}: {rate:.0f} samples/s", flush=True)


def samples_per_second(row):
    """Returns the training speed of an epoch, from its line in epochs.csv."""
    return row["samples"] / row["seconds"]


def judge(folder, epoch, images, energies):
    """Compares showers of a generator with Monte Carlo, in bins of energy; all together, if there are too few for bins.

    Args:
        folder: of the run.
        epoch: after which the generator was kept, from 1.
        images: Monte Carlo, (n, x, y, z), GeV.
        energies: theirs, (n,), GeV.

    Returns:
        a dictionary: "figure of merit" and "D_w", means over the bins, and of the worst bin: "largest D_w" and
        "sum error", by how much of it the mean sum of cells differs from Monte Carlo.
    """
    from examples.gan3d import metrics, networks, validate

    generator = networks.generator("mini")
    generator.load_weights(folder / f"generator-{epoch}.weights.h5")
    generator.compile(jit_compile=networks.use_xla())
    bins = validate.energy_bins(energies)
    whole = bins.pop(validate.WHOLE)
    bins = list(bins.values()) or [whole]
    used = np.concatenate(bins)
    generated = np.zeros_like(images)
    generated[used] = networks.generate(generator, np.random.default_rng(0), energies[used])
    merits = [metrics.figure_of_merit(images[rows], generated[rows]) for rows in bins]
    errors = [abs(generated[rows].sum() / images[rows].sum() - 1) for rows in bins]
    return {
        "figure of merit": float(np.mean([merit.total for merit in merits])),
        "D_w": float(np.mean([merit.d_w for merit in merits])),
        "largest D_w": max(merit.d_w for merit in merits),
        "sum error": float(max(errors)),
    }


def curve(run, args, images, energies):
    """Returns lines for curves.csv: how good a run's generator was after each epoch, and after which time."""
    folder = args.out / run.folder
    lines, seconds, samples = [], 0.0, 0
    for row in tables.read(folder / "epochs.csv"):
        seconds, samples = seconds + row["seconds"], samples + int(row["samples"])
        epoch = int(row["epoch"]) + 1
        facts = {"kind": run.kind, "seed": run.seed, "epoch": epoch, "samples": samples, "seconds": seconds}
        costs = {"samples/s": samples_per_second(row)}
        for team, name in enumerate(WHO):
            costs[f"{name} exposed ms"] = row[f"communication/team{team}_exposed_ms"]
            costs[f"{name} hidden"] = row[f"communication/team{team}_hidden"]
        lines.append(facts | judge(folder, epoch, images, energies) | costs)
    return lines


def summarize(lines, epochs):
    """Returns lines for summary.csv: of each kind of runs, mean and spread over its seeds.

    Qualities are those after the last epoch, in which the learning rate has fallen; speeds are medians over epochs but
    the first.
    """
    table = []
    for kind in dict.fromkeys(line["kind"] for line in lines):
        mine = [line for line in lines if line["kind"] == kind]
        last = [line for line in mine if line["epoch"] == epochs]
        result = {"kind": kind, "seeds": len(last)}
        for name in ("figure of merit", "D_w", "largest D_w", "sum error"):
            values = [line[name] for line in last]
            result |= {name: float(np.mean(values)), f"{name} spread": float(np.std(values, ddof=len(values) > 1))}
        for name in ("samples/s", *(f"{who} {what}" for who in WHO for what in ("exposed ms", "hidden"))):
            result[name] = float(np.median([line[name] for line in mine if line["epoch"] > 1 or epochs == 1]))
        table.append(result)
    return table


def main(argv=None):
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.data is None:
        args.data = args.out / "showers.h5"
        options = ["--events", args.events, "--size", 13, "--energies", *ENERGIES_GEV, "--out", args.data]
        launch.run("examples.gan3d.showers", options, timeout=TIME_LIMIT_S)

    seeds = range(1, args.seeds + 1)
    runs = [Run(1, "synchronous", seed) for seed in seeds]
    launch.two_at_a_time(lambda run, core: train(run, args, core), runs)
    together = [Run(2, "synchronous", seed) for seed in seeds]
    together += [Run(2, "pipelined", seed) for seed in range(1, args.pipelined_seeds + 1)]
    # One after the other in turns, so that a machine whose speed drifts does not decide.
    for run in sorted(together, key=lambda run: run.seed):
        train(run, args)
    runs += together

    from examples.gan3d import data, study_page, validate  # Keras, which the ranks need not wait for

    test = data.read(args.data, part="test")
    images = test.images[:JUDGED, ..., 0] * np.float32(data.CELL_UNIT_GEV)
    energies = test.energies[:JUDGED, 0].astype("float64") * data.ENERGY_UNIT_GEV
    lines = [line for run in runs for line in curve(run, args, images, energies)]
    table = summarize(lines, args.epochs)
    chosen = args.out / Run(2, "synchronous", 1).folder
    validate.main(
        [
            *("--generator", str(chosen / "generator.weights.h5"), "--data", str(args.data)),
            *("--discriminator", str(chosen / "discriminator.weights.h5"), "--losses", str(chosen / "losses.csv")),
            *("--out", str(args.out / "validation")),
        ]
    )
    study_page.write(args.out, lines, table)
    print(f"\n{'':24}samples/s  figure of merit       largest D_w         sum error")
    for row in table:
        shown = "".join(
            f"{row[name]:9.3f} ± {row[f'{name} spread']:.3f}  "
            for name in ("figure of merit", "largest D_w", "sum error")
        )
        print(f"{row['kind']:24}{row['samples/s']:9.0f}  {shown}")
    print(f"{args.out / 'study.html'}: all figures and tables")
    return table


if __name__ == "__main__":
    main()
