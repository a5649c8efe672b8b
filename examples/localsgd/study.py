# SPDX-License-Identifier: Apache-2.0
"""What `make localsgd` runs: what does it cost in accuracy, and spare in time, to average weights more rarely?

Digits, and jets by the HEP-CNN, on one rank, and on two that average gradients at every step, or weights every 1, 8,
32 steps or once an epoch, as they are or by DiLoCo's outer optimizer; several seeds. Each rank has a core of its own as
long as there are enough.

The folder of --out then holds study.png, table.md, curves.csv, summary.csv and a folder for each run; with --readme the
picture and the table go into this example's README.md. Started again, it goes on where it was.
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np

from benchmarks.page import PARTS
from examples import launch, tables
from examples.studies import epochs_to, learning_speedup

EVERY = (1, 8, 32, "epoch")
OUTERS = ("none", "nesterov")
EXPOSED = PARTS["exposed"]  # as DeepEx names it
TIME_LIMIT_S = 600  # of a run
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


@dataclasses.dataclass(frozen=True)
class Task:
    """How a task of `train.py` is judged.

    Attributes:
        heading: of its table.
        quality: what its quality.json says.
        target: loss of tests, which a run must reach for its learning speed-up.
    """

    heading: str
    quality: str
    target: float


TASKS = {
    "digits": Task("Digits:", "test accuracy", 0.15),
    "jets": Task("Jets, by the HEP-CNN:", "area under the ROC curve", 0.45),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        task: what is learned.
        ranks: how many.
        every: period of local steps; 0: gradients are averaged.
        outer: "none" or "nesterov".
        seed: of everything random.
    """

    task: str
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
        return f"{self.task}-{self.ranks}-{self.every}-{self.outer}-{self.seed}"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results") / "localsgd", help="(default: results/localsgd)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--epochs", type=int, help="of each run (default: 12 for digits, 8 for jets)")
    parser.add_argument("--samples", type=int, help="use only so many (default: all)")
    parser.add_argument("--readme", action="store_true", help="put picture and table into this example's README.md")
    return parser.parse_args(argv)


def train(run, args, core=0):
    """Makes a run, unless it was made before. Its messages go to a file in its folder."""
    folder = args.out / run.folder
    if not (folder / "quality.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "--task": run.task,
            "--every": run.every,
            "--outer": run.outer,
            "--epochs": args.epochs,
            "--samples": args.samples,
            "--seed": run.seed,
            "--out": folder,
        }
        words = [word for option in options.items() if option[1] is not None for word in option]
        with (folder / "log.txt").open("w") as log:
            launch.run("examples.localsgd.train", words, ranks=run.ranks, core=core, timeout=TIME_LIMIT_S, output=log)
    print(f"{run.task}, {run.way}, seed {run.seed}: {TASKS[run.task].quality} {outcome(run, args)[1]:.3f}", flush=True)


def outcome(run, args):
    """Returns the history of a run that was made, a line for each epoch, and its quality at the end."""
    folder = args.out / run.folder
    return tables.read(folder / "history.csv"), json.loads((folder / "quality.json").read_text())["quality"]


