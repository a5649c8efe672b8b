# SPDX-License-Identifier: Apache-2.0
"""Compares generated showers with Monte Carlo: figures, tables of numbers, and one page that shows them side by side.

python -m examples.gan3d.validate --generator results/gan3d/generator.weights.h5 --data test.h5 --out results/validation
"""

import argparse
import csv
import html
from pathlib import Path

import numpy as np

from examples import pages
from examples.gan3d import figures, metrics
from examples.gan3d.figures import Sample

# GeV; those of a sample that reaches 200 GeV or less, and those of any other.
LOW_CENTERS, HIGH_CENTERS = (20, 40, 60, 80), (50, 100, 200, 300, 400, 500)
FEWEST_SHOWERS = 20  # of a bin that is looked at
WHOLE = "all energies"


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", type=Path, required=True, help="its weights, as train.py saves them")
    parser.add_argument("--discriminator", type=Path, help="its weights, to show what it says")
    parser.add_argument("--losses", type=Path, help="losses.csv of the training, to show it")
    parser.add_argument("--data", type=Path, required=True, help="HDF5 file with ECAL and target")
    parser.add_argument(
        "--part",
        choices=["test", "all"],
        default="test",
        help="test: its last tenth, which train.py does not use; all: of a file that was not trained on",
    )
    parser.add_argument("--events", type=int, default=2000, help="showers to read (default: 2000)")
    parser.add_argument("--bins", type=float, nargs="+", help="centers of energy bins, GeV")
    parser.add_argument("--half-width", type=float, default=5.0, help="of energy bins, GeV (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("results") / "validation", help="folder for the report")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def energy_bins(energies, centers=None, half_width=5.0):
    """Returns the bins that hold enough showers.

    Args:
        energies: (n,), GeV.
        centers: of the bins, GeV; None: what suits the energies.
        half_width: GeV.

    Returns:
        a dictionary from names to the numbers of the showers inside; the first one is of all showers.
    """
    if centers is None:
        centers = LOW_CENTERS if energies.max() <= 200 else HIGH_CENTERS
    bins = {f"{center:g} GeV": np.flatnonzero(np.abs(energies - center) <= half_width) for center in centers}
    return {WHOLE: np.arange(len(energies))} | {k: rows for k, rows in bins.items() if len(rows) >= FEWEST_SHOWERS}


def compare(reference, generated):
    """Compares two samples in numbers.

    Returns:
        a dictionary from what was compared to (chi2, ndf, KS distance, KS probability); profiles have no KS, NaN.
    """
    result = {}
    pairs = zip(metrics.profiles(reference.images), metrics.profiles(generated.images), strict=True)
    for axis, (a, b) in zip(metrics.AXES, pairs, strict=True):
        result[f"profile along {axis}"] = (*metrics.chi2_of_profiles(a, b), np.nan, np.nan)
    ours = metrics.observables(reference.images, reference.energies)
    theirs = metrics.observables(generated.images, generated.energies)
    for name, a in ours.items():
        b = theirs[name]
        whole = name in ("hits", "maximum layer")
        edges = figures.histogram_edges(*((v.astype("int64") if whole else v) for v in (a, b)))
        result[name] = (*metrics.chi2(a, b, edges), *metrics.kolmogorov_smirnov(a, b))
    return result


def validate(reference, generated, out, *, centers=None, half_width=5.0, judged=None, losses=None, title="3DGAN"):
    """Writes all figures, tables and report.html.

    Args:
        reference: a `Sample` of Monte Carlo.
        generated: a `Sample` with the same energies, in the same order.
        out: the folder, made if needed.
        centers: of energy bins, GeV; None: what suits the energies.
        half_width: of energy bins, GeV.
        judged: what the discriminator says of both, see `figures.judgement`; None: it is not shown.
        losses: lines of losses.csv; None: they are not shown.
        title: of the report.

    Returns:
        a dictionary from names of energy bins to `metrics.FigureOfMerit`.

    Raises:
        ValueError: the samples do not fit together, or there are fewer than two showers.
    """
    if reference.images.shape != generated.images.shape or not np.array_equal(reference.energies, generated.energies):
        raise ValueError(
            "Expected as many generated showers, of the same size and energies, as of Monte Carlo. "
            f"Received: {generated.images.shape} and {reference.images.shape}"
        )
    if len(reference.images) < 2:
        raise ValueError(f"Expected two showers or more. Received: {len(reference.images)}")
    out.mkdir(parents=True, exist_ok=True)
    bins = energy_bins(reference.energies, centers, half_width)
    merits, comparisons, sections = {}, {}, []
    for name, rows in bins.items():
        a, b = reference.select(rows), generated.select(rows)
        merits[name] = metrics.figure_of_merit(a.images, b.images)
        comparisons[name] = compare(a, b)
        drawn = []
        for draw in (figures.profiles, figures.moments, figures.calorimeter, figures.spectrum):
            path = out / f"{draw.__name__}_{name.replace(' ', '_')}.png"
            draw(a, b, path, f"{draw.__name__}, {name}, {len(rows)} showers")
            drawn.append(path.name)
        sections.append((f"{name}: {len(rows)} showers", drawn))

    # The whole spectrum is no energy: its showers differ more among themselves than samples from each other.
    narrow = [merit for name, merit in merits.items() if name != WHOLE]
    if narrow:
        parts = ([getattr(m, part) for m in narrow] for part in ("p", "q", "d_w"))
        merits["mean of energy bins"] = metrics.FigureOfMerit(*(float(np.mean(values)) for values in parts))
    whole = ["displays.png", "response.png", "correlations.png", "figure_of_merit.png"]
    figures.displays(reference, generated, out / whole[0], "Single showers")
    figures.response(reference, generated, out / whole[1], "Energy response")
    figures.correlations(reference, generated, out / whole[2], "Correlations")
    figures.merits(list(merits), list(merits.values()), out / whole[3], "Figure of merit")
    if judged is not None:
        figures.judgement(*judged, out / "discriminator.png", "What the discriminator says")
        whole.append("discriminator.png")
    if losses:
        figures.losses(losses, out / "losses.png", "Losses of the training")
        whole.append("losses.png")
    _write_comparisons(out / "comparison.csv", comparisons)
    page = _page(title, merits, comparisons, [("Overview", whole), *sections])
    (out / "report.html").write_text(page, encoding="utf-8")
    return merits


def _write_comparisons(path, comparisons):
    rows = [(name, what, *numbers) for name, found in comparisons.items() for what, numbers in found.items()]
    names = ("bin", "quantity", "chi2", "ndf", "ks_distance", "ks_probability")
    figures.write_table(path, dict(zip(names, zip(*rows, strict=True), strict=True)))


def _page(title, merits, comparisons, sections):
    merit_rows = [(name, *(f"{x:.4f}" for x in (m.p, m.q, m.total, m.d_w))) for name, m in merits.items()]
    first = comparisons[WHOLE]
    per_bin = [
        (
            what,
            *(
                f"{found[what][0] / max(found[what][1], 1):.2f} / {found[what][2]:.3f}"
                for found in comparisons.values()
            ),
        )
        for what in first
    ]
    parts = [
        "<h2>Figure of merit</h2><p>0 is perfect. P: moments, Q: profiles, each cell alike, D<sub>w</sub>: profiles, "
        "cells weighted by their energy.</p>",
        pages.table(("bin", "P", "Q", "P + Q", "D_w"), merit_rows),
        "<h2>chi2/ndf / Kolmogorov-Smirnov distance</h2><p>chi2/ndf of about 1: no difference is seen. Showers of one "
        "Monte Carlo would have it; nobody expects it of a network. Probabilities are in "
        "<a href='comparison.csv'>comparison.csv</a>.</p>",
        pages.table(("quantity", *comparisons), per_bin).replace("/ nan", ""),
    ]
    for heading, names in sections:
        parts += [f"<h2>{html.escape(heading)}</h2>", pages.figures(names)]
    return pages.document(title, parts)


def main(argv=None):
    args = arguments(argv)
    import h5py

    from examples.gan3d import data, networks

    with h5py.File(args.data) as file:
        begin, end = data.part_range(len(file["ECAL"]), args.part)
        rows = slice(begin, min(end, begin + args.events))
        images = file["ECAL"][rows].astype("float32")
        energies = file["target"][rows, 1].astype("float64")
    preset = next((p.name for p in networks.PRESETS.values() if p.shape[:3] == images.shape[1:]), None)
    if preset is None:
        raise SystemExit(f"No preset is for images of {images.shape[1:]}, as in {args.data}.")
    generator = networks.generator(preset)
    generator.load_weights(args.generator)
    generator.compile(jit_compile=networks.use_xla())
    generated = networks.generate(generator, np.random.default_rng(args.seed), energies)
    judged = None
    if args.discriminator:
        discriminator = networks.discriminator(preset)
        discriminator.load_weights(args.discriminator)
        discriminator.compile(jit_compile=networks.use_xla())
        judged = [networks.judge(discriminator, sample, energies) for sample in (images, generated)]
    losses = None
    if args.losses:
        with args.losses.open(newline="") as file:
            losses = list(csv.DictReader(file))
    merits = validate(
        Sample(images, energies),
        Sample(generated, energies),
        args.out,
        centers=args.bins,
        half_width=args.half_width,
        judged=judged,
        losses=losses,
        title=f"3DGAN, preset {preset}: {args.generator.name} against {args.data.name}",
    )
    for name, merit in merits.items():
        print(f"{name:20} P {merit.p:.4f}  Q {merit.q:.4f}  P + Q {merit.total:.4f}  D_w {merit.d_w:.4f}")
    print(args.out / "report.html")
    return merits


if __name__ == "__main__":
    main()
