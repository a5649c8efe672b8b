# SPDX-License-Identifier: Apache-2.0
"""Shows what study.py found: accuracy against the batch, curves of the loss, learning speed-up, on one page."""

import matplotlib as mpl
import numpy as np

from examples import pages, tables

mpl.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"sgd": "SGD, rate grows with the batch", "lars": "LARS, rate grows with its square root"}
EXPLANATION = """<p>{samples} digits, moved by up to two pixels, a residual network of 8 layers (77,754 parameters),
{seeds} seeds; every run sees as many digits, so a batch that is 64 times as large makes a 64th of the steps. The rate
rises for a fifth of the training and then falls with the square of what is left. BatchNormalization normalizes over
each rank's part of the batch.</p>
<p><b>What this shows</b>: how much is lost when the batch grows and nothing is tuned but by rule, and whether LARS
loses less. <b>What it does not show</b>: anything about ImageNet, about batches that a tuned rate would still train,
or, with more ranks than cores ({cores} here), about speed. The learning speed-up is that of DeepEx, S<sub>L</sub> =
t<sub>1</sub> N<sub>1</sub> / (t<sub>p</sub> N<sub>p</sub>), with the time t of an epoch and the number N of epochs to
a test loss of {target}; of batches that all seeds brought that far.</p>"""


def write(folder, found, table, cores):
    """Writes study.html, the figures, curves.csv and summary.csv.

    Args:
        folder: a `Path`.
        found: the history of each `study.Run`.
        table: of summary.csv.
        cores: of this machine.
    """
    from examples.largebatch import study

    curves = [
        {"optimizer": run.optimizer, "batch": run.batch, "ranks": run.ranks, "seed": run.seed, **line}
        for run, lines in found.items()
        for line in lines
    ]
    tables.write(folder / "curves.csv", curves)
    tables.write(folder / "summary.csv", table)
    _against_batch(table, folder / "accuracy.png")
    _curves(curves, folder / "loss.png")
    _speedup(table, folder / "speedup.png", cores)
    head = ("optimizer", "batch", "ranks", "test accuracy", "test loss", "s of an epoch", "epochs to target", "S_L")
    rows = [
        (
            row["optimizer"],
            str(row["batch"]),
            str(row["ranks"]),
            f"{row['accuracy']:.2%} ± {row['accuracy spread']:.2%}",
            f"{row['loss']:.3f} ± {row['loss spread']:.3f}",
            f"{row['seconds of an epoch']:.2f}",
            "not reached" if row["epochs to target"] is None else f"{row['epochs to target']:.1f}",
            "" if row["learning speed-up"] is None else f"{row['learning speed-up']:.2f}",
        )
        for row in table
    ]
    told = EXPLANATION.format(samples="4,000", seeds=table[0]["seeds"], cores=cores, target=study.TARGET)
    figures = pages.figures(["accuracy.png", "loss.png", "speedup.png"])
    page = pages.document("Large batches: SGD and LARS", [told, pages.table(head, rows), figures])
    (folder / "study.html").write_text(page, encoding="utf-8")


def _against_batch(table, path):
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for optimizer, name in NAMES.items():
        mine = [row for row in table if row["optimizer"] == optimizer]
        for panel, what in zip(axes, ("accuracy", "loss"), strict=True):
            values, spreads = ([row[key] for row in mine] for key in (what, f"{what} spread"))
            panel.errorbar([row["batch"] for row in mine], values, spreads, fmt="o-", capsize=4, label=name)
            panel.set(xscale="log", xlabel="batch of all ranks", ylabel=f"{what} of test digits")
    for panel in axes:
        batches = sorted({row["batch"] for row in table})
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.xaxis.minorticks_off()
    axes[1].set(yscale="log")
    axes[0].legend()
    tables.write_figure(path, figure, "After training; bars: spread over the seeds", table)


def _curves(curves, path):
    figure, axes = plt.subplots(1, len(NAMES), figsize=(11, 4), layout="constrained", sharey=True)
    for panel, (optimizer, name) in zip(axes, NAMES.items(), strict=True):
        for color, batch in enumerate(sorted({line["batch"] for line in curves})):
            mine = [line for line in curves if line["optimizer"] == optimizer and line["batch"] == batch]
            epochs = sorted({line["epoch"] for line in mine})
            losses = [[line["val_loss"] for line in mine if line["epoch"] == epoch] for epoch in epochs]
            panel.plot(epochs, [np.mean(values) for values in losses], color=f"C{color}", label=f"batch {batch}")
            low, high = ([function(values) for values in losses] for function in (np.min, np.max))
            panel.fill_between(epochs, low, high, color=f"C{color}", alpha=0.2, linewidth=0)
        panel.set(title=name, xlabel="epoch", yscale="log")
    axes[0].set_ylabel("loss of test digits")
    axes[0].legend()
    tables.write_figure(path, figure, "Means of the seeds; bands: all of them", curves)


def _speedup(table, path, cores):
    smallest = min(row["batch"] // row["ranks"] for row in table)
    weak = [row for row in table if row["batch"] // row["ranks"] == smallest]
    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    ranks = sorted({row["ranks"] for row in weak})
    for optimizer, name in NAMES.items():
        mine = [row for row in weak if row["optimizer"] == optimizer and row["learning speed-up"] is not None]
        axes.plot([row["ranks"] for row in mine], [row["learning speed-up"] for row in mine], "o-", label=name)
    axes.plot(ranks, ranks, ":", color="0.5", label="ranks")
    axes.axvspan(cores, max(*ranks, cores + 0.01), color="0.9", label="more ranks than cores")
    axes.set(xlabel=f"ranks, {smallest} samples each", ylabel="learning speed-up", ylim=(0, None), xticks=ranks)
    axes.legend()
    tables.write_figure(path, figure, "How much sooner the test loss is reached", weak)
