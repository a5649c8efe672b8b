# SPDX-License-Identifier: Apache-2.0
"""A small convolutional network learns digits with local SGD: weights are averaged every so many steps.

mpiexec -n 2 python -m examples.localsgd.train --every 8 --outer nesterov
"""

import argparse
import csv
import os
import time
from pathlib import Path

from examples.cnn.train import digits, network


def period(text):
    """Returns a period of steps; 0: gradients are averaged at every step, and weights never."""
    return text if text == "epoch" else int(text)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=period, default=8, help="steps, or epoch; 0: average gradients (default: 8)")
    parser.add_argument("--outer", choices=["none", "nesterov"], default="none")
    parser.add_argument("--outer-rate", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--samples", type=int, default=5000, help="use only so many digits (default: all 5000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "localsgd" / "run")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    import keras_hpc
    from keras_hpc.job import current, meter

    keras_hpc.init()
    if args.every:
        outer = {"outer": "nesterov", "outer_rate": args.outer_rate, "outer_momentum": args.outer_momentum}
        keras_hpc.configure_team(0, schedule="local", every=args.every, **(outer if args.outer == "nesterov" else {}))
    keras.utils.set_random_seed(args.seed)
    (x, y), test = digits(args.samples)
    model = network(keras)
    model.compile(
        keras.optimizers.SGD(args.learning_rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    communication = meter.Meter(current.job().teams[0])

    class Clock(keras.callbacks.Callback):
        """Notes how long the steps of an epoch take, and how much of it they wait for other ranks."""

        def on_epoch_begin(self, epoch, logs=None):
            communication.read()
            self.begin = time.perf_counter()

        def on_test_begin(self, logs=None):
            figures = communication.read()
            took = time.perf_counter() - self.begin
            noted.append((took, figures.exposed_seconds, figures.bytes / 1e6, figures.steps))

    noted = []
    history = model.fit(
        x, y, args.batch_size, epochs=args.epochs, validation_data=test, callbacks=[Clock()], verbose=2
    ).history
    keras_hpc.check_replicas(model)
    if keras_hpc.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "history.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", "seconds", "waited", "megabytes", "reductions", *history])
            rows = zip(range(1, args.epochs + 1), noted, *history.values(), strict=True)
            writer.writerows((epoch, *numbers, *values) for epoch, numbers, *values in rows)
    return history


if __name__ == "__main__":
    main()
