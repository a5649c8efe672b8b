"""CycleGAN: four networks with an optimizer each in one model, losses by functions given to `compile`, a test step."""

import keras
import torch
from tiny import images

BACKENDS = ("torch",)
layers = keras.layers


def generator():
    hidden = [layers.Conv2D(3, 3, padding="same", activation="relu"), layers.GroupNormalization(1)]
    return keras.Sequential([keras.Input((8, 8, 1)), *hidden, layers.Conv2D(1, 3, padding="same")])


def critic():
    hidden = [layers.Conv2D(3, 4, strides=2), layers.LeakyReLU()]
    return keras.Sequential([keras.Input((8, 8, 1)), *hidden, layers.Conv2D(1, 2)])


class CycleGan(keras.Model):
    def __init__(self):
        super().__init__()
        self.gen_G, self.gen_F, self.disc_X, self.disc_Y = generator(), generator(), critic(), critic()
        self.lambda_cycle = 10.0
        self.built = True

    def call(self, x):
        return self.gen_G(x)

    def compile(self, rate):
        super().compile()
        self.optimizers = [keras.optimizers.Adam(rate, beta_1=0.5) for _ in range(4)]
        self.cycle = keras.losses.MeanAbsoluteError()
        self.adversarial = keras.losses.MeanSquaredError()

    def losses_of(self, x, y):
        fake_y, fake_x = self.gen_G(x), self.gen_F(y)
        ones = torch.ones_like
        cycle = self.lambda_cycle * (self.cycle(x, self.gen_F(fake_y)) + self.cycle(y, self.gen_G(fake_x)))
        said_x, said_y = self.disc_X(fake_x), self.disc_Y(fake_y)
        g = self.adversarial(ones(said_y), said_y) + cycle
        f = self.adversarial(ones(said_x), said_x) + cycle
        real_x, real_y = self.disc_X(x), self.disc_Y(y)
        d_x = (self.adversarial(ones(real_x), real_x) + self.adversarial(0 * said_x, self.disc_X(fake_x.detach()))) / 2
        d_y = (self.adversarial(ones(real_y), real_y) + self.adversarial(0 * said_y, self.disc_Y(fake_y.detach()))) / 2
        return {"G": g, "F": f, "D_X": d_x, "D_Y": d_y}

    def train_step(self, data):
        x, y = data
        losses = self.losses_of(x, y)
        networks = self.gen_G, self.gen_F, self.disc_X, self.disc_Y
        weights = [network.trainable_weights for network in networks]
        gradients = [
            torch.autograd.grad(loss, [v.value for v in part], retain_graph=True)
            for loss, part in zip(losses.values(), weights, strict=True)
        ]
        with torch.no_grad():
            for optimizer, part, values in zip(self.optimizers, weights, gradients, strict=True):
                optimizer.apply(values, part)
        return {name: loss.detach() for name, loss in losses.items()}

    def test_step(self, data):
        x, y = data
        return {name: loss.detach() for name, loss in self.losses_of(x, y).items()}


def main():
    keras.utils.set_random_seed(6)
    x = images(30)
    gan = CycleGan()
    gan.compile(1e-3)
    history = gan.fit(x, 1 - x, batch_size=4, epochs=2, validation_data=(x[:7], 1 - x[:7])).history
    return {"history": history, "networks": [gan.gen_G, gan.gen_F, gan.disc_X, gan.disc_Y]}
