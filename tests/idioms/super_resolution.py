"""Super-resolution: pixels shuffled into place, a callback that predicts and keeps the ratio of signal to noise."""

import math

import keras
import numpy as np
from keras import ops
from tiny import images

BACKENDS = ("torch", "jax", "tensorflow")


class DepthToSpace(keras.layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        f, (_, height, width, channels) = self.factor, x.shape
        out = channels // f**2
        x = ops.reshape(x, (-1, height, width, f, f, out))
        return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, height * f, width * f, out))


class Ratio(keras.callbacks.Callback):
    def __init__(self, small, large):
        super().__init__()
        self.small, self.large, self.found, self.losses = small, large, [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.psnr = []

    def on_test_batch_end(self, batch, logs=None):
        self.psnr.append(10 * math.log10(1 / logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        error = np.mean((self.model.predict(self.small, verbose=0) - self.large) ** 2)
        self.found.append(10 * math.log10(1 / error))
        self.losses.append(np.mean(self.psnr))


def main():
    keras.utils.set_random_seed(6)
    large = images(50)
    small = large.reshape(50, 4, 2, 4, 2, 1).mean(axis=(2, 4))
    layers = keras.layers
    inputs = keras.Input((4, 4, 1))
    hidden = layers.Conv2D(6, 3, padding="same", activation="tanh", kernel_initializer="orthogonal")(inputs)
    model = keras.Model(inputs, DepthToSpace(2)(layers.Conv2D(4, 3, padding="same")(hidden)))
    model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    ratio = Ratio(small[40:45], large[40:45])
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1)
    held_out = small[40:], large[40:]
    options = {"batch_size": 12, "validation_data": held_out, "validation_batch_size": 4}
    history = model.fit(small[:40], large[:40], epochs=3, callbacks=[ratio, stop], **options).history
    return {"history": history, "ratios": ratio.found, "_tests": ratio.losses, "model": model}
