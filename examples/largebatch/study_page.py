# SPDX-License-Identifier: Apache-2.0
"""Shows what study.py found: accuracy against the batch, curves of the loss, learning speed-up, on one page."""

import matplotlib as mpl
import numpy as np

from examples import pages, tables

mpl.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"sgd": "SGD, rate grows with the batch", "lars": "LARS, rate grows with its square root"}
EXPLANATION = """<p>{samples} digits, moved by up to two pixels, a residual network of 8 layers, {seeds} seeds; runs of
as many epochs see as many digits, so a batch that is 64 times as large makes a 64th of the steps. The rate rises for
12&nbsp;% of the training and then falls with the square of what is left; labels are smoothed; biases and
BatchNormalization do not decay. BatchNormalization normalizes over each rank's part of the batch, and its moving
statistics follow faster where there are few steps.</p>
<p><b>What this shows</b>: how much is lost when the batch grows and nothing is tuned but by rule, whether LARS loses
less, and what more epochs bring back. <b>What it does not show</b>: anything about ImageNet, about batches that a
tuned rate would still train, or about speed.</p>"""


def write(folder, found, table):
    """Writes study.html, the figures, curves.csv and summary.csv.

    Args:
        folder: a `Path`.
        found: the history of each `study.Run`.
        table: of summary.csv.
    """
    curves = [
        {"optimizer": run.optimizer, "batch": run.batch, "epochs": run.epochs, "seed": run.seed, **line}
        for run, lines in found.items()
        for line in lines
    ]
    tables.write(folder / "curves.csv", curves)
    tables.write(folder / "summary.csv", table)
    _against_batch(table, folder / "accuracy.png")
    _curves(curves, folder / "loss.png")
    head = ("optimizer", "batch", "ranks", "epochs", "steps", "test accuracy", "test loss")
    rows = [
        (
            row["optimizer"],
            str(row["batch"]),
            str(row["ranks"]),
            str(row["epochs"]),
            str(row["steps"]),
            f"{row['accuracy']:.2%} ± {row['accuracy spread']:.2%}",
            f"{row['loss']:.3f} ± {row['loss spread']:.3f}",
        )
        for row in table
    ]
    told = EXPLANATION.format(samples="4,000", seeds=table[0]["seeds"])
    figures = pages.figures(["accuracy.png", "loss.png"])
    page = pages.document("Large batches: SGD and LARS", [told, pages.table(head, rows), figures])
    (folder / "study.html").write_text(page, encoding="utf-8")


def _name(row):
    return f"{row['batch']:,}, {row['epochs']} epochs"


def _against_batch(table, path):
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    names = list(dict.fromkeys(map(_name, table)))
    for optimizer, name in NAMES.items():
        mine = [row for row in table if row["optimizer"] == optimizer]
        for panel, what in zip(axes, ("accuracy", "loss"), strict=True):
            values, spreads = ([row[key] for row in mine] for key in (what, f"{what} spread"))
            panel.errorbar([names.index(_name(row)) for row in mine], values, spreads, fmt="o", capsize=4, label=name)
            panel.set(xlabel="batch of all ranks", ylabel=f"{what} of test digits")
            panel.set_xticks(range(len(names)), names)
    axes[1].set(yscale="log")
    axes[0].legend()
    tables.write_figure(path, figure, "After training; bars: spread over the seeds", table)


def _curves(curves, path):
    figure, axes = plt.subplots(1, len(NAMES), figsize=(12, 4), layout="constrained", sharey=True)
    for panel, (optimizer, name) in zip(axes, NAMES.items(), strict=True):
        for color, kind in enumerate(sorted({(line["batch"], line["epochs"]) for line in curves})):
            mine = [
                line for line in curves if line["optimizer"] == optimizer and (line["batch"], line["epochs"]) == kind
            ]
            steps = sorted({line["epoch"] for line in mine})
            losses = [[line["val_loss"] for line in mine if line["epoch"] == step] for step in steps]
            panel.plot(steps, [np.mean(values) for values in losses], color=f"C{color}", label=_name(mine[0]))
            low, high = ([function(values) for values in losses] for function in (np.min, np.max))
            panel.fill_between(steps, low, high, color=f"C{color}", alpha=0.2, linewidth=0)
        panel.set(title=name, xlabel="epoch", yscale="log")
    axes[0].set_ylabel("loss of test digits")
    axes[0].legend()
    tables.write_figure(path, figure, "Means of the seeds; bands: all of them", curves)
