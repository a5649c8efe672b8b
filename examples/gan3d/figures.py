# SPDX-License-Identifier: Apache-2.0
"""Figures that show Monte Carlo beside generated showers: each a PNG, and a CSV with the numbers that it shows.

Every function takes a `Sample` of each and the path of the PNG; the CSV lies beside it.
"""

import csv
import dataclasses

import matplotlib as mpl
import numpy as np

from examples.gan3d import metrics

mpl.use("Agg")
import matplotlib.pyplot as plt

REFERENCE, GENERATED = "Monte Carlo", "generated"
COLORS = {REFERENCE: "C0", GENERATED: "C1"}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Showers.

    Attributes:
        images: (n, x, y, z), GeV.
        energies: (n,), GeV.
    """

    images: np.ndarray
    energies: np.ndarray

    def select(self, rows):
        """Returns some of the showers."""
        return Sample(self.images[rows], self.energies[rows])


def write_table(path, columns):
    """Writes a CSV.

    Args:
        path: the file.
        columns: a dictionary of sequences of equal length: numbers, or text.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow([value if isinstance(value, str) else f"{value:.7g}" for value in row])


def profiles(reference, generated, path, title):
    """Mean energy along x, y and layers: linear with errors of the mean, logarithmic, and their ratio."""
    figure, axes = plt.subplots(
        3, 3, figsize=(12, 8), sharex="col", height_ratios=(3, 3, 2), layout="constrained", squeeze=False
    )
    table = {name: [] for name in ("axis", "cell", "mc_gev", "mc_error_gev", "gan_gev", "gan_error_gev")}
    pairs = zip(metrics.profiles(reference.images), metrics.profiles(generated.images), strict=True)
    for column, (axis, (ours, theirs)) in enumerate(zip(metrics.AXES, pairs, strict=True)):
        cells = np.arange(ours.shape[1])
        (a, a_error), (b, b_error) = _mean(ours), _mean(theirs)
        for scale, row in (("linear", 0), ("log", 1)):
            panel = axes[row, column]
            panel.errorbar(cells, a, a_error, color=COLORS[REFERENCE], drawstyle="steps-mid", label=REFERENCE)
            panel.errorbar(cells, b, b_error, color=COLORS[GENERATED], fmt="o", markersize=3, label=GENERATED)
            panel.set(ylabel="mean energy (GeV)", yscale=scale if np.any(a > 0) and np.any(b > 0) else "linear")
        panel = axes[2, column]
        used = a > 0
        panel.axhspan(0.9, 1.1, color="0.9")
        panel.axhline(1, color="0.5", linewidth=0.8)
        panel.errorbar(cells[used], b[used] / a[used], b_error[used] / a[used], color=COLORS[GENERATED], fmt="o", ms=3)
        panel.set(xlabel="layer" if axis == "z" else f"cell along {axis}", ylabel="ratio", ylim=(0, 2))
        for name, values in zip(table, ([axis] * len(cells), cells, a, a_error, b, b_error), strict=True):
            table[name].extend(values)
    axes[0, 0].legend()
    _finish(figure, path, title, table)


def moments(reference, generated, path, title):
    """Histograms of the first and second moment along each axis."""
    a, b = metrics.moments(reference.images), metrics.moments(generated.images)
    names = ("mean (cells)", "variance (cells²)")
    panels = {
        f"{names[order]} along {axis}": (a[:, i, order], b[:, i, order])
        for order in range(2)
        for i, axis in enumerate(metrics.AXES)
    }
    _histograms(panels, path, title, rows=2)


def calorimeter(reference, generated, path, title):
    """Histograms of what a calorimeter measures: sum / energy, hits, layer of the maximum."""
    a, b = (
        (metrics.sums(s.images) / s.energies, metrics.hits(s.images), metrics.maximum_layer(s.images))
        for s in (reference, generated)
    )
    names = ("sum of cells / energy", f"cells with more than {1e3 * metrics.HIT_GEV:g} MeV", "layer of the maximum")
    _histograms(dict(zip(names, zip(a, b, strict=True), strict=True)), path, title, rows=1)


