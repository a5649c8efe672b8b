# SPDX-License-Identifier: Apache-2.0
"""What `make cosmoflow` runs: the parameters of universes, learnt on 1 and on 2 ranks, several seeds.

The folder of --out then holds summary.csv, table.md, answers.png, and a folder for each run. Started again, it goes on
where it was.
"""

import numpy as np

from examples import studies, tables
from examples.cosmoflow import boxes, train

COLUMNS = {"mae": "mean absolute error", **{name: name for name in boxes.RANGES}}


def arguments(argv=None):
    parser = studies.parser("cosmoflow", __doc__)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--boxes", type=int, default=1024, help="to learn from (default: 1024)")
    return parser.parse_args(argv)


def spectra(x):
    """Returns logarithms of the power spectra of boxes, (n, 44): at each redshift in 11 shells of wave numbers."""
    k = np.sqrt(sum(part**2 for part in np.meshgrid(*[np.fft.fftfreq(boxes.SIZE, 1 / boxes.SIZE)] * 3)))
    shell = np.digitize(k, np.arange(0.5, 17, 1.5))
    powers = np.abs(np.fft.fftn(x, axes=(1, 2, 3))) ** 2
    return np.log(np.concatenate([powers[:, shell == number].mean(axis=1) for number in range(1, 12)], axis=1))


def regression(folders):
    """Returns the quality of a linear regression on power spectra, which is what one does without a network."""
    from sklearn.linear_model import RidgeCV

    import keras_hpc

    found = []
    for folder in folders:
        store = keras_hpc.data.open_store(sorted(folder.glob("*.tfrecord")))
        parts = [boxes.parse(store.read(at, min(at + 32, len(store)))) for at in range(0, len(store), 32)]
        found += [np.concatenate([spectra(x.numpy()) for x, _ in parts]), np.concatenate([y.numpy() for _, y in parts])]
    x, y, x_test, y_test = found
    middle, width = x.mean(axis=0), x.std(axis=0)
    fitted = RidgeCV(np.geomspace(1e-3, 1e3, 13)).fit((x - middle) / width, y)
    return train.quality(y_test, fitted.predict((x_test - middle) / width))


def draw(folder, runs):
    """Draws what the network says of the test boxes against what they were made with, for a run of each kind."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(1, len(boxes.RANGES), figsize=(3.4 * len(boxes.RANGES), 3.4), layout="constrained")
    points = []
    for number, (name, panel) in enumerate(zip(boxes.RANGES, rows, strict=True)):
        low, high = boxes.RANGES[name]
        for run in runs:
            with np.load(folder / run.folder / "answers.npz") as found:
                truth, answers = (low + (found[what][:, number] + 1) * (high - low) / 2 for what in found)
            panel.scatter(truth, answers, s=6, label=f"{run.ranks} rank{'s' * (run.ranks > 1)}")
            points += [
                {"ranks": run.ranks, "parameter": name, "truth": t, "answer": a}
                for t, a in zip(map(float, truth), map(float, answers), strict=True)
            ]
        panel.plot((low, high), (low, high), ":", color="0.5")
        panel.set(title=name, xlabel="truth")
    rows[0].set_ylabel("answer of the network")
    rows[0].legend()
    tables.write_figure(folder / "answers.png", figure, "Parameters of test boxes", points)


def main(argv=None):
    args = arguments(argv)
    data = args.out / "boxes"
    train.prepare(data, args.boxes)
    options = {"epochs": args.epochs, "boxes": args.boxes, "data": data}
    found = studies.train("examples.cosmoflow.train", args.out, args.seeds, options)
    draw(args.out, [run for run in found if run.seed == 1])
    without = regression([data / f"{kind}-{args.boxes}" for kind in ("train", "test")])
    shown = ", ".join(f"{name} {value:.3f}" for name, value in without.items())
    print(f"linear regression on power spectra: {shown}", flush=True)
    table = studies.summarize(found)
    studies.finish("cosmoflow", args, table, COLUMNS, ["answers.png"])
    return table


if __name__ == "__main__":
    main()
