# SPDX-License-Identifier: Apache-2.0
"""HEP-CNN learns to tell gluinos from QCD jets by images of collisions, on one rank or on many.

python -m examples.cnn.hep_cnn
mpiexec -n 2 python -m examples.cnn.hep_cnn

Takes the 2,000 events that lie beside this file, or --data with those that jets.py has made. The folder of --out then
holds history.csv, roc.csv, roc.png and summary.json with the area under the ROC curve.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
from sklearn import metrics

from examples import tables
from examples.cnn import jets

TEST = 0.25  # of the events


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=jets.SMALL, help="made by jets.py (default: 2,000 events)")
    parser.add_argument("--filters", type=int, default=32, help="of each convolution; published: 128 (default: 32)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=32, help="events of a step, of all ranks (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "hep_cnn")
    return parser.parse_args(argv)


def split(path):
    """Returns images, scaled by the largest value of each channel in training, and labels, of training and test."""
    images, labels = jets.load(path)
    first = round(TEST * len(images))
    images = np.log1p(images)  # energies fall over decades
    images /= images[first:].max(axis=(0, 1, 2))
    return (images[first:], labels[first:]), (images[:first], labels[:first])


def draw(false, true, title, path):
    """Writes the ROC curve, shares of background and signal that pass, as a PNG and as CSV."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
    axes.plot(false, true)
    axes.plot([0, 1], [0, 1], ":", color="0.5")
    axes.set(xlabel="QCD that passes", ylabel="gluinos that pass", aspect="equal")
    lines = [{"false": f, "true": t} for f, t in zip(false, true, strict=True)]
    tables.write_figure(path, figure, title, lines)


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_hpc
    from examples.cnn.networks import hep_cnn

    keras_hpc.init(batch="global")
    keras.utils.set_random_seed(args.seed)
    (x, y), (x_test, y_test) = split(args.data)
    model = hep_cnn(x.shape[1:], 2, filters=args.filters)
    model.compile(
        keras.optimizers.Adam(args.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    begin = time.perf_counter()
    history = model.fit(
        x,
        y,
        batch_size=args.global_batch,
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        verbose=2,
    ).history
    seconds = time.perf_counter() - begin
    logits = model.predict(x_test, batch_size=250, verbose=0)
    false, true, _ = metrics.roc_curve(y_test, logits[:, 1] - logits[:, 0])
    summary = {
        "ranks": keras_hpc.size(),
        "backend": keras.backend.backend(),
        "events": len(x),
        "seed": args.seed,
        "auc": metrics.auc(false, true),
        "accuracy": history["val_accuracy"][-1],
        "seconds": seconds,
    }
    keras_hpc.check_replicas(model)
    if keras_hpc.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        epochs = [dict(zip(history, values, strict=True)) for values in zip(*history.values(), strict=True)]
        tables.write(args.out / "history.csv", [{"epoch": i, **line} for i, line in enumerate(epochs, 1)])
        title = f"HEP-CNN, {len(y_test):,} events, area {summary['auc']:.3f}"
        draw(false, true, title, args.out / "roc.png")
        print(f"{summary['ranks']} ranks: area under the ROC curve {summary['auc']:.3f}, {seconds:.0f} s")
    return summary


if __name__ == "__main__":
    main()
