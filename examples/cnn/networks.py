# SPDX-License-Identifier: Apache-2.0
"""Networks that benchmarks know, with random weights, and synthetic data for them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of the benchmark.

    Attributes:
        build: a function from the shape of an image to a Keras model with logits of `classes`.
        shape: of a sample, unless the user wants another size.
        classes: how many.
        batch_size: of a rank, unless the user wants another.
    """

    build: Callable[[tuple[int, ...], int], Any]
    shape: tuple[int, ...]
    classes: int
    batch_size: int

    def shape_of(self, size):
        """Shape of a sample `size` pixels wide and high; None: as it is. A vector keeps its length."""
        return self.shape if size is None or len(self.shape) == 1 else (size, size, self.shape[-1])


def lenet(shape, classes):
    """Two convolutions and two dense layers, as in many introductions: 1.2 million parameters."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input(shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(classes),
        ]
    )


def mlp(shape, classes):
    """Three layers of 4,096: nothing but gradients."""
    from keras import Input, Sequential, layers

    hidden = [layers.Dense(4096, activation="relu") for _ in range(3)]
    return Sequential([Input(shape), *hidden, layers.Dense(classes)])


def hep_cnn(shape, classes, filters=128):
    """The network of Kurth et al. (2017, arXiv:1708.05256) for images of collisions: no dense layer but the last.

    Convolutions halve the image until it is 14 pixels wide at most, 8 for small ones: four of them for 224, three for
    64 pixels, then a last one.
    """
    from keras import Input, Sequential, layers

    options = {"padding": "same", "activation": "relu", "kernel_initializer": "he_normal"}
    units = []
    for _ in range(4 if shape[0] >= 128 else 3):
        units += [layers.Conv2D(filters, 3, **options), layers.MaxPooling2D(), layers.Dropout(0.5)]
    last = [layers.Conv2D(filters, 3, **options), layers.GlobalAveragePooling2D(), layers.Dense(classes)]
    return Sequential([Input(shape), *units, *last])


def alexnet(shape, classes):
    """The network of Krizhevsky et al. (2012) on one device: its groups joined, and without its local normalization.

    Images of 67 pixels at least; 62,378,344 parameters with 227 pixels and 1,000 classes, most of them in dense layers.
    """
    from keras import Input, Sequential, layers

    model = Sequential([Input(shape), layers.Conv2D(96, 11, strides=4, activation="relu"), layers.MaxPooling2D(3, 2)])
    for filters, kernel, pools in ((256, 5, True), (384, 3, False), (384, 3, False), (256, 3, True)):
        model.add(layers.Conv2D(filters, kernel, padding="same", activation="relu"))
        if pools:
            model.add(layers.MaxPooling2D(3, 2))
    model.add(layers.Flatten())
    for _ in range(2):
        model.add(layers.Dense(4096, activation="relu"))
        model.add(layers.Dropout(0.5))
    model.add(layers.Dense(classes))
    return model


def vgg16(shape, classes):
    """Keras' own: 138,357,544 parameters with 224 pixels and 1,000 classes. Images of 32 pixels at least."""
    import keras

    return keras.applications.VGG16(weights=None, input_shape=shape, classes=classes, classifier_activation=None)


def resnet50(shape, classes):
    """Keras' own."""
    import keras

    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=classes, classifier_activation=None)


def inception_v3(shape, classes):
    """Keras' own. Images of 75 pixels at least."""
    import keras

    return keras.applications.InceptionV3(weights=None, input_shape=shape, classes=classes, classifier_activation=None)


NETWORKS = {
    "lenet": Network(lenet, (28, 28, 1), 10, 64),
    "resnet50": Network(resnet50, (64, 64, 3), 1000, 8),
    "mlp": Network(mlp, (4096,), 10, 4),
    "hep_cnn": Network(hep_cnn, (64, 64, 3), 2, 16),
    "alexnet": Network(alexnet, (131, 131, 3), 1000, 8),
    "vgg16": Network(vgg16, (64, 64, 3), 1000, 4),
    "inception_v3": Network(inception_v3, (96, 96, 3), 1000, 8),
}


def data(shape, classes, samples):
    """Returns normal noise, (samples, *shape), float32, and labels, (samples,), int32: the same at every call."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((samples, *shape), dtype="float32"), rng.integers(0, classes, samples).astype("int32")
