# SPDX-License-Identifier: Apache-2.0
"""What `make largebatch` runs: does training by SGD, or by LARS, still learn when the batch grows from 64 to 4,096?

Batches of 64 on 1, 2 and 4 ranks, then larger ones on 4: each with SGD, whose rate grows with the batch, and with LARS,
over several seeds. All runs see as many digits. Each rank has a core of its own as long as there are enough.

The folder of --out then holds study.html with figures, curves.csv and summary.csv, and a folder for each run. Started
again, it goes on where it was.
"""

import argparse
import dataclasses
import itertools
import os
from pathlib import Path

import numpy as np

from examples import launch, tables

BATCHES = ((1, 64), (2, 64), (4, 64), (4, 256), (4, 1024))  # ranks, samples of each
OPTIMIZERS = ("sgd", "lars")
TARGET = 0.15  # loss of test digits, which a run must reach for its learning speed-up
TIME_LIMIT_S = 1800  # of a run


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        optimizer: "sgd" or "lars".
        ranks: how many.
        batch: samples of a step, of all ranks.
        seed: of everything random.
    """

    optimizer: str
    ranks: int
    batch: int
    seed: int

    @property
    def folder(self):
        """Name of its folder."""
        return f"{self.optimizer}-{self.batch}-{self.seed}"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("results") / "largebatch", help="(default: results/largebatch)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--epochs", type=int, default=10, help="of 8,192 digits (default: 10)")
    parser.add_argument("--samples", type=int, default=5000, help="use only so many digits (default: all 5000)")
    return parser.parse_args(argv)


def train(run, args, core=0):
    """Makes a run, unless it was made before. Its messages go to a file in its folder."""
    folder = args.out / run.folder
    if (folder / "history.csv").exists():
        return
    options = {
        "--optimizer": run.optimizer,
        "--global-batch": run.batch,
        "--epochs": args.epochs,
        "--samples": args.samples,
        "--seed": run.seed,
        "--out": folder,
    }
    folder.mkdir(parents=True, exist_ok=True)
    words = list(itertools.chain(*options.items()))
    with (folder / "log.txt").open("w") as log:
        launch.run("examples.largebatch.train", words, ranks=run.ranks, core=core, timeout=TIME_LIMIT_S, output=log)
    last = tables.read(folder / "history.csv")[-1]
    print(f"{run.optimizer}, batch {run.batch}, seed {run.seed}: test accuracy {last['val_accuracy']:.2%}", flush=True)


def epochs_to(lines, target=TARGET):
    """Returns after how many epochs the loss of test digits first was `target` or less; None if never."""
    return next((int(line["epoch"]) for line in lines if line["val_loss"] <= target), None)


def learning_speedup(alone, others):
    """Returns S_L = t_1 N_1 / (t_p N_p): by how much sooner p ranks reach the target than one (DeepEx).

    Args:
        alone: of one rank, and `others`, of p: lists of (seconds of an epoch, epochs to the target), one for each seed.
    """
    if any(n is None for _, n in (*alone, *others)):
        return None
    return float(np.mean([t * n for t, n in alone]) / np.mean([t * n for t, n in others]))


def summarize(found):
    """Returns lines for summary.csv: of each optimizer and batch, mean and spread over the seeds.

    Args:
        found: the history of each `Run`.
    """
    table = []
    for optimizer in dict.fromkeys(run.optimizer for run in found):
        mine = {run: lines for run, lines in found.items() if run.optimizer == optimizer}
        pace = {
            batch: [
                (float(np.median([line["seconds"] for line in lines[1:] or lines])), epochs_to(lines))
                for run, lines in mine.items()
                if run.batch == batch
            ]
            for batch in dict.fromkeys(run.batch for run in mine)
        }
        smallest = min(pace)
        for batch, paces in pace.items():
            last = [lines[-1] for run, lines in mine.items() if run.batch == batch]
            accuracy, loss = ([line[name] for line in last] for name in ("val_accuracy", "val_loss"))
            reached = [n for _, n in paces if n is not None]
            table.append(
                {
                    "optimizer": optimizer,
                    "batch": batch,
                    "ranks": next(run.ranks for run in mine if run.batch == batch),
                    "seeds": len(last),
                    "accuracy": float(np.mean(accuracy)),
                    "accuracy spread": float(np.std(accuracy, ddof=len(last) > 1)),
                    "loss": float(np.mean(loss)),
                    "loss spread": float(np.std(loss, ddof=len(last) > 1)),
                    "seconds of an epoch": float(np.median([t for t, _ in paces])),
                    "epochs to target": float(np.mean(reached)) if len(reached) == len(paces) else None,
                    "learning speed-up": learning_speedup(pace[smallest], paces),
                }
            )
    return table


def main(argv=None):
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    seeds = range(1, args.seeds + 1)
    runs = [
        Run(optimizer, ranks, ranks * share, seed)
        for (ranks, share), optimizer, seed in itertools.product(BATCHES, OPTIMIZERS, seeds)
    ]
    launch.two_at_a_time(lambda run, core: train(run, args, core), [run for run in runs if run.ranks == 1])
    for run in runs:
        if run.ranks > 1:
            train(run, args)

    from examples.largebatch import study_page  # matplotlib, for which the ranks need not wait

    found = {run: tables.read(args.out / run.folder / "history.csv") for run in runs}
    table = summarize(found)
    study_page.write(args.out, found, table, cores)
    print(f"\n{'':6}{'batch':>6}{'ranks':>6}{'test accuracy':>20}{'test loss':>18}{'learning speed-up':>20}")
    for row in table:
        shown = f"{row['accuracy']:12.2%} ± {row['accuracy spread']:.2%}{row['loss']:10.3f} ± {row['loss spread']:.3f}"
        speedup = "not reached" if row["learning speed-up"] is None else f"{row['learning speed-up']:.2f}"
        print(f"{row['optimizer']:6}{row['batch']:6}{row['ranks']:6}{shown}{speedup:>20}")
    print(f"{args.out / 'study.html'}: all figures and tables")
    return table


if __name__ == "__main__":
    main()
