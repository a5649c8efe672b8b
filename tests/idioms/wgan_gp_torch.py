"""A Wasserstein GAN: a gradient penalty with second derivatives, two steps of the critic for one of the generator."""

import keras
import numpy as np
import torch
from tiny import numbers

BACKENDS = ("torch",)
layers = keras.layers


def network(inputs, outputs):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(8, activation="tanh"), layers.Dense(outputs)])


class WGAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic, self.generator = network(6, 1), network(4, 6)
        self.built = True

    def compile(self):
        super().compile()
        self.optimizers = {"critic": keras.optimizers.RMSprop(2e-3), "generator": keras.optimizers.Adam(1e-3)}

    def penalty(self, real, fake):
        between = (0.5 * (real + fake)).requires_grad_()
        (slopes,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        return ((torch.sqrt((slopes**2).sum(dim=1) + 1e-6) - 1.0) ** 2).mean()

    def update(self, name, loss):
        self.zero_grad()
        loss.backward()
        variables = getattr(self, name).trainable_variables
        with torch.no_grad():
            self.optimizers[name].apply([v.value.grad for v in variables], variables)

    def train_step(self, data):
        real, latent = data
        for _ in range(2):
            fake = self.generator(latent).detach()
            cost = self.critic(fake).mean() - self.critic(real).mean()
            c_loss = cost + 10.0 * self.penalty(real, fake)
            self.update("critic", c_loss)
        g_loss = -self.critic(self.generator(latent)).mean()
        self.update("generator", g_loss)
        return {"c_loss": c_loss.detach(), "g_loss": g_loss.detach()}


def main():
    keras.utils.set_random_seed(2)
    x, _ = numbers()
    latent = np.random.default_rng(3).normal(size=(64, 4)).astype("float32")
    gan = WGAN()
    gan.compile()
    history = gan.fit(x, latent, batch_size=16, epochs=2, shuffle=False).history
    return {"history": history, "networks": [gan.critic, gan.generator]}
