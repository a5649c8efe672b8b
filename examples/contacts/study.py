# SPDX-License-Identifier: Apache-2.0
"""What `make contacts` runs: the autoencoder of contact maps on 1 and on 2 ranks, several seeds.

The folder of --out then holds summary.csv, latent.png, maps.png, and a folder for each run. Started again, it goes on
where it was. Each rank has a core of its own.
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path

import numpy as np

from examples import launch, tables
from examples.contacts import dynamics

RANKS = (1, 2)
TIME_LIMIT_S = 1800  # of a run
QUALITIES = {"f1": "F1 of contacts", "rand": "adjusted Rand index", "silhouette": "silhouette"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        ranks: how many.
        seed: of everything random but the maps.
    """

    ranks: int
    seed: int

    @property
    def folder(self):
        """Name of its folder."""
        return f"{self.ranks}-ranks-seed-{self.seed}"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results") / "contacts", help="(default: results/contacts)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--chains", type=int, default=60, help="to learn from (default: 60)")
    parser.add_argument("--frames", type=int, default=100, help="maps of each chain (default: 100)")
    parser.add_argument("--preset", default="mini", help="mini or paper (default: mini)")
    return parser.parse_args(argv)


def train(run, args, core=0):
    """Makes a run, unless it was made before. Its messages go to a file in its folder."""
    folder = args.out / run.folder
    if not (folder / "quality.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = {"seed": run.seed, "out": folder, "data": args.out / "maps"}
        options |= {name: getattr(args, name) for name in ("epochs", "chains", "frames", "preset")}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        with (folder / "log.txt").open("w") as log:
            launch.run("examples.contacts.train", words, ranks=run.ranks, core=core, timeout=TIME_LIMIT_S, output=log)
    found = json.loads((folder / "quality.json").read_text())
    print(f"{run.ranks} ranks, seed {run.seed}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()), flush=True)


def summarize(found):
    """Returns a line for each number of ranks: means and spreads over the seeds, and both speed-ups of DeepEx.

    S_p = t_1 / t_p is how much sooner an epoch is over. S_L = t_1 N_1 / (t_p N_p) is how much sooner the test loss is
    down at the target, after N epochs: what the worst of all runs ends with.

    Args:
        found: of each `Run`, its history and its qualities.
    """
    target = max(history[-1]["val_loss"] for history, _ in found.values())
    pace = {
        run: (
            float(np.median([line["seconds"] for line in history[1:] or history])),
            next(int(line["epoch"]) for line in history if line["val_loss"] <= target),
        )
        for run, (history, _) in found.items()
    }

    def mean(ranks, what):
        return float(np.mean([what(*pace[run]) for run in found if run.ranks == ranks]))

    table = []
    fewest = min(run.ranks for run in found)
    for ranks in sorted({run.ranks for run in found}):
        line = {"ranks": ranks}
        for name in QUALITIES:
            values = [quality[name] for run, (_, quality) in found.items() if run.ranks == ranks]
            line |= {name: float(np.mean(values)), f"{name} spread": float(np.std(values, ddof=len(values) > 1))}
        line["seconds of an epoch"] = mean(ranks, lambda t, n: t)
        line["S_p"] = mean(fewest, lambda t, n: t) / mean(ranks, lambda t, n: t)
        line["S_L"] = mean(fewest, lambda t, n: t * n) / mean(ranks, lambda t, n: t * n)
        table.append(line)
    return table


def draw(folder, runs):
    """Draws where the encoder puts test maps of known states, and how the decoder gives some back."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    latent = {run: np.load(folder / run.folder / "latent.npz") for run in runs}
    figure = plt.figure(figsize=(5 * len(runs), 4.5), layout="constrained")
    points = []
    for number, (run, one) in enumerate(latent.items(), 1):
        axes = figure.add_subplot(1, len(runs), number, projection="3d")
        for state, name in enumerate(dynamics.STATES):
            mine = one["latent"][one["states"] == state][:300]
            axes.scatter(*mine.T, s=5, label=name)
            points += [
                {"ranks": run.ranks, "state": state, **dict(zip("xyz", map(float, p), strict=True))} for p in mine
            ]
        axes.set(title=f"{run.ranks} rank{'s' * (run.ranks > 1)}")
    axes.legend(loc="upper right")
    tables.write_figure(folder / "latent.png", figure, "Test maps in the latent space, by state", points)
    maps, logits = (latent[runs[-1]][name][..., 0] for name in ("maps", "logits"))
    figure, rows = plt.subplots(2, len(maps), figsize=(1.8 * len(maps), 4), layout="constrained")
    for panel, image in zip(rows.ravel(), [*maps, *(1 / (1 + np.exp(-logits)))], strict=True):
        panel.imshow(image, cmap="Greys", vmin=0, vmax=1)
        panel.set(xticks=[], yticks=[])
    rows[0, 0].set_ylabel("simulated")
    rows[1, 0].set_ylabel("reconstructed")
    error = [
        {"map": n, "wrong contacts": int(((m > 0) != (g > 0)).sum())}
        for n, (m, g) in enumerate(zip(maps, logits, strict=True))
    ]
    tables.write_figure(folder / "maps.png", figure, "Contact maps of test chains", error)


def main(argv=None):
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [Run(ranks, seed) for ranks in RANKS for seed in range(1, args.seeds + 1)]
    train(runs[0], args)  # which makes the maps
    launch.two_at_a_time(lambda run, core: train(run, args, core), [run for run in runs[1:] if run.ranks == 1])
    for run in runs:
        if run.ranks > 1:
            train(run, args)
    found = {}
    for run in runs:
        folder = args.out / run.folder
        found[run] = tables.read(folder / "history.csv"), json.loads((folder / "quality.json").read_text())
    table = summarize(found)
    tables.write(args.out / "summary.csv", table)
    draw(args.out, [run for run in runs if run.seed == 1])
    names = {**QUALITIES, "seconds of an epoch": "s of an epoch", "S_p": "S_p", "S_L": "S_L"}
    print("\n| ranks | " + " | ".join(names.values()) + " |\n|---:|" + "---:|" * len(names))
    for line in table:
        cells = [
            f"{line[name]:.3f} ± {line[name + ' spread']:.3f}" if name in QUALITIES else f"{line[name]:.2f}"
            for name in names
        ]
        print(f"| {line['ranks']} | " + " | ".join(cells) + " |")
    print(f"{args.out / 'latent.png'}, {args.out / 'maps.png'}: pictures; {len(os.sched_getaffinity(0))} cores here")
    return table


if __name__ == "__main__":
    main()
