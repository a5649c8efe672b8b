# SPDX-License-Identifier: Apache-2.0
"""What `make localsgd` runs: what does it cost in accuracy, and spare in time, to average weights more rarely?

Digits on one rank, and on two that average gradients at every step, or weights every 1, 8, 32 steps or once an epoch,
as they are or by DiLoCo's outer optimizer; several seeds. Each rank has a core of its own as long as there are enough.

The folder of --out then holds study.png, table.md, curves.csv, summary.csv and a folder for each run; with --readme the
picture and the table go into this example's README.md. Started again, it goes on where it was.
"""

import argparse
import dataclasses
import itertools
import os
import shutil
from pathlib import Path

import numpy as np

from benchmarks.page import PARTS
from examples import launch, tables
from examples.studies import epochs_to, learning_speedup

EVERY = (1, 8, 32, "epoch")
OUTERS = ("none", "nesterov")
TARGET = 0.15  # loss of test digits, which a run must reach for its learning speed-up
EXPOSED = PARTS["exposed"]  # as DeepEx names it
TIME_LIMIT_S = 600  # of a run
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        ranks: how many.
        every: period of local steps; 0: gradients are averaged.
        outer: "none" or "nesterov".
        seed: of everything random.
    """

    ranks: int
    every: int | str
    outer: str
    seed: int

    @property
    def way(self):
        """How ranks train together, in words."""
        if self.ranks == 1:
            return "one rank"
        if not self.every:
            return "gradients, every step"
        period = self.every if self.every == "epoch" else f"{self.every} step{'s' * (self.every > 1)}"
        return f"weights, every {period}{', outer Nesterov' * (self.outer != 'none')}"

    @property
    def folder(self):
        """Name of its folder."""
        return f"{self.ranks}-{self.every}-{self.outer}-{self.seed}"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results") / "localsgd", help="(default: results/localsgd)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--epochs", type=int, default=12, help="of each run (default: 12)")
    parser.add_argument("--samples", type=int, default=5000, help="use only so many digits (default: all 5000)")
    parser.add_argument("--readme", action="store_true", help="put picture and table into this example's README.md")
    return parser.parse_args(argv)


def train(run, args, core=0):
    """Makes a run, unless it was made before. Its messages go to a file in its folder."""
    folder = args.out / run.folder
    if not (folder / "history.csv").exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "--every": run.every,
            "--outer": run.outer,
            "--epochs": args.epochs,
            "--samples": args.samples,
            "--seed": run.seed,
            "--out": folder,
        }
        words = list(itertools.chain(*options.items()))
        with (folder / "log.txt").open("w") as log:
            launch.run("examples.localsgd.train", words, ranks=run.ranks, core=core, timeout=TIME_LIMIT_S, output=log)
    last = tables.read(folder / "history.csv")[-1]
    print(f"{run.way}, seed {run.seed}: test accuracy {last['val_accuracy']:.2%}", flush=True)


def summarize(found):
    """Returns lines for summary.csv: of each way to train, mean and spread over the seeds.

    Args:
        found: the history of each `Run`.
    """
    table, pace = [], {}
    for way in dict.fromkeys(run.way for run in found):
        histories = [lines for run, lines in found.items() if run.way == way]
        rest = [lines[1:] or lines for lines in histories]  # the first epoch compiles
        seconds, waited = (
            [float(np.median([line[name] for line in lines])) for lines in rest] for name in ("seconds", "waited")
        )
        pace[way] = [(t, epochs_to(lines, TARGET)) for t, lines in zip(seconds, histories, strict=True)]
        accuracy, loss = ([lines[-1][name] for lines in histories] for name in ("val_accuracy", "val_loss"))
        reached = [n for _, n in pace[way] if n is not None]
        spread = len(histories) > 1
        table.append(
            {
                "way": way,
                "seeds": len(histories),
                "accuracy": float(np.mean(accuracy)),
                "accuracy spread": float(np.std(accuracy, ddof=spread)),
                "loss": float(np.mean(loss)),
                "loss spread": float(np.std(loss, ddof=spread)),
                "MB of an epoch": float(np.mean([line["megabytes"] for lines in rest for line in lines])),
                "seconds of an epoch": float(np.median(seconds)),
                f"s {EXPOSED}": float(np.median(waited)),
                "epochs to target": float(np.mean(reached)) if len(reached) == len(pace[way]) else None,
                "learning speed-up": learning_speedup(next(iter(pace.values())), pace[way]),
            }
        )
    return table


def markdown(table):
    """Returns the summary as a table of Markdown."""
    head = (
        "ranks average", "test accuracy", "test loss", "MB reduced in an epoch", "s of an epoch",
        f"of it {EXPOSED}", f"epochs to a loss of {TARGET}", "S_L",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for row in table:
        cells = (
            row["way"],
            f"{100 * row['accuracy']:.1f} ± {100 * row['accuracy spread']:.1f} %",
            f"{row['loss']:.3f} ± {row['loss spread']:.3f}",
            f"{row['MB of an epoch']:.2f}",
            f"{row['seconds of an epoch']:.2f}",
            f"{row[f's {EXPOSED}']:.3f}",
            "not reached" if row["epochs to target"] is None else f"{row['epochs to target']:.1f}",
            "" if row["learning speed-up"] is None else f"{row['learning speed-up']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found, table, path):
    """Draws accuracy against the way to train, and the loss against the epoch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, curves) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for number, row in enumerate(table):
        bars.errorbar(100 * row["accuracy"], number, xerr=100 * row["accuracy spread"], fmt="o", capsize=4)
        lines = [lines for run, lines in found.items() if run.way == row["way"]]
        losses = np.array([[line["val_loss"] for line in one] for one in lines])
        curves.plot(range(1, losses.shape[1] + 1), losses.mean(axis=0), color=f"C{number % 10}", label=row["way"])
    bars.set_yticks(range(len(table)), [row["way"] for row in table])
    bars.invert_yaxis()
    bars.set_xlabel("accuracy of test digits, %; bars: spread over the seeds")
    curves.axhline(TARGET, color="0.7", linestyle=":")
    curves.set(xlabel="epoch", ylabel="loss of test digits, mean of the seeds", yscale="log")
    curves.legend(fontsize="small")
    tables.write_figure(path, figure, "Two ranks train digits: what they average, and when", table)


