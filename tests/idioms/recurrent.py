"""Bidirectional recurrent layers over padded sequences, a layer over time, convolutions over time and images."""

import keras
import numpy as np

BACKENDS = ("torch", "jax", "tensorflow")


def main():
    keras.utils.set_random_seed(5)
    random = np.random.default_rng(6)
    words = random.integers(1, 20, (48, 7)) * (np.arange(7) < random.integers(2, 8, (48, 1)))
    kinds = random.integers(0, 2, (48, 1)).astype("float32")
    layers = keras.layers
    reader = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(3, activation="relu")),
            layers.GRU(4),
            layers.Dense(1),
        ]
    )
    reader.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), metrics=["binary_accuracy", "auc"])
    history = reader.fit(words, kinds, batch_size=10, epochs=2, validation_split=0.25).history
    movies = random.uniform(size=(12, 3, 6, 6, 1)).astype("float32")
    painter = keras.Sequential(
        [
            keras.Input((3, 6, 6, 1)),
            layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True),
            layers.Conv3D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    painter.compile("adam", "binary_crossentropy")
    painted = painter.fit(movies[:, :-1][:, [0, 1, 1]], movies, batch_size=5, epochs=1).history
    return {"history": history, "painted": painted, "models": [reader, painter]}