def spectrum(reference, generated, path, title):
    """How many cells have what energy."""
    edges, a = metrics.spectrum(reference.images)
    _, b = metrics.spectrum(generated.images, edges)
    figure, panel = plt.subplots(figsize=(6, 4), layout="constrained")
    panel.stairs(a, edges, color=COLORS[REFERENCE], label=REFERENCE)
    panel.stairs(b, edges, color=COLORS[GENERATED], label=GENERATED)
    panel.set(xlabel="energy of a cell (GeV)", ylabel="cells per shower and bin", xscale="log")
    if a.any() or b.any():
        panel.set_yscale("log")
    panel.legend()
    _finish(figure, path, title, {"low_gev": edges[:-1], "high_gev": edges[1:], "mc_cells": a, "gan_cells": b})


def response(reference, generated, path, title, bins=12):
    """Sum of cells / energy against energy, and its relative spread."""
    edges = np.linspace(reference.energies.min(), np.nextafter(reference.energies.max(), np.inf), bins + 1)
    centers = (edges[:-1] + edges[1:]) / 2
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    table = {"low_gev": edges[:-1], "high_gev": edges[1:]}
    for label, key, sample in ((REFERENCE, "mc", reference), (GENERATED, "gan", generated)):
        mean, spread, error = metrics.response(sample.images, sample.energies, edges)
        left.errorbar(centers, mean, error, color=COLORS[label], fmt="o-", markersize=3, label=label)
        right.plot(centers, spread / mean, "o-", color=COLORS[label], markersize=3, label=label)
        table |= {f"{key}_mean": mean, f"{key}_error": error, f"{key}_spread": spread}
    left.set(xlabel="energy (GeV)", ylabel="sum of cells / energy")
    right.set(xlabel="energy (GeV)", ylabel="spread / mean", ylim=(0, None))
    left.legend()
    _finish(figure, path, title, table)


def correlations(reference, generated, path, title):
    """Correlations between observables: Monte Carlo, generated, difference."""
    a, b = (
        metrics.correlations(metrics.observables(s.images, s.energies) | {"energy": s.energies})
        for s in (reference, generated)
    )
    names = [*metrics.observables(reference.images[:1], reference.energies[:1]), "energy"]
    figure, panels = plt.subplots(1, 3, figsize=(15, 7), sharey=True, layout="constrained")
    for panel, matrix, text in zip(panels, (a, b, b - a), (REFERENCE, GENERATED, "difference"), strict=True):
        drawn = panel.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r")
        panel.set_title(text)
        panel.set_xticks(range(len(names)), names, rotation=90)
    panels[0].set_yticks(range(len(names)), names)
    figure.colorbar(drawn, ax=panels, shrink=0.6)
    first, second = np.repeat(names, len(names)).tolist(), names * len(names)
    table = {"first": first, "second": second, "mc": a.ravel(), "gan": b.ravel()}
    _finish(figure, path, title, table)


def displays(reference, generated, path, title, count=3):
    """Single showers seen from three sides: Monte Carlo left, right the generated ones of the same energies."""
    # From the lowest to the highest energy; any shower will do.
    rows = np.argsort(reference.energies)[np.linspace(0, len(reference.energies) - 1, count + 2).astype(int)[1:-1]]
    views = (("x", "y", 2), ("x", "layer", 1), ("y", "layer", 0))
    figure, panels = plt.subplots(count, 6, figsize=(17, 2.9 * count), layout="constrained", squeeze=False)
    table = {name: [] for name in ("event", "energy_gev", "source", "view", "i", "j", "gev")}
    for event, row in enumerate(rows):
        highest = max(float(s.images[row].sum(axis=2).max()) for s in (reference, generated)) or 1.0
        norm = mpl.colors.LogNorm(1e-4 * highest, highest)
        for first, (label, key, sample) in ((0, (REFERENCE, "mc", reference)), (3, (GENERATED, "gan", generated))):
            for column, (i_name, j_name, axis) in enumerate(views):
                plane = sample.images[row].sum(axis=axis)
                panel = panels[event, first + column]
                drawn = panel.imshow(np.maximum(plane.T, 1e-4 * highest), origin="lower", norm=norm, cmap="viridis")
                panel.set(xlabel=i_name, ylabel=j_name, title=f"{label}, {sample.energies[row]:.0f} GeV")
                i, j = np.nonzero(plane)
                constant = ([event], [float(sample.energies[row])], [key], [f"{i_name}-{j_name}"])
                added = (*(value * len(i) for value in constant), i, j, plane[i, j])
                for values, more in zip(table.values(), added, strict=True):
                    values.extend(more)
        figure.colorbar(drawn, ax=panels[event], label="GeV")
    _finish(figure, path, title, table)


