# SPDX-License-Identifier: Apache-2.0
"""What `make cosmogan` runs: the generator of maps, trained on 1 and on 2 ranks, several seeds.

The folder of --out then holds summary.csv, table.md, maps.png, bins.png, and a folder for each run. Started again, it
goes on where it was.
"""

import numpy as np

from examples import studies, tables
from examples.cosmogan import maps, train

COLUMNS = {"histogram": "pixels: chi² per bin", "spectrum": "power spectrum: chi² per bin"}


def arguments(argv=None):
    parser = studies.parser("cosmogan", __doc__)
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--maps", type=int, default=4096, help="to learn from (default: 4096)")
    parser.add_argument("--tests", type=int, default=512, help="maps that are compared (default: 512)")
    return parser.parse_args(argv)


def draw(folder, tests, generated):
    """Draws maps, and both statistics.

    Args:
        folder: of the pictures.
        tests: maps of convergence.
        generated: of each kind of run, maps.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    kinds = {"simulated": tests, **generated}
    figure, rows = plt.subplots(len(kinds), 8, figsize=(12, 1.7 * len(kinds)), layout="constrained")
    for row, (kind, some) in zip(rows, kinds.items(), strict=True):
        for panel, image in zip(row, some, strict=False):
            panel.imshow(maps.squeezed(image[..., 0]), cmap="inferno", vmin=-2, vmax=2.5)
            panel.set(xticks=[], yticks=[])
        row[0].set_ylabel(kind)
    numbers = [{"maps": kind, "mean": float(x.mean()), "deviation": float(x.std())} for kind, x in kinds.items()]
    tables.write_figure(folder / "maps.png", figure, "Maps of convergence", numbers)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    lines = []
    centres = (-2 + (np.arange(20) + 0.5) / 4, np.arange(1, tests.shape[1] // 2 + 1))
    for panel, x, of, what in zip(panels, centres, (maps.intensities, maps.powers), train.STATISTICS, strict=True):
        for kind, some in kinds.items():
            found = of(some)
            mean, spread = found.mean(axis=0), found.std(axis=0)
            panel.plot(x, mean, "o-" if kind == "simulated" else ".--", label=kind)
            if kind == "simulated":
                panel.fill_between(
                    x, np.maximum(mean - spread, mean / 20), mean + spread, alpha=0.2, label="its spread"
                )
            lines += [
                {"maps": kind, "statistic": what, "bin": float(b), "mean": m, "spread": s}
                for b, m, s in zip(x, map(float, mean), map(float, spread), strict=True)
            ]
        panel.set(yscale="log", title=what)
    panels[0].set(xlabel="ln(1 + convergence / 0.02)", ylabel="share of pixels", ylim=(1e-6, 1))
    panels[1].set(xlabel="cycles a map", ylabel="power", xscale="log")
    panels[0].legend()
    tables.write_figure(folder / "bins.png", figure, "Generated maps and those that the generator never saw", lines)


def main(argv=None):
    args = arguments(argv)
    _, test = train.prepare(args.out, args.maps, args.tests)
    options = {"epochs": args.epochs, "maps": args.maps, "tests": args.tests, "data": args.out}
    found = studies.train("examples.cosmogan.train", args.out, args.seeds, options)
    with np.load(test) as file:
        tests = file["convergence"]
    generated = {}
    for run in found:
        if run.seed == 1:
            with np.load(args.out / run.folder / "generated.npz") as file:
                generated[f"{run.ranks} rank{'s' * (run.ranks > 1)}"] = file["convergence"]
    draw(args.out, tests, generated)
    others = maps.simulate(args.tests, np.random.default_rng(2))
    alike = ", ".join(f"{name} {value:.2f}" for name, value in train.quality(others, tests).items())
    print(f"two sets of simulated maps: {alike}")
    for name in train.STATISTICS:
        ones, twos = ([quality[name] for run, quality in found.items() if run.ranks == ranks] for ranks in (1, 2))
        worse = sum(two > one for one in ones for two in twos)
        print(f"{name}: worse on two ranks in {worse} of {len(ones) * len(twos)} pairs of runs")
    table = studies.summarize(found)
    studies.finish("cosmogan", args, table, COLUMNS, ["maps.png", "bins.png"])
    return table


if __name__ == "__main__":
    main()
