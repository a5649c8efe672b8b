"""A transformer block over padded tokens: masks of an embedding reach attention, pooling and the loss of each token."""

import keras
import numpy as np

BACKENDS = ("torch", "jax")
layers = keras.layers


def main():
    keras.utils.set_random_seed(10)
    random = np.random.default_rng(4)
    tokens = random.integers(1, 12, size=(64, 7))
    tokens[np.arange(7) >= random.integers(2, 8, size=(64, 1))] = 0  # of different lengths
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(12, 8, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, use_bias=False)(x, x, use_causal_mask=True))
    model = keras.Model(
        inputs, [layers.Dense(12, name="next")(x), layers.Dense(1, name="even")(layers.GlobalAveragePooling1D()(x))]
    )
    losses = [
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.losses.BinaryCrossentropy(from_logits=True),
    ]
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=losses, weighted_metrics=[["accuracy"], []])
    targets = [np.roll(tokens, -1, axis=1), (tokens.sum(axis=1, keepdims=True) % 2).astype("float32")]
    return {"history": model.fit(tokens, targets, batch_size=16, epochs=2).history, "model": model}
