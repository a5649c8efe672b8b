"""Layers that learn from data before training: of strings, numbers and categories; then a model that is exported."""

import keras
import numpy as np
import tensorflow as tf

BACKENDS = ("tensorflow",)


def main():
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(2)
    ages, cities = random.uniform(18, 80, (60, 1)).astype("float32"), random.choice(["Oslo", "Rome", "Lima"], (60, 1))
    bought = (ages[:, 0] > 40).astype("float32")
    layers = keras.layers
    scale, bins, words = (
        layers.Normalization(),
        layers.Discretization(num_bins=4),
        layers.StringLookup(output_mode="one_hot"),
    )
    scale.adapt(ages)
    bins.adapt(ages)
    words.adapt(cities)
    data = tf.data.Dataset.from_tensor_slices(((ages, cities), bought)).batch(16)
    prepared = data.map(
        lambda x, y: (tf.concat([scale(x[0]), tf.one_hot(bins(x[0])[:, 0], 4), tf.cast(words(x[1]), tf.float32)], 1), y)
    )
    model = keras.Sequential([keras.Input((9,)), layers.Dense(4, activation="relu"), layers.Dense(1)])
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
    history = model.fit(prepared, epochs=2).history
    model.export("exported")
    model.save("model.keras")
    x = next(iter(prepared))[0]
    exported = tf.saved_model.load("exported")
    again = keras.models.load_model("model.keras")(x)
    return {"history": history, "model": model, "served": exported.serve(x), "again": again}
