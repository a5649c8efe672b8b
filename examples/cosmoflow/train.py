# SPDX-License-Identifier: Apache-2.0
"""The network of CosmoFlow tells the parameters of a universe from a box of its matter.

mpiexec -n 2 python -m examples.cosmoflow.train

Boxes come from `boxes.py`, made once, in TFRecord files. The folder of --out then holds history.csv, quality.json and
answers.npz.
"""

import argparse
import csv
import json
import os
from pathlib import Path

import numpy as np

from examples import clock
from examples.cosmoflow import boxes


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boxes", type=int, default=1024, help="to learn from; a quarter as many for tests (1024)")
    parser.add_argument("--filters", type=int, default=8, help="of the first convolution; the benchmark's: 32 (8)")
    parser.add_argument("--dropout", type=float, default=0.0, help="the benchmark's: 0.5 (default: 0)")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8, help="of all ranks (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("results") / "cosmoflow" / "boxes", help="folder for them")
    parser.add_argument("--out", type=Path, default=Path("results") / "cosmoflow" / "run")
    return parser.parse_args(argv)


def network(size=boxes.SIZE, filters=32, dropout=0.5):
    """Returns the network of MLPerf HPC: five convolutions of 2 x 2 x 2, each with twice the filters, three dense.

    Pooling takes means, as in the first CosmoFlow; MLPerf takes maxima unless told otherwise.
    """
    from keras import Input, Sequential, layers

    model = Sequential([Input((size, size, size, len(boxes.REDSHIFTS)))])
    for level in range(5):
        model.add(layers.Conv3D(filters * 2**level, 2, padding="same"))
        model.add(layers.LeakyReLU(negative_slope=0.3))
        model.add(layers.AveragePooling3D(2))
    model.add(layers.Flatten())
    for units in (128, 64):
        model.add(layers.Dense(units))
        model.add(layers.LeakyReLU(negative_slope=0.3))
        model.add(layers.Dropout(dropout))
    model.add(layers.Dense(len(boxes.RANGES), activation="tanh"))
    model.add(layers.Rescaling(1.2))
    return model


def rate(epoch, peak, epochs):
    """As in the benchmark: up over an eighth of the epochs, a quarter of the peak after half, an eighth after 3/4."""
    warm = max(1, epochs // 8)
    if epoch < warm:
        return peak * (epoch + 1) / warm
    return peak * (1 if epoch < epochs / 2 else 0.25 if epoch < epochs * 3 / 4 else 0.125)


def quality(truth, answers):
    """Returns the mean absolute error of each parameter and of all, in halves of their ranges; a constant has 0.5."""
    errors = np.abs(truth - answers).mean(axis=0)
    return {"mae": float(errors.mean()), **dict(zip(boxes.RANGES, map(float, errors), strict=True))}


def prepare(folder, count):
    """Makes `count` boxes to learn from and a quarter as many for tests, unless they are there."""
    for seed, (kind, some) in enumerate({"train": count, "test": count // 4 or 1}.items()):
        made = folder / f"{kind}-{count}"
        if not made.exists():
            part = made.with_suffix(".part")
            part.mkdir(parents=True, exist_ok=True)
            boxes.write(part / "{}.tfrecord", some, seed)
            part.rename(made)


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_hpc

    keras_hpc.init(batch="global")
    keras.utils.set_random_seed(args.seed)
    if keras_hpc.rank() == 0:
        prepare(args.data, args.boxes)
    keras_hpc.barrier()
    files = {kind: args.data / f"{kind}-{args.boxes}" for kind in ("train", "test")}

    def learnt(records):
        x, y = boxes.parse(records)
        return boxes.turned(x.numpy(), y.numpy())

    data = {
        kind: keras_hpc.data.Dataset(
            folder / "*.tfrecord",
            args.batch_size,
            decode=learnt if kind == "train" else boxes.parse,
            shuffle="all" if kind == "train" else False,
            seed=args.seed,
        )
        for kind, folder in files.items()
    }
    model = network(boxes.SIZE, args.filters, args.dropout)
    model.compile(keras.optimizers.Adam(args.learning_rate), "mse", metrics=["mae"])
    timed = clock.epochs()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: rate(epoch, args.learning_rate, args.epochs))
    history = model.fit(
        data["train"], validation_data=data["test"], epochs=args.epochs, callbacks=[schedule, timed], verbose=2
    ).history
    keras_hpc.check_replicas(model)
    answers = model.predict(data["test"], verbose=0)
    if keras_hpc.rank() == 0:
        truth = np.concatenate([data["test"][number][1] for number in range(len(data["test"]))])
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "history.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", "seconds", *history])
            writer.writerows(zip(range(1, args.epochs + 1), timed.seconds, *history.values(), strict=True))
        found = quality(truth, answers)
        (args.out / "quality.json").write_text(json.dumps(found))
        np.savez(args.out / "answers.npz", truth=truth, answers=answers)
        print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
