# SPDX-License-Identifier: Apache-2.0
"""A convolutional network learns digits, or to tell jets, with local SGD: weights are averaged every so many steps.

mpiexec -n 2 python -m examples.localsgd.train --every 8 --outer nesterov
mpiexec -n 2 python -m examples.localsgd.train --task jets --every epoch
"""

import argparse
import csv
import dataclasses
import json
import math
import os
import time
from pathlib import Path

import numpy as np
from sklearn import metrics

from examples.cnn import hep_cnn, jets, networks
from examples.cnn.train import digits, network


@dataclasses.dataclass(frozen=True)
class Task:
    """How something is learned, unless the user says otherwise.

    Attributes:
        epochs: of a training.
        batch_size: of each rank.
        learning_rate: of one rank.
    """

    epochs: int
    batch_size: int
    learning_rate: float


TASKS = {"digits": Task(12, 32, 0.02), "jets": Task(8, 16, 2e-3)}


def period(text):
    """Returns a period of steps; 0: gradients are averaged at every step, and weights never."""
    return text if text == "epoch" else int(text)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="digits", help="what to learn (default: digits)")
    parser.add_argument("--every", type=period, default=8, help="steps, or epoch; 0: average gradients (default: 8)")
    parser.add_argument("--outer", choices=["none", "nesterov"], default="none")
    parser.add_argument("--outer-rate", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, help="(default: 12 for digits, 8 for jets)")
    parser.add_argument("--batch-size", type=int, help="of each rank (default: 32 for digits, 16 for jets)")
    parser.add_argument("--learning-rate", type=float, help="(default: 0.02 for digits, 0.002 for jets)")
    parser.add_argument("--samples", type=int, help="use only so many (default: all 5000 digits or 2000 events)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "localsgd" / "run")
    args = parser.parse_args(argv)
    for name, value in dataclasses.asdict(TASKS[args.task]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def samples_of(task, count):
    """Returns (x, y) for training and for tests, of at most so many samples; None: of all."""
    if task == "digits":
        return digits(count or 5000)
    return tuple(tuple(part[:count] for part in pair) for pair in hep_cnn.split(jets.SMALL))


def compiled(keras, task, shape, learning_rate, steps):
    """Returns a network for the task: digits by SGD; jets by the HEP-CNN with an eighth of its filters, and Adam.

    Args:
        keras: the module.
        task: "digits" or "jets".
        shape: of an image.
        learning_rate: for jets, it falls from here to zero.
        steps: of the training.
    """
    if task == "digits":
        model, optimizer = network(keras), keras.optimizers.SGD(learning_rate, momentum=0.9)
    else:
        model = networks.hep_cnn(shape, 2, filters=16)
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(learning_rate, steps))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def quality(task, model, x, y):
    """Returns the number that each field goes by: the accuracy of digits, the area under the ROC curve of jets."""
    logits = model.predict(x, batch_size=250, verbose=0)
    if task == "digits":
        return float(np.mean(logits.argmax(axis=-1) == y))
    return float(metrics.roc_auc_score(y, logits[:, 1] - logits[:, 0]))


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
    (x, y), test = samples_of(args.task, args.samples)
    steps = args.epochs * math.ceil(len(x) / (args.batch_size * keras_hpc.size()))
    model = compiled(keras, args.task, x.shape[1:], args.learning_rate, steps)
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
    figure = quality(args.task, model, *test)
    keras_hpc.check_replicas(model)
    if keras_hpc.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "history.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", "seconds", "waited", "megabytes", "reductions", *history])
            rows = zip(range(1, args.epochs + 1), noted, *history.values(), strict=True)
            writer.writerows((epoch, *numbers, *values) for epoch, numbers, *values in rows)
        (args.out / "quality.json").write_text(json.dumps({"quality": figure}))
    return history


if __name__ == "__main__":
    main()
