# SPDX-License-Identifier: Apache-2.0
"""What `make atoms` runs: crystals told by a ResNet-50 that learnt on 1 and on 2 ranks, several seeds.

The folder of --out then holds summary.csv, table.md, images.png, confusion.png, and a folder for each run. Started
again, it goes on where it was.
"""

import numpy as np

from examples import studies, tables
from examples.atoms import crystals, train

COLUMNS = {
    "seen": "angles and noise as learnt",
    "angles": "held-out angles",
    "noise": "held-out noise",
    "both": "both held out",
}
NAMES = [" ".join(name) for name in crystals.CLASSES]


def arguments(argv=None):
    parser = studies.parser("atoms", __doc__)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--images", type=int, default=2160, help="of an epoch (default: 2160)")
    parser.add_argument("--tests", type=int, default=30, help="images of each class and each test (default: 30)")
    return parser.parse_args(argv)


def confusion(classes, answers):
    """Returns how often each class (row) was called each class (column), shares of a row."""
    counted = np.zeros((len(NAMES), len(NAMES)))
    np.add.at(counted, (classes, answers), 1)
    return counted / counted.sum(axis=1, keepdims=True)


def pyplot():
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_images(folder):
    """Draws an image of each class, a row for each axis."""
    figure, rows = pyplot().subplots(3, 9, figsize=(7.6, 4), layout="constrained")
    images, classes = train.test_images("both", 1)
    for panel, image, number in zip(rows.T.ravel(), images[..., 0], classes, strict=True):
        panel.imshow(image, cmap="gray", vmin=-2, vmax=3)
        panel.set(xticks=[], yticks=[])
        panel.set_title(NAMES[number], fontsize=7)
    lines = [{"class": NAMES[n], "brightest": float(x.max())} for n, x in zip(classes, images, strict=True)]
    tables.write_figure(folder / "images.png", figure, "At angles and in noise that were never seen", lines)


def draw_confusion(folder, runs, tests):
    """Draws what each class is taken for in the hardest test, all seeds together."""
    kinds = sorted({run.ranks for run in runs})
    figure, panels = pyplot().subplots(1, len(kinds), figsize=(6.4 * len(kinds), 6.4), layout="constrained")
    classes = np.arange(tests * len(NAMES)) % len(NAMES)
    lines = []
    for ranks, panel in zip(kinds, np.atleast_1d(panels), strict=True):
        mine = [np.load(folder / run.folder / "answers.npz")["both"] for run in runs if run.ranks == ranks]
        found = confusion(np.tile(classes, len(mine)), np.concatenate(mine))
        panel.imshow(found, cmap="magma_r", vmin=0, vmax=1)
        panel.set(title=f"{ranks} rank{'s' * (ranks > 1)}", xlabel="answer", ylabel="truth")
        panel.set_xticks(range(len(NAMES)), NAMES, rotation=90, fontsize=7)
        panel.set_yticks(range(len(NAMES)), NAMES, fontsize=7)
        lines += [
            {"ranks": ranks, "truth": NAMES[i], "answer": NAMES[j], "share": float(found[i, j])}
            for i, j in np.argwhere(found)
        ]
    title = "What each class is taken for: both held out, all seeds"
    tables.write_figure(folder / "confusion.png", figure, title, lines)


def main(argv=None):
    args = arguments(argv)
    options = {"epochs": args.epochs, "images": args.images, "tests": args.tests}
    found = studies.train("examples.atoms.train", args.out, args.seeds, options)
    draw_images(args.out)
    draw_confusion(args.out, list(found), args.tests)
    table = studies.summarize(found)
    studies.finish("atoms", args, table, COLUMNS, ["images.png", "confusion.png"])
    return table


if __name__ == "__main__":
    main()
