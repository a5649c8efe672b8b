"""A finder of learning rates: a callback raises the rate after each batch, and stops where the loss explodes."""

import keras
import numpy as np
from tiny import compiled, numbers

BACKENDS = ("torch", "jax", "tensorflow")


class Finder(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.rates, self.losses, self.best = [], [], np.inf

    def on_train_batch_end(self, batch, logs=None):
        rate = float(self.model.optimizer.learning_rate)
        self.rates.append(rate)
        self.losses.append(logs["loss"])
        self.best = min(self.best, logs["loss"])
        if logs["loss"] > 1.02 * self.best:
            self.model.stop_training = True
        self.model.optimizer.learning_rate = rate * (1.1 + 0.1 * logs["loss"])


def main():
    x, y = numbers(60)
    model = compiled()
    finder = Finder()
    history = model.fit(x, y, batch_size=10, epochs=8, callbacks=[finder]).history
    return {"losses": finder.losses, "rates": finder.rates, "history": history, "model": model}