def merits(names, found, path, title):
    """Figures of merit of each energy bin.

    Args:
        names: of the bins.
        found: their `metrics.FigureOfMerit`.
        path: of the PNG.
        title: of the figure.
    """
    figure, panel = plt.subplots(figsize=(max(5, 1.2 * len(names)), 4), layout="constrained")
    position = np.arange(len(names))
    parts = {"P (moments)": [m.p for m in found], "Q (profiles)": [m.q for m in found], "D_w": [m.d_w for m in found]}
    for number, (label, values) in enumerate(parts.items()):
        panel.bar(position + (number - 1) * 0.27, values, width=0.27, label=label)
    panel.set_xticks(position, names)
    panel.set(xlabel="energy bin", ylabel="relative difference, 0 is perfect")
    panel.legend()
    _finish(
        figure,
        path,
        title,
        {"bin": list(names), "p": parts["P (moments)"], "q": parts["Q (profiles)"]}
        | {"total": [m.total for m in found], "d_w": parts["D_w"]},
    )


def judgement(reference, generated, path, title):
    """What the discriminator says: is it real, and what energy did it have.

    Args:
        reference: a dictionary of arrays (n,) of Monte Carlo: "real", a probability, and "energy ratio", measured by
            the discriminator / true.
        generated: the same of generated showers.
        path: of the PNG.
        title: of the figure.
    """
    panels = {f"discriminator: {name}": (reference[name], generated[name]) for name in ("real", "energy ratio")}
    _histograms(panels, path, title, rows=1)


def losses(rows, path, title):
    """Mean losses of each epoch.

    Args:
        rows: lines of losses.csv, dictionaries of text.
        path: of the PNG.
        title: of the figure.
    """
    epochs = np.array([int(row["epoch"]) for row in rows])
    names = [name for name in rows[0] if name not in ("epoch", "step")]
    found = np.unique(epochs)
    means = {n: np.array([np.mean([float(r[n]) for r in np.array(rows)[epochs == e]]) for e in found]) for n in names}
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for panel, who, text in zip(panels, ("d_", "g_"), ("discriminator", "generator"), strict=True):
        for name in names:
            if name.startswith(who):
                panel.plot(found + 1, means[name], "o-", markersize=3, label=name.removeprefix(who))
        panel.set(xlabel="epoch", ylabel="loss", yscale="log", title=text)
        panel.legend()
    _finish(figure, path, title, {"epoch": found + 1} | means)


def histogram_edges(a, b, bins=30):
    """Returns edges of bins that hold all of two samples; of whole numbers, whole bins."""
    low, high = float(min(a.min(), b.min())), float(max(a.max(), b.max()))
    if all(np.issubdtype(values.dtype, np.integer) for values in (a, b)):
        width = max(1, int(np.ceil((high - low + 1) / bins)))
        return np.arange(low - 0.5, high + width + 0.5, width)
    margin = 1e-6 * max(abs(low), abs(high), 1e-6)
    return np.linspace(low - margin, high + margin, bins + 1)


def _histograms(panels, path, title, rows):
    """One panel for each name, with the probability that a Kolmogorov-Smirnov test gives."""
    columns = len(panels) // rows
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3.4 * rows), layout="constrained", squeeze=False)
    table = {name: [] for name in ("quantity", "low", "high", "mc_showers", "gan_showers")}
    for panel, (name, (a, b)) in zip(axes.ravel(), panels.items(), strict=True):
        edges = histogram_edges(np.asarray(a), np.asarray(b))
        counts = []
        for label, values in ((REFERENCE, a), (GENERATED, b)):
            counts.append(np.histogram(values, edges)[0])
            panel.stairs(counts[-1], edges, color=COLORS[label], label=label)
        distance, probability = metrics.kolmogorov_smirnov(a, b)
        panel.set(xlabel=name, ylabel="showers", title=f"KS distance {distance:.3f}, p {probability:.2g}")
        added = ([name] * len(counts[0]), edges[:-1], edges[1:], *counts)
        for column, values in zip(table.values(), added, strict=True):
            column.extend(values)
    axes[0, 0].legend()
    _finish(figure, path, title, table)


def _mean(values):
    return values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(len(values))


def _finish(figure, path, title, table):
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    write_table(path.with_suffix(".csv"), table)
