# SPDX-License-Identifier: Apache-2.0
"""A small residual network learns handwritten digits with batches as large as you like, by SGD or by LARS.

python -m examples.largebatch.train --optimizer lars --global-batch 1024
mpiexec -n 4 python -m examples.largebatch.train --optimizer lars --global-batch 1024

Digits are moved by up to two pixels each time they are seen, so that 4,000 of them are enough for a while. An epoch is
8,192 of them, of all ranks together. The folder of --out then holds history.csv.
"""

import argparse
import csv
import os
import time
from pathlib import Path

import numpy as np

from examples.cnn.train import digits

EPOCH_SAMPLES = 8192
SHIFT = 2  # pixels
BASE_BATCH = 64
SGD_RATE = 0.1  # with BASE_BATCH; grows with the batch
LARS_RATE = 2.0  # with BASE_BATCH; grows with the square root of the batch
WARMUP = 0.12  # of the training, as 12 of 100 epochs
DECAY = 1e-4  # of weights, but not of biases and of BatchNormalization
FILTERS = 8


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=["sgd", "lars"], default="sgd")
    parser.add_argument("--global-batch", type=int, default=BASE_BATCH, help="samples of a step, of all ranks")
    parser.add_argument("--epochs", type=int, default=10, help=f"each of {EPOCH_SAMPLES} samples (default: 10)")
    parser.add_argument("--learning-rate", type=float, help="at the peak (default: a rule for the optimizer and batch)")
    parser.add_argument("--smoothing", type=float, default=0.1, help="of labels (default: 0.1)")
    parser.add_argument("--statistics", type=float, help="BatchNormalization's momentum (default: 0.9, or less)")
    parser.add_argument("--samples", type=int, default=5000, help="use only so many digits (default: all 5000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "largebatch" / "run")
    return parser.parse_args(argv)


def rate_of(optimizer, global_batch):
    """Returns the peak learning rate: linear scaling for SGD (Goyal et al.), square-root scaling for LARS."""
    from keras_hpc.schedules import linear_scaling, square_root_scaling

    factor = global_batch / BASE_BATCH
    return linear_scaling(SGD_RATE, factor) if optimizer == "sgd" else square_root_scaling(LARS_RATE, factor)


def statistics_momentum(steps):
    """Returns BatchNormalization's momentum for a training of that many steps: 0.9, or less if they are few.

    With 0.9, what moving statistics begin with still counts 12 % after 20 steps, and weights that change fast leave
    them behind: a network that has learnt then fails in tests, which use them.
    """
    return min(0.9, max(0.0, 1 - 20 / steps))


def network(momentum=0.9):
    """Returns a residual network of 8 layers, as those for CIFAR of He et al., with 8, 16 and 32 filters; logits."""
    from keras import Input, Model, layers

    def convolved(x, filters, kernel, strides=1):
        x = layers.Conv2D(filters, kernel, strides=strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=momentum)(x)

    image = Input((28, 28, 1))
    x = layers.ReLU()(convolved(image, FILTERS, 3, strides=2))
    for filters, strides in ((FILTERS, 1), (2 * FILTERS, 2), (4 * FILTERS, 2)):
        shortcut = x if strides == 1 else convolved(x, filters, 1, strides)
        x = layers.ReLU()(convolved(x, filters, 3, strides))
        x = layers.ReLU()(layers.Add()([shortcut, convolved(x, filters, 3)]))
    return Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def optimizer_of(name, rate, model):
    """Returns LARS, or SGD whose decay leaves out what that of LARS does: weights of less than two dimensions."""
    import keras

    import keras_hpc

    if name == "lars":
        return keras_hpc.optimizers.LARS(rate, momentum=0.9, lars_weight_decay=DECAY)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=DECAY)
    optimizer.exclude_from_weight_decay([v for v in model.trainable_variables if len(v.shape) < 2])
    return optimizer


def moved(images, rng):
    """Returns images, (n, 28, 28, 1), each moved by up to SHIFT pixels along both axes; what comes in is 0."""
    padded = np.pad(images, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:3], axis=(1, 2))
    down, right = rng.integers(0, 2 * SHIFT + 1, (2, len(images)))
    return windows[np.arange(len(images)), down, right].transpose(0, 2, 3, 1)


def moving_digits(x, y, batch_size, seed):
    """Returns a data set of moved digits: EPOCH_SAMPLES in an epoch, in batches of one rank."""
    import keras

    class Moving(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.epoch = 0

        def __len__(self):
            return EPOCH_SAMPLES // batch_size

        def __getitem__(self, index):
            rng = np.random.default_rng([seed, self.epoch, index])
            rows = rng.integers(0, len(x), batch_size)
            return moved(x[rows], rng), y[rows]

        def on_epoch_end(self):
            self.epoch += 1

    return Moving()


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_hpc

    keras_hpc.init()
    size = keras_hpc.size()
    if args.global_batch % size or EPOCH_SAMPLES % args.global_batch:
        raise SystemExit(
            f"--global-batch is shared out, and divides an epoch. Expected a multiple of {size} ranks that divides "
            f"{EPOCH_SAMPLES}. Received: {args.global_batch}"
        )
    keras.utils.set_random_seed(args.seed)
    (x, y), (x_test, y_test) = digits(args.samples)
    y, y_test = (np.eye(10, dtype="float32")[labels] for labels in (y, y_test))
    steps = EPOCH_SAMPLES // args.global_batch
    rate = keras_hpc.schedules.WarmupPolynomial(
        args.learning_rate or rate_of(args.optimizer, args.global_batch),
        total_steps=args.epochs * steps,
        warmup_steps=round(WARMUP * args.epochs * steps),
    )
    momentum = statistics_momentum(args.epochs * steps) if args.statistics is None else args.statistics
    model = network(momentum)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=args.smoothing)
    model.compile(optimizer_of(args.optimizer, rate, model), loss, metrics=["accuracy"])

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.begin = time.perf_counter()

        def on_test_begin(self, logs=None):
            seconds.append(time.perf_counter() - self.begin)

    seconds = []
    history = model.fit(
        moving_digits(x, y, args.global_batch // size, args.seed),
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        validation_batch_size=500,
        callbacks=[Clock()],
        verbose=2,
    ).history
    keras_hpc.check_replicas(model)
    if keras_hpc.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "history.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", "seconds", *history])
            writer.writerows(zip(range(1, args.epochs + 1), seconds, *history.values(), strict=True))
    return history


if __name__ == "__main__":
    main()
