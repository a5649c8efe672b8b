"""A variational autoencoder as a model of its own, with three trackers and a loss that is summed over features."""

import keras
import tensorflow as tf
from keras import ops
from tiny import numbers

BACKENDS = ("tensorflow",)


class VAE(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
        self.trackers = {name: keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "divergence")}
        self.seed = keras.random.SeedGenerator(1)

    @property
    def metrics(self):
        return list(self.trackers.values())

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
            noise = keras.random.normal(ops.shape(mean), seed=self.seed)
            again = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
            reconstruction = ops.mean(ops.sum((x - again) ** 2, axis=1))
            divergence = ops.mean(ops.sum(-0.5 * (1 + log_variance - mean**2 - ops.exp(log_variance)), axis=1))
            loss = reconstruction + divergence
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        for tracker, value in zip(self.metrics, (loss, reconstruction, divergence), strict=True):
            tracker.update_state(value)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def main():
    keras.utils.set_random_seed(8)
    model = VAE()
    model.compile(optimizer=keras.optimizers.Adam())
    return {"_history": model.fit(numbers()[0], batch_size=16, epochs=2).history, "_model": model}
