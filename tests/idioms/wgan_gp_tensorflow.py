"""A Wasserstein GAN: gradient penalty, two steps of the critic for one of the generator, three RMSprop optimizers."""

import keras
import numpy as np
import tensorflow as tf
from tiny import numbers

BACKENDS = ("tensorflow",)
layers = keras.layers


def network(inputs, outputs):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(8, activation="tanh"), layers.Dense(outputs)])


class WGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic, self.generator, self.encoder = network(6, 1), network(4, 6), network(6, 4)
        self.rates = {"critic": 2e-3, "generator": 1e-3, "encoder": 1e-3}

    def compile(self):
        super().compile()
        self.optimizers = {name: keras.optimizers.RMSprop(rate) for name, rate in self.rates.items()}

    def penalty(self, real, fake):
        between = 0.5 * (real + fake)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        slopes = tf.sqrt(tf.reduce_sum(tape.gradient(scores, between) ** 2, axis=1) + 1e-6)
        return tf.reduce_mean((slopes - 1.0) ** 2)

    def update(self, name, tape, loss):
        variables = getattr(self, name).trainable_variables
        self.optimizers[name].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def train_step(self, data):
        real, latent = data
        for _ in range(2):
            fake = self.generator(latent, training=True)
            with tf.GradientTape() as tape:
                cost = tf.reduce_mean(self.critic(fake, training=True)) - tf.reduce_mean(
                    self.critic(real, training=True)
                )
                c_loss = cost + 10.0 * self.penalty(real, fake)
            self.update("critic", tape, c_loss)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(latent, training=True), training=True))
        self.update("generator", tape, g_loss)
        with tf.GradientTape() as tape:
            e_loss = tf.reduce_mean((self.encoder(self.generator(latent)) - latent) ** 2)
        self.update("encoder", tape, e_loss)
        return {"c_loss": c_loss, "g_loss": g_loss, "e_loss": e_loss}


def main():
    keras.utils.set_random_seed(2)
    x, _ = numbers()
    latent = np.random.default_rng(3).normal(size=(64, 4)).astype("float32")
    gan = WGAN()
    gan.compile()
    history = gan.fit(x, latent, batch_size=16, epochs=2, shuffle=False).history
    return {"history": history, "networks": [gan.critic, gan.generator, gan.encoder]}
