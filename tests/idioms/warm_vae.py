"""A variational autoencoder whose weight of divergence grows with a count of steps; no noise, so that ranks agree."""

import keras
from keras import ops
from tiny import numbers

BACKENDS = ("torch", "jax", "tensorflow")


class Divergence(keras.layers.Layer):
    """Adds a divergence, more of it in each step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, mean, spread, training=False):
        if training:
            self.steps.assign_add(1.0)
        weight = ops.minimum(1.0, self.steps / 10)
        self.add_loss(weight * ops.mean(-0.5 * ops.sum(1 + spread - mean**2 - ops.exp(spread), axis=1)))
        return mean


def main():
    keras.utils.set_random_seed(3)
    x, _ = numbers(57)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    code = Divergence()(keras.layers.Dense(2)(hidden), keras.layers.Dense(2)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(6)(code))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    history = model.fit(x, x, batch_size=8, epochs=3, validation_split=0.1).history
    return {"history": history, "model": model, "steps": ops.convert_to_numpy(model.non_trainable_weights[0])}
