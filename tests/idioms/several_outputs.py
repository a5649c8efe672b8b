"""Inputs, outputs, losses, metrics and weights by name; one loss is weighted, another one has no metric."""

import keras
import numpy as np

BACKENDS = ("torch", "jax", "tensorflow")


def main():
    keras.utils.set_random_seed(2)
    random = np.random.default_rng(3)
    x = {"title": random.normal(size=(72, 5)).astype("float32"), "tags": random.normal(size=(72, 3)).astype("float32")}
    y = {"priority": random.uniform(size=(72, 1)).astype("float32"), "department": random.integers(0, 4, 72)}
    weights = {"priority": random.uniform(size=72), "department": random.uniform(size=72)}
    title, tags = keras.Input((5,), name="title"), keras.Input((3,), name="tags")
    both = keras.layers.concatenate([keras.layers.Dense(4, activation="relu")(title), tags])
    outputs = {
        "priority": keras.layers.Dense(1, name="priority")(both),
        "department": keras.layers.Dense(4, name="department")(both),
    }
    model = keras.Model({"title": title, "tags": tags}, outputs)
    model.compile(
        keras.optimizers.RMSprop(1e-2),
        loss={"priority": "mae", "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"department": ["accuracy"]},
        weighted_metrics={"priority": ["mse"]},
    )
    held_out = ({name: value[48:] for name, value in x.items()}, {name: value[48:] for name, value in y.items()})
    first = [{name: value[:48] for name, value in given.items()} for given in (x, y, weights)]
    history = model.fit(*first[:2], sample_weight=first[2], batch_size=20, epochs=3, validation_data=held_out).history
    predicted = model.predict(x, batch_size=20, verbose=0)
    return {"history": history, "model": model, "predicted": predicted, "scores": model.evaluate(*held_out, verbose=0)}
