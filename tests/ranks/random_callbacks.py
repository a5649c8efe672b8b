# SPDX-License-Identifier: Apache-2.0
"""Random callbacks of Keras, and of a script's own."""

import csv
import os

import keras


class Own(keras.callbacks.Callback):
    """Looks at logs and weights, and sets what it likes."""

    def __init__(self, settable):
        super().__init__()
        self.settable, self.logs = settable, []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(sorted(logs))
        if epoch == 0 and self.settable and logs["loss"] > 0:
            self.model.optimizer.learning_rate = 0.02


class Callbacks:
    """Draws callbacks.

    Args:
        draw: a `random.Random`.
        watch: the log that is looked at.
        settable: whether the learning rate can be set.
        folder: of this training.
    """

    def __init__(self, draw, watch, settable, folder):
        self.draw, self.watch, self.settable, self.folder = draw, watch, settable, folder
        self.own, self.csv, self.best = None, None, None
        os.makedirs(folder, exist_ok=True)
        self.epochs = []

    def chance(self, p):
        return self.draw.random() < p

    def drawn(self, averages):
        """Returns callbacks. `averages`: whether the optimizer averages weights."""
        callbacks, found = keras.callbacks, []
        if self.chance(0.25):
            self.own = Own(self.settable)
            found.append(self.own)
        if self.chance(0.2):
            found.append(callbacks.EarlyStopping(self.watch, patience=self.draw.choice([0, 1]),
                                                 min_delta=self.draw.choice([0, 10]), restore_best_weights=True,
                                                 start_from_epoch=self.draw.choice([0, 1])))  # fmt: skip
        if self.chance(0.2) and self.settable:
            found.append(callbacks.ReduceLROnPlateau(self.watch, factor=0.5, patience=1, min_delta=10))
        if self.chance(0.15) and self.settable:
            found.append(callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8))
        if self.chance(0.15):
            self.best = f"{self.folder}/best.weights.h5"
            found.append(callbacks.ModelCheckpoint(self.best, self.watch, save_best_only=True, save_weights_only=True,
                                                   mode="min", initial_value_threshold=1e9))  # fmt: skip
        if self.chance(0.1):
            self.csv = f"{self.folder}/log{len(os.listdir(self.folder))}.csv"
            found.append(callbacks.CSVLogger(self.csv))
        if self.chance(0.1):
            found.append(callbacks.BackupAndRestore(f"{self.folder}/backup"))
        if self.chance(0.1):
            found.append(callbacks.TerminateOnNaN())
        if self.chance(0.1):
            found.append(callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: self.epochs.append(epoch)))
        if averages and self.chance(0.5):
            found.append(callbacks.SwapEMAWeights(swap_on_epoch=True))
        return found

    def seen(self, model):
        """What callbacks have noted."""
        found = {"epochs": self.epochs, "logs": len(self.own.logs) if self.own else 0}
        if self.csv:
            with open(self.csv) as file:
                rows = list(csv.DictReader(file))
            found["csv"] = [{name: float(text) for name, text in row.items() if text != "NA"} for row in rows]
        if self.best:
            model.load_weights(self.best)
        return found
