"""A layer that chooses among others, and a loss that keeps the choice even, from means over the batch."""

import keras
from keras import ops
from tiny import numbers

BACKENDS = ("torch", "jax", "tensorflow")


class Experts(keras.layers.Layer):
    def __init__(self, count):
        super().__init__()
        self.choice, self.experts = keras.layers.Dense(count), [keras.layers.Dense(6) for _ in range(count)]

    def call(self, x):
        odds = ops.softmax(self.choice(x))
        best = ops.one_hot(ops.argmax(odds, axis=-1), len(self.experts), dtype=odds.dtype)
        self.add_loss(0.01 * len(self.experts) * ops.sum(ops.mean(odds, axis=0)))
        values = ops.stack([expert(x) for expert in self.experts], axis=1)
        return ops.sum(values * ops.expand_dims(odds * best, -1), axis=1)


def main():
    keras.utils.set_random_seed(8)
    x, y = numbers(64)
    inputs = keras.Input((6,))
    hidden = keras.layers.LayerNormalization()(keras.layers.Add()([inputs, Experts(3)(inputs)]))
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    at_once = 1 if keras.backend.backend() == "torch" else 2
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=1.0), loss, metrics=["accuracy"], steps_per_execution=at_once)
    return {"history": model.fit(x, y, batch_size=12, epochs=2).history, "model": model}