def summarize(found):
    """Returns lines for summary.csv: of each way to train, mean and spread over the seeds.

    Args:
        found: the `outcome` of each `Run`, all of one task.
    """
    table, pace = [], {}
    (task,) = {run.task for run in found}
    for way in dict.fromkeys(run.way for run in found):
        histories, quality = zip(*(outcome for run, outcome in found.items() if run.way == way), strict=True)
        rest = [lines[1:] or lines for lines in histories]  # the first epoch compiles
        seconds, waited = (
            [float(np.median([line[name] for line in lines])) for lines in rest] for name in ("seconds", "waited")
        )
        pace[way] = [(t, epochs_to(lines, TASKS[task].target)) for t, lines in zip(seconds, histories, strict=True)]
        loss = [lines[-1]["val_loss"] for lines in histories]
        reached = [n for _, n in pace[way] if n is not None]
        spread = len(histories) > 1
        table.append(
            {
                "task": task,
                "way": way,
                "seeds": len(histories),
                "quality": float(np.mean(quality)),
                "quality spread": float(np.std(quality, ddof=spread)),
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
    """Returns the summary of a task as a table of Markdown."""
    task = table[0]["task"]
    head = (
        "ranks average", TASKS[task].quality, "test loss", "MB reduced in an epoch", "s of an epoch",
        f"of it {EXPOSED}", f"epochs to a loss of {TASKS[task].target}", "S_L",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for row in table:
        cells = (
            row["way"],
            f"{row['quality']:.3f} ± {row['quality spread']:.3f}",
            f"{row['loss']:.3f} ± {row['loss spread']:.3f}",
            f"{row['MB of an epoch']:.2f}",
            f"{row['seconds of an epoch']:.2f}",
            f"{row[f's {EXPOSED}']:.3f}",
            "not reached" if row["epochs to target"] is None else f"{row['epochs to target']:.1f}",
            "" if row["learning speed-up"] is None else f"{row['learning speed-up']:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found, tables_of, path):
    """Draws, for each task, quality against the way to train, and the loss against the epoch."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(len(tables_of), 2, figsize=(12, 4.5 * len(tables_of)), layout="constrained")
    for (task, table), (bars, curves) in zip(tables_of.items(), np.atleast_2d(rows), strict=True):
        for number, row in enumerate(table):
            bars.errorbar(row["quality"], number, xerr=row["quality spread"], fmt="o", capsize=4)
            lines = [lines for run, (lines, _) in found.items() if (run.task, run.way) == (task, row["way"])]
            losses = np.array([[line["val_loss"] for line in one] for one in lines])
            curves.plot(range(1, losses.shape[1] + 1), losses.mean(axis=0), color=f"C{number % 10}", label=row["way"])
        bars.set_yticks(range(len(table)), [row["way"] for row in table])
        bars.invert_yaxis()
        bars.set_xlabel(f"{task}: {TASKS[task].quality}; bars: spread over the seeds")
        curves.axhline(TASKS[task].target, color="0.7", linestyle=":")
        curves.set(xlabel="epoch", ylabel=f"{task}: loss of tests, mean of the seeds", yscale="log")
        curves.legend(fontsize="small")
    summary = list(itertools.chain(*tables_of.values()))
    tables.write_figure(path, figure, "Two ranks train: what they average, and when", summary)


def main(argv=None):
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = range(1, args.seeds + 1)
    ways = [(0, "none"), *itertools.product(EVERY, OUTERS)]
    found, summaries = {}, {}
    for task in TASKS:
        alone = [Run(task, 1, 0, "none", seed) for seed in seeds]
        together = [Run(task, 2, every, outer, seed) for (every, outer), seed in itertools.product(ways, seeds)]
        launch.two_at_a_time(lambda run, core: train(run, args, core), alone)
        for run in together:
            train(run, args)
        outcomes = {run: outcome(run, args) for run in (*alone, *together)}
        summaries[task] = summarize(outcomes)
        found |= outcomes
    curves = [
        {"task": run.task, "way": run.way, "seed": run.seed, **line}
        for run, (lines, _) in found.items()
        for line in lines
    ]
    tables.write(args.out / "curves.csv", curves)
    tables.write(args.out / "summary.csv", list(itertools.chain(*summaries.values())))
    draw(found, summaries, args.out / "study.png")
    text = "\n".join(f"{TASKS[task].heading}\n\n{markdown(table)}" for task, table in summaries.items())
    (args.out / "table.md").write_text(text, encoding="utf-8")
    if args.readme:
        here = Path(__file__).parent
        shutil.copy(args.out / "study.png", here / "study.png")
        before, rest = (here / "README.md").read_text(encoding="utf-8").split(BEGIN)
        page = before + BEGIN + text + END + rest.split(END)[1]
        (here / "README.md").write_text(page, encoding="utf-8")
    print(f"\n{text}\non {len(os.sched_getaffinity(0))} cores; {args.out}: study.png, table.md, summary.csv")
    return summaries


if __name__ == "__main__":
    main()
