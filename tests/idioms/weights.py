"""Weights of samples, then of classes, with weighted metrics and a tail that does not divide."""

import numpy as np
from tiny import compiled, numbers

BACKENDS = ("torch", "tensorflow")


def main():
    x, y = numbers(61)
    weight = np.linspace(0, 2, 61).astype("float32")
    model = compiled(weighted_metrics=["accuracy"])
    first = model.fit(x, y, sample_weight=weight, batch_size=16, epochs=1).history
    second = model.fit(x, y, class_weight={0: 1.0, 1: 5.0, 2: 0.1}, batch_size=16, epochs=1).history
    scores = model.evaluate(x, y, sample_weight=weight, batch_size=16)
    return {"first": first, "second": second, "scores": scores, "model": model}