def main(argv=None):
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = range(1, args.seeds + 1)
    alone = [Run(1, 0, "none", seed) for seed in seeds]
    ways = [(0, "none"), *itertools.product(EVERY, OUTERS)]
    together = [Run(2, every, outer, seed) for (every, outer), seed in itertools.product(ways, seeds)]
    launch.two_at_a_time(lambda run, core: train(run, args, core), alone)
    for run in together:
        train(run, args)
    found = {run: tables.read(args.out / run.folder / "history.csv") for run in (*alone, *together)}
    table = summarize(found)
    curves = [{"way": run.way, "seed": run.seed, **line} for run, lines in found.items() for line in lines]
    tables.write(args.out / "curves.csv", curves)
    tables.write(args.out / "summary.csv", table)
    draw(found, table, args.out / "study.png")
    (args.out / "table.md").write_text(markdown(table), encoding="utf-8")
    if args.readme:
        here = Path(__file__).parent
        shutil.copy(args.out / "study.png", here / "study.png")
        before, rest = (here / "README.md").read_text(encoding="utf-8").split(BEGIN)
        text = before + BEGIN + markdown(table) + END + rest.split(END)[1]
        (here / "README.md").write_text(text, encoding="utf-8")
    print(f"\n{markdown(table)}\non {len(os.sched_getaffinity(0))} cores; {args.out}: study.png, table.md, summary.csv")
    return table


if __name__ == "__main__":
    main()
