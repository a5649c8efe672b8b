"""Sequences of many lengths, padded: masks, weights of classes, a metric that masks by itself."""

import keras
import numpy as np
from keras import ops

BACKENDS = ("torch", "jax", "tensorflow")


class MaskedAccuracy(keras.metrics.Metric):
    def __init__(self, name="masked_accuracy", **kwargs):
        super().__init__(name=name, **kwargs)
        self.right = self.add_weight(name="right", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        known = ops.cast(ops.not_equal(y_true, -1), "float32")
        right = ops.cast(ops.equal(ops.cast(y_pred > 0.5, "float32"), y_true), "float32")
        self.right.assign(self.right + ops.sum(known * right))
        self.count.assign(self.count + ops.sum(known))

    def result(self):
        return self.right / ops.maximum(self.count, 1)


def masked_loss(y_true, y_pred):
    known = ops.cast(ops.not_equal(y_true, -1), "float32")
    losses = ops.binary_crossentropy(ops.maximum(y_true, 0), y_pred)
    return ops.sum(known * losses, axis=-1)


def main():
    keras.utils.set_random_seed(7)
    random = np.random.default_rng(4)
    lengths = random.integers(2, 9, 54)
    x = random.integers(1, 12, (54, 8)) * (np.arange(8) < lengths[:, None])
    y = np.where(np.arange(8) < lengths[:, None], random.integers(0, 2, (54, 8)), -1).astype("float32")
    inputs = keras.Input((8,), dtype="int32")
    layers = keras.layers
    hidden = layers.GRU(5, return_sequences=True)(layers.Embedding(12, 4, mask_zero=True)(inputs))
    outputs = layers.Reshape((8,))(layers.Dense(1, activation="sigmoid")(hidden))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Nadam(0.02), masked_loss, metrics=[MaskedAccuracy()])
    history = model.fit(x, y, batch_size=10, epochs=3, validation_data=(x[:21], y[:21])).history
    return {"history": history, "model": model}
