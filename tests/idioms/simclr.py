"""A loss between all samples of a batch, as of SimCLR: several ranks compare the samples of each rank only."""

import keras
from keras import ops
from tiny import images

BACKENDS = ("torch",)
INIT = {"batch": "local"}


class Contrast(keras.layers.Layer):
    def call(self, first, second):
        first, second = (ops.normalize(view, axis=1) for view in (first, second))
        likeness = ops.matmul(first, ops.transpose(second)) / 0.1
        wanted = ops.arange(ops.shape(likeness)[0])
        self.add_loss(ops.mean(keras.losses.sparse_categorical_crossentropy(wanted, likeness, from_logits=True)))
        return first


def main():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((8, 8, 1))
    layers = keras.layers
    augment = keras.Sequential([layers.RandomFlip("horizontal"), layers.GaussianNoise(0.1)])
    encoder = keras.Sequential([layers.Conv2D(4, 3, strides=2), layers.Flatten(), layers.Dense(4)])
    model = keras.Model(inputs, Contrast()(encoder(augment(inputs)), encoder(augment(inputs))))
    model.compile(optimizer="adam")
    return {"_history": model.fit(images(), batch_size=16, epochs=2).history, "_model": model}
