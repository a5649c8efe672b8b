"""A siamese network: one tower for two inputs, a contrastive loss that is a closure, pairs as a list of arrays."""

import keras
import numpy as np
from keras import ops
from tiny import numbers

BACKENDS = ("jax",)


def contrastive(margin):
    def loss(y_true, distance):
        near, far = ops.square(distance), ops.square(ops.maximum(margin - distance, 0))
        return ops.mean((1 - y_true) * near + y_true * far)

    return loss


def main():
    keras.utils.set_random_seed(6)
    x, y = numbers()
    tower = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)])
    left, right = keras.Input((6,)), keras.Input((6,))
    square = keras.layers.Lambda(lambda v: ops.sum(ops.square(v[0] - v[1]), axis=1, keepdims=True))
    distance = keras.layers.Lambda(lambda v: ops.sqrt(ops.maximum(v, 1e-6)))(square([tower(left), tower(right)]))
    model = keras.Model([left, right], distance)
    model.compile(loss=contrastive(1.0), optimizer="rmsprop", metrics=["mae"])
    other = np.roll(np.arange(64), 1)
    differ = (y != y[other]).astype("float32")[:, None]
    history = model.fit([x, x[other]], differ, batch_size=16, epochs=2, validation_data=([x, x], 0 * differ)).history
    return {"history": history, "predicted": model.predict([x[:9], x[9:18]]), "model": model}
