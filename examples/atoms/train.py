# SPDX-License-Identifier: Apache-2.0
"""A ResNet-50 tells crystals, and the axis they are seen along, from images of their columns of atoms.

mpiexec -n 2 python -m examples.atoms.train

Images come from `crystals.py`, new ones in each epoch. The folder of --out then holds history.csv, quality.json and
answers.npz. `--width 64` is the ResNet-50 of He et al.; the default has an eighth of its filters.
"""

import argparse
import csv
import json
import os
import time
from pathlib import Path

import numpy as np

from examples.atoms import crystals

# Tests: name, angles and electrons a pixel.
TESTS = {
    "seen": (crystals.SEEN, crystals.ELECTRONS),
    "angles": (crystals.HELD_OUT, crystals.ELECTRONS),
    "noise": (crystals.SEEN, crystals.FEW),
    "both": (crystals.HELD_OUT, crystals.FEW),
}


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8, help="filters of the first convolution; full: 64 (default: 8)")
    parser.add_argument("--images", type=int, default=2160, help="an epoch, of all ranks (default: 2160)")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks (default: 16)")
    parser.add_argument("--learning-rate", type=float, default=0.005, help="at the peak (default: 0.005)")
    parser.add_argument("--tests", type=int, default=30, help="images of each class and each test (default: 30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "atoms" / "run")
    return parser.parse_args(argv)


def resnet50(shape, classes, width=64, momentum=0.9, synchronized=False):
    """Returns the ResNet-50 of He et al. (2016), whose stride is in the 3 x 3 convolutions; logits.

    Blocks begin as their shortcuts: the last gamma of each is 0 (Goyal et al., 2017).

    Args:
        shape: of an image.
        classes: how many.
        width: filters of the first convolution, 64 in the paper. All others grow with it.
        momentum: of BatchNormalization's moving statistics.
        synchronized: whether it normalizes over the batch of all ranks, instead of each rank's own.
    """
    from keras import Input, Model, layers

    def convolved(x, filters, kernel, strides=1, gamma="ones"):
        x = layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
        return layers.BatchNormalization(momentum=momentum, gamma_initializer=gamma, synchronized=synchronized)(x)

    inputs = Input(shape)
    x = layers.ReLU()(convolved(inputs, width, 7, strides=2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        filters = width << stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            shortcut = x if block else convolved(x, 4 * filters, 1, strides)
            x = layers.ReLU()(convolved(x, filters, 1))
            x = layers.ReLU()(convolved(x, filters, 3, strides))
            x = layers.ReLU()(layers.Add()([shortcut, convolved(x, 4 * filters, 1, gamma="zeros")]))
    return Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def new_images(count, batch_size, seed):
    """Returns a data set of `count` images an epoch, as many of each class, in batches of one rank.

    An image depends on the seed, the epoch and its number only: so all are the same on any number of ranks.
    """
    import keras

    class Images(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.epoch = 0

        def __len__(self):
            return -(-count // batch_size)

        def __getitem__(self, index):
            order = np.random.default_rng([seed, self.epoch]).permutation(count)
            numbers = order[index * batch_size : (index + 1) * batch_size]
            rngs = [np.random.default_rng([seed, self.epoch, number]) for number in numbers]
            classes = numbers % len(crystals.CLASSES)
            return crystals.images(classes, rngs), classes

        def on_epoch_end(self):
            self.epoch += 1

    return Images()


def test_images(name, each):
    """Returns images of a test, `each` of every class, and their classes. They are the same for every seed."""
    classes = np.arange(each * len(crystals.CLASSES)) % len(crystals.CLASSES)
    number = list(TESTS).index(name)
    rngs = [np.random.default_rng([1_000_000 + number, n]) for n in range(len(classes))]
    return crystals.images(classes, rngs, *TESTS[name]), classes


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_hpc

    keras_hpc.init()
    size = keras_hpc.size()
    if args.batch_size % size:
        raise SystemExit(f"--batch-size is shared out: a multiple of {size} ranks. Received: {args.batch_size}")
    keras.utils.set_random_seed(args.seed)
    steps = args.epochs * -(-args.images // args.batch_size)
    rate = keras_hpc.schedules.WarmupPolynomial(args.learning_rate, total_steps=steps, warmup_steps=steps // 10)
    model = resnet50((*crystals.SHAPE, 1), len(crystals.CLASSES), args.width, synchronized=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    seconds = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append(time.perf_counter() - self.begin)

    data = new_images(args.images, args.batch_size // size, args.seed)
    history = model.fit(data, epochs=args.epochs, callbacks=[Clock()], verbose=2).history
    keras_hpc.check_replicas(model)
    answers, found = {}, {}
    for name in TESTS:
        x, classes = test_images(name, args.tests)
        answers[name] = model.predict(x, batch_size=54, verbose=0).argmax(axis=1)
        found[name] = float(np.mean(answers[name] == classes))
    if keras_hpc.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "history.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", "seconds", *history])
            writer.writerows(zip(range(1, args.epochs + 1), seconds, *history.values(), strict=True))
        (args.out / "quality.json").write_text(json.dumps(found))
        np.savez(args.out / "answers.npz", **answers)
        print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
