"""Domain adaptation: gradients are turned round between features and a critic, unlabelled samples weigh nothing."""

import keras
import numpy as np
from keras import ops
from tiny import numbers

BACKENDS = ("torch", "jax", "tensorflow")


class Reversal(keras.layers.Layer):
    def __init__(self, strength):
        super().__init__()
        self.strength = strength

    def call(self, x):
        return (1 + self.strength) * ops.stop_gradient(x) - self.strength * x


def main():
    keras.utils.set_random_seed(7)
    x, y = numbers(70)
    x[35:] += 0.5
    domain = (np.arange(70) >= 35).astype("float32")[:, None]
    inputs = keras.Input((6,))
    features = keras.layers.Dense(8, activation="relu")(inputs)
    label = keras.layers.Dense(3, activation="softmax", name="label")(features)
    where = keras.layers.Dense(1, activation="sigmoid", name="where")(Reversal(0.3)(features))
    model = keras.Model(inputs, [label, where])
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    metrics = {"metrics": [["accuracy"], ["accuracy"]], "weighted_metrics": [["accuracy"], []]}
    model.compile(keras.optimizers.Adam(0.02), [loss, "binary_crossentropy"], loss_weights=[1.0, 0.5], **metrics)
    weights = [1 - domain[:, 0], np.ones(70)]
    history = model.fit(x, [y, domain], sample_weight=weights, batch_size=12, epochs=3).history
    return {"history": history, "model": model}
