"""A Python generator that never ends, drawn with np.random, with `steps_per_epoch` and `validation_steps`."""

import numpy as np
from tiny import compiled, numbers

BACKENDS = ("jax", "torch")


def batches(x, y, size):
    while True:
        rows = np.random.randint(0, len(x), size)
        yield x[rows], y[rows]


def main():
    x, y = numbers()
    model = compiled()
    valid = ((x[i : i + 16], y[i : i + 16]) for i in [0, 16, 32, 48] * 9)
    options = {"steps_per_epoch": 4, "validation_data": valid, "validation_steps": 2}
    return {"history": model.fit(batches(x, y, 16), epochs=2, **options).history, "model": model}
