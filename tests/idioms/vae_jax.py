"""A variational autoencoder: sampling with a seed generator in a layer, which adds its own loss."""

import keras
from keras import ops
from tiny import numbers

BACKENDS = ("jax",)


class Sampling(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1337)

    def call(self, mean, log_variance):
        self.add_loss(-0.05 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seed)


def main():
    keras.utils.set_random_seed(8)
    x, _ = numbers()
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    latent = Sampling()(keras.layers.Dense(2)(hidden), keras.layers.Dense(2)(hidden))
    model = keras.Model(inputs, keras.layers.Dense(6)(latent))
    model.compile(optimizer="adam", loss="mse")
    return {"_history": model.fit(x, x, batch_size=16, epochs=2).history, "_model": model}
