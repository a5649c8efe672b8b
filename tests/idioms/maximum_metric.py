"""A metric that keeps a maximum, and says how states are merged."""

import keras
import numpy as np
from keras import ops
from tiny import compiled, numbers

BACKENDS = ("jax", "torch")


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest", **options):
        super().__init__(name=name, **options)
        self.value = self.add_weight(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value.value, ops.max(y_pred)))

    def result(self):
        return self.value.value

    def merge_state(self, metrics):
        for metric in metrics:
            self.value.assign(ops.maximum(self.value.value, metric.value.value))


def main():
    x, y = numbers()
    model = compiled(metrics=[Largest(), "accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y)).history
    falling = np.argsort(-model.predict(x).max(axis=1))  # the first rank has the largest
    evaluated = [model.evaluate(x[order], y[order], batch_size=16) for order in (falling, falling[::-1])]
    return {"history": history, "evaluated": evaluated, "model": model}
