# SPDX-License-Identifier: Apache-2.0
"""Studies that train on 1 rank and on 2, with several seeds, and compare: runs, tables, pages.

A run is a module with `--seed` and `--out` that leaves quality.json, a dictionary of numbers, in its folder. Runs that
were made before are not made again.
"""

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np

from examples import launch, tables

RANKS = (1, 2)
TIME_LIMIT_S = 1800  # of a run
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        ranks: how many.
        seed: of everything random but the data.
    """

    ranks: int
    seed: int

    @property
    def folder(self):
        """Name of its folder."""
        return f"{self.ranks}-ranks-seed-{self.seed}"


def parser(name, description):
    """Returns a parser of what all studies take; `name` is that of the folder in examples/."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=Path("results") / name, help=f"(default: results/{name})")
    found.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    found.add_argument("--readme", action="store_true", help="put the table and the pictures into this repository")
    return found


def train(module, out, seeds, options):
    """Makes all runs, each rank on a core of its own. Messages go to a file in a run's folder.

    Args:
        module: name, as after `python -m`.
        out: folder, in which each run has its own.
        seeds: how many.
        options: of the module, a dictionary of words without dashes, and values.

    Returns:
        Of each `Run`, what its quality.json says.
    """
    found = {}

    def make(run, core=0):
        folder = out / run.folder
        if not (folder / "quality.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            given = {**options, "seed": run.seed, "out": folder}
            words = [word for name, value in given.items() for word in (f"--{name}", value)]
            with (folder / "log.txt").open("w") as log:
                launch.run(module, words, ranks=run.ranks, core=core, timeout=TIME_LIMIT_S, output=log)
        found[run] = json.loads((folder / "quality.json").read_text())
        shown = ", ".join(f"{name} {value:.3f}" for name, value in found[run].items())
        print(f"{run.ranks} rank{'s' * (run.ranks > 1)}, seed {run.seed}: {shown}", flush=True)

    runs = [Run(ranks, seed) for ranks in RANKS for seed in range(1, seeds + 1)]
    launch.two_at_a_time(make, [run for run in runs if run.ranks == 1])
    for run in runs:
        if run.ranks > 1:
            make(run)
    return {run: found[run] for run in runs}


def summarize(found):
    """Returns a line for each number of ranks: mean and spread (of a sample) over the seeds of each number."""
    table = []
    for ranks in sorted({run.ranks for run in found}):
        mine = [quality for run, quality in found.items() if run.ranks == ranks]
        line = {"ranks": ranks}
        for name in mine[0]:
            values = [quality[name] for quality in mine]
            line |= {name: float(np.mean(values)), f"{name} spread": float(np.std(values, ddof=len(values) > 1))}
        table.append(line)
    return table


def epochs_to(lines, target):
    """Returns after how many epochs the loss of tests first was `target` or less; None if never."""
    return next((int(line["epoch"]) for line in lines if line["val_loss"] <= target), None)


def learning_speedup(alone, others):
    """Returns S_L = t_1 N_1 / (t_p N_p): by how much sooner p ranks reach the target than one (DeepEx).

    Args:
        alone: of one rank, and `others`, of p: lists of (seconds of an epoch, epochs to the target), one for each seed.
    """
    if any(n is None for _, n in (*alone, *others)):
        return None
    return float(np.mean([t * n for t, n in alone]) / np.mean([t * n for t, n in others]))


def markdown(table, columns):
    """Returns a table of Markdown.

    Args:
        table: of `summarize`.
        columns: what each number is called, in order; a number that is not in it is left out.
    """
    lines = [f"| ranks | {' | '.join(columns.values())} |", "|---:|" + "---:|" * len(columns)]
    for line in table:
        cells = [f"{line[name]:.3f} ± {line[name + ' spread']:.3f}" for name in columns]
        lines.append(f"| {line['ranks']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def publish(name, out, text, pictures):
    """Puts a table into the README of an example, between its marks, and pictures with their numbers into docs/.

    Args:
        name: of the folder in examples/, and of that in docs/.
        out: folder of the pictures.
        text: Markdown.
        pictures: names of files.
    """
    root = Path(__file__).parent.parent
    page = root / "examples" / name / "README.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")
    (root / "docs" / name).mkdir(exist_ok=True)
    for picture in pictures:
        shutil.copy(out / picture, root / "docs" / name / picture)


def finish(name, args, table, columns, pictures):
    """Writes summary.csv and table.md, prints the table, and publishes it all if that is wanted."""
    text = markdown(table, columns)
    tables.write(args.out / "summary.csv", table)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    if args.readme:
        publish(name, args.out, text, pictures)
    shown = ", ".join(str(args.out / picture) for picture in pictures)
    print(f"\n{text}\n{shown}: pictures; {len(os.sched_getaffinity(0))} cores here")
