# SPDX-License-Identifier: Apache-2.0
"""Shows what study.py found: curves of quality and bars of speed, each with its numbers, on one page."""

import matplotlib as mpl
import numpy as np

from examples import pages, tables

mpl.use("Agg")
import matplotlib.pyplot as plt

QUALITIES = {
    "D_w": "profile difference D_w",
    "figure of merit": "figure of merit P + Q",
    "sum error": "error of the sum",
}
SHOWN = ("figure of merit", "D_w", "largest D_w", "sum error")
WANTED = {"D_w": 0.15, "sum error": 0.10}  # below
WHO = ("discriminator", "generator")


def write(folder, lines, summary):
    """Writes study.html, the figures, curves.csv and summary.csv.

    Args:
        folder: a `Path`.
        lines: of curves.csv: dictionaries with what a generator was worth after an epoch.
        summary: of summary.csv: dictionaries, one for each kind of runs.
    """
    tables.write(folder / "curves.csv", lines)
    tables.write(folder / "summary.csv", summary)
    _quality(lines, folder / "quality.png")
    _speed(summary, folder / "speed.png")
    shown = [
        (
            row["kind"],
            str(row["seeds"]),
            *(f"{row[name]:.3f} ± {row[f'{name} spread']:.3f}" for name in SHOWN),
            f"{row['samples/s']:.0f}",
            *(f"{row[f'{who} exposed ms']:.2f} / {row[f'{who} hidden']:.0%}" for who in WHO),
        )
        for row in summary
    ]
    head = ("runs", "seeds", *SHOWN, "samples/s", *(f"{who}: exposed ms / hidden" for who in WHO))
    parts = [
        "<p>After training, mean and spread over the seeds. D<sub>w</sub>: difference of the mean "
        "profiles along x, y and z, weighted with energy; the figure of merit adds moments and counts each cell alike; "
        "error of the sum: of all cells of the mean shower. Means over bins of energy; the largest D<sub>w</sub> and "
        "the error of the sum are those of the worst bin. Exposed: what an update waited for communication.</p>",
        pages.table(head, shown),
        pages.figures(["quality.png", "speed.png"]),
        "<p>A full comparison of the first synchronous run on 2 ranks: "
        "<a href='validation/report.html'>validation/report.html</a>.</p>",
    ]
    (folder / "study.html").write_text(pages.document("3DGAN on 1 rank and on 2", parts), encoding="utf-8")


def _quality(lines, path):
    """Curves of each quality against time and showers seen: means of the seeds, and all between the extremes."""
    figure, axes = plt.subplots(len(QUALITIES), 2, figsize=(11, 10), sharex="col", sharey="row", layout="constrained")
    table = []
    for color, kind in enumerate(dict.fromkeys(line["kind"] for line in lines)):
        mine = [line for line in lines if line["kind"] == kind]
        epochs = sorted({line["epoch"] for line in mine})
        at = [[line for line in mine if line["epoch"] == epoch] for epoch in epochs]
        for row, (name, title) in enumerate(QUALITIES.items()):
            values = [[line[name] for line in same] for same in at]
            mean, low, high = ([function(v) for v in values] for function in (np.mean, np.min, np.max))
            for column, what in enumerate(("seconds", "samples")):
                x = [np.mean([line[what] for line in same]) for same in at]
                panel = axes[row, column]
                panel.plot(x, mean, "o-", color=f"C{color}", markersize=3, label=kind)
                panel.fill_between(x, low, high, color=f"C{color}", alpha=0.2, linewidth=0)
                panel.set(yscale="log", ylabel=title if column == 0 else None)
                if color == 0 and name in WANTED:
                    panel.axhline(WANTED[name], color="0.5", linestyle=":")
            table += [
                {"kind": kind, "quality": name, "epoch": e, "mean": m, "lowest": a, "highest": b}
                for e, m, a, b in zip(epochs, mean, low, high, strict=True)
            ]
    for panel, label in zip(axes[-1], ("seconds of training", "showers seen"), strict=True):
        panel.set_xlabel(label)
    axes[0, 0].legend()
    tables.write_figure(path, figure, "Generated showers against Monte Carlo; bands: all seeds; dotted: wanted", table)


def _speed(summary, path):
    """Bars: samples per second, and what of a step's communication it waited for."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    kinds = [row["kind"] for row in summary]
    bars = left.bar(kinds, [row["samples/s"] for row in summary], color=[f"C{i}" for i in range(len(kinds))])
    left.bar_label(bars, fmt="{:.0f}")
    left.set(ylabel="samples/s", title="Training, one core for each rank")
    several = [row for row in summary if not row["kind"].startswith("1 ")]
    for number, who in enumerate(WHO):
        x = np.arange(len(several)) + 0.4 * number - 0.2
        bars = right.bar(x, [row[f"{who} exposed ms"] for row in several], 0.38, label=who)
        right.bar_label(bars, [f"{row[f'{who} hidden']:.0%} hidden" for row in several])
    right.set_xticks(range(len(several)), [row["kind"] for row in several])
    right.set(ylabel="ms of an update", title="Communication that an update waited for")
    right.legend()
    tables.write_figure(path, figure, "Speed", summary)
