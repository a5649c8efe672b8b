"""Scores of an untrained model, built or not; a new head on a trained one; then training."""

import keras
from tiny import compiled, numbers

BACKENDS = ("torch", "jax")


def main():
    x, y = numbers()
    model = compiled()
    before = model.evaluate(x, y, batch_size=16)
    model.fit(x, y, batch_size=16)
    headed = keras.Sequential([*model.layers, keras.layers.Dense(2)])  # unseeded from here, and not built
    headed.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    first = headed.evaluate(x, y % 2, batch_size=16)
    predicted = headed.predict(x[:4])
    headed.fit(x, y % 2, batch_size=16)
    return {"before": before, "first": first, "predicted": predicted, "models": [model, headed]}
