"""A GAN in one model: a step of its own, two Adam optimizers, noise from a seed generator, labels with noise."""

import keras
import torch
from keras import ops
from tiny import images

BACKENDS = ("torch",)
layers = keras.layers


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, strides=2),
                layers.LeakyReLU(),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(4 * 4 * 2),
                layers.Reshape((4, 4, 2)),
                layers.Conv2DTranspose(1, 4, 2, "same"),
            ]
        )
        self.seed = keras.random.SeedGenerator(3)
        self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.bce = d_optimizer, g_optimizer, loss

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def train_step(self, real):
        real = real[0] if isinstance(real, tuple) else real
        n = ops.shape(real)[0]
        fakes = self.generator(keras.random.normal((n, 5), seed=self.seed))
        both = ops.concatenate([fakes.detach(), real], axis=0)
        labels = ops.concatenate([ops.ones((n, 1)), ops.zeros((n, 1))], axis=0)
        labels = labels + 0.05 * keras.random.uniform((2 * n, 1), seed=self.seed)
        self.zero_grad()
        d_loss = self.bce(labels, self.discriminator(both))
        d_loss.backward()
        variables = self.discriminator.trainable_weights
        with torch.no_grad():
            self.d_optimizer.apply([v.value.grad for v in variables], variables)
        self.zero_grad()
        noise = keras.random.normal((n, 5), seed=self.seed)
        g_loss = self.bce(ops.zeros((n, 1)), self.discriminator(self.generator(noise)))
        g_loss.backward()
        variables = self.generator.trainable_weights
        with torch.no_grad():
            self.g_optimizer.apply([v.value.grad for v in variables], variables)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def main():
    keras.utils.set_random_seed(1)
    gan = GAN()
    adam = keras.optimizers.Adam
    gan.compile(adam(1e-3), adam(2e-3), keras.losses.BinaryCrossentropy(from_logits=True))
    history = gan.fit(images(), batch_size=16, epochs=2).history
    return {"_history": history, "_generator": gan.generator, "_discriminator": gan.discriminator}
