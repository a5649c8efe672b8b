# SPDX-License-Identifier: Apache-2.0
"""What `make largebatch` runs: does training by SGD, or by LARS, still learn when the batch grows from 64 to 4,096?

A batch of 64 on one rank, larger ones on two: each with SGD, whose rate grows with the batch, and with LARS, over
several seeds. All runs see as many digits, but for those of more epochs. Each rank has a core of its own.

The folder of --out then holds study.html with figures, curves.csv and summary.csv, and a folder for each run. Started
again, it goes on where it was.
"""

import argparse
import dataclasses
import itertools
from pathlib import Path

import numpy as np

from examples import launch, studies, tables
from examples.largebatch.train import EPOCH_SAMPLES

KINDS = ((1, 64, 1), (2, 1024, 1), (2, 4096, 1), (2, 4096, 5))  # ranks, batch of all, times the epochs
OPTIMIZERS = ("sgd", "lars")
TIME_LIMIT_S = 1800  # of a run


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        optimizer: "sgd" or "lars".
        ranks: how many.
        batch: samples of a step, of all ranks.
        epochs: how many.
        seed: of everything random.
    """

    optimizer: str
    ranks: int
    batch: int
    epochs: int
    seed: int

    @property
    def folder(self):
        """Name of its folder."""
        return f"{self.optimizer}-{self.batch}-{self.epochs}-{self.seed}"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("results") / "largebatch", help="(default: results/largebatch)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--epochs", type=int, default=10, help="of 8,192 digits, and five times as many (10)")
    parser.add_argument("--samples", type=int, default=5000, help="use only so many digits (default: all 5000)")
    parser.add_argument("--readme", action="store_true", help="put the table and the pictures into this repository")
    return parser.parse_args(argv)


def train(run, args, core=0):
    """Makes a run, unless it was made before. Its messages go to a file in its folder."""
    folder = args.out / run.folder
    if (folder / "history.csv").exists():
        return
    options = {
        "--optimizer": run.optimizer,
        "--global-batch": run.batch,
        "--epochs": run.epochs,
        "--samples": args.samples,
        "--seed": run.seed,
        "--out": folder,
    }
    folder.mkdir(parents=True, exist_ok=True)
    words = list(itertools.chain(*options.items()))
    with (folder / "log.txt").open("w") as log:
        launch.run("examples.largebatch.train", words, ranks=run.ranks, core=core, timeout=TIME_LIMIT_S, output=log)
    last = tables.read(folder / "history.csv")[-1]
    kind = f"{run.optimizer}, batch {run.batch}, {run.epochs} epochs, seed {run.seed}"
    print(f"{kind}: test accuracy {last['val_accuracy']:.2%}", flush=True)


def summarize(found):
    """Returns lines for summary.csv: of each optimizer, batch and epochs, mean and spread over the seeds.

    Args:
        found: the history of each `Run`.
    """
    table = []
    for optimizer in dict.fromkeys(run.optimizer for run in found):
        mine = {run: lines for run, lines in found.items() if run.optimizer == optimizer}
        for kind in dict.fromkeys((run.batch, run.epochs) for run in mine):
            runs = [run for run in mine if (run.batch, run.epochs) == kind]
            last = [mine[run][-1] for run in runs]
            accuracy, loss = ([line[name] for line in last] for name in ("val_accuracy", "val_loss"))
            table.append(
                {
                    "optimizer": optimizer,
                    "batch": kind[0],
                    "ranks": runs[0].ranks,
                    "epochs": kind[1],
                    "steps": kind[1] * EPOCH_SAMPLES // kind[0],
                    "seeds": len(last),
                    "accuracy": float(np.mean(accuracy)),
                    "accuracy spread": float(np.std(accuracy, ddof=len(last) > 1)),
                    "loss": float(np.mean(loss)),
                    "loss spread": float(np.std(loss, ddof=len(last) > 1)),
                }
            )
    return table


def markdown(table):
    """Returns a table of Markdown, a line for each batch and number of epochs."""
    lines = ["| batch of all ranks | epochs | steps | test accuracy, SGD | LARS |", f"|{'---:|' * 5}"]
    for row in table:
        if row["optimizer"] == OPTIMIZERS[0]:
            alike = [r for r in table if (r["batch"], r["epochs"]) == (row["batch"], row["epochs"])]
            cells = [f"{100 * r['accuracy']:.1f} ± {100 * r['accuracy spread']:.1f} %" for r in alike]
            lines.append(f"| {row['batch']:,} | {row['epochs']} | {row['steps']:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = range(1, args.seeds + 1)
    runs = [
        Run(optimizer, ranks, batch, times * args.epochs, seed)
        for seed, (ranks, batch, times), optimizer in itertools.product(seeds, KINDS, OPTIMIZERS)
    ]
    launch.two_at_a_time(lambda run, core: train(run, args, core), [run for run in runs if run.ranks == 1])
    for run in runs:
        if run.ranks > 1:
            train(run, args)

    from examples.largebatch import study_page  # matplotlib, for which the ranks need not wait

    found = {run: tables.read(args.out / run.folder / "history.csv") for run in runs}
    table = summarize(found)
    study_page.write(args.out, found, table)
    text = markdown(table)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    if args.readme:
        studies.publish("largebatch", args.out, text, ["accuracy.png", "loss.png"])
    print(f"\n{text}")
    print(f"{args.out / 'study.html'}: all figures and tables")
    return table


if __name__ == "__main__":
    main()
