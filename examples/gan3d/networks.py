# SPDX-License-Identifier: Apache-2.0
"""Generator and discriminator of 3DGAN, which imagines showers of electrons in a calorimeter.

Images are (x, y, layer, 1), cell energies in units of 10 MeV; energies of the primary particle are in units of 100 GeV.
Preset "paper" is the architecture of Vallecorsa et al. ("3DGAN", fixed angle of incidence), with LeakyReLU's slope of
Keras 2. "mini" is ours, made to learn on a CPU within minutes.
"""

import contextlib
import dataclasses

import keras
import numpy as np

from examples.gan3d.data import CELL_UNIT_GEV, ENERGY_UNIT_GEV

LATENT = 200
SLOPE = 0.3
HEADS = ("generation", "auxiliary", "ecal")


@dataclasses.dataclass(frozen=True)
class Preset:
    """A size of the problem.

    Attributes:
        name: how it is asked for.
        size: cells of the image along x, y and z.
        batch_size: samples per rank and step.
        sum_weight: of the error of the sum of cells, percent, in the loss.
    """

    name: str
    size: int
    batch_size: int
    sum_weight: float

    @property
    def shape(self):
        """Shape of an image without the batch: (size, size, size, 1)."""
        return (self.size, self.size, self.size, 1)


PRESETS = {
    "paper": Preset("paper", 25, 128, 0.1),  # a GPU, or many nodes
    "mini": Preset("mini", 13, 16, 0.3),  # a CPU; with 0.1 sums were 3 to 7 % low after its short training
}


def generator(preset):
    """Makes the network from noise times energy, (batch, 200), to images, (batch, size, size, size, 1).

    Args:
        preset: name of one of PRESETS.

    Returns:
        A functional model. Its outputs are in units of 10 MeV, none is negative.
    """
    layers = {"paper": _paper_generator, "mini": _mini_generator}[preset]()
    noise = keras.Input((LATENT,), name="noise")
    x = noise
    for layer in layers:
        x = layer(x)
    return keras.Model(noise, x, name="generator")


def discriminator(preset):
    """Makes the network that judges images: are they real, what energy did the particle have, what do cells add up to?

    Args:
        preset: name of one of PRESETS.

    Returns:
        A functional model from (batch, size, size, size, 1) to a dictionary of three (batch, 1): "generation", the
        probability that the image is real, "auxiliary", the energy in units of 100 GeV, and "ecal", the sum of all
        cells in units of 10 MeV, which has no weights.
    """
    layers = {"paper": _paper_discriminator, "mini": _mini_discriminator}[preset]()
    image = keras.Input(PRESETS[preset].shape, name="image")
    x = image
    for layer in layers:
        x = layer(x)
    outputs = {
        "generation": keras.layers.Dense(1, activation="sigmoid", name="generation")(x),
        "auxiliary": keras.layers.Dense(1, name="auxiliary")(x),
        "ecal": CellSum(name="ecal")(image),
    }
    return keras.Model(image, outputs, name="discriminator")


def combine(generator, discriminator):
    """Makes the model that trains the generator through the discriminator.

    Train it inside `frozen(discriminator)`, or it would train both.

    Returns:
        A functional model from the generator's input to the discriminator's outputs.
    """
    noise = keras.Input((LATENT,), name="noise")
    return keras.Model(noise, discriminator(generator(noise)), name="combined")


@contextlib.contextmanager
def frozen(model):
    """Inside, a model's weights and its BatchNormalization statistics stay as they are; its dropout goes on.

    Keras looks at `trainable` when it traces a step, and traces again for other shapes: so not only the first step of
    the combined model belongs in here. Frozen BatchNormalization normalizes with its moving statistics.
    """
    model.trainable = False
    try:
        yield
    finally:
        model.trainable = True


def compile_arguments(preset, learning_rate=1e-3):
    """Returns what discriminator and combined model are compiled with, and an RMSprop of its own for each call.

    The relative errors of energy and of the sum of cells are in percent, hence their small weights.
    """
    return {
        "optimizer": keras.optimizers.RMSprop(learning_rate, rho=0.9, epsilon=1e-7),
        "loss": {
            "generation": "binary_crossentropy",
            "auxiliary": "mean_absolute_percentage_error",
            "ecal": "mean_absolute_percentage_error",
        },
        "loss_weights": {"generation": 2.0, "auxiliary": 0.1, "ecal": PRESETS[preset].sum_weight},
        "jit_compile": use_xla(),
    }


def use_xla():
    """Returns `jit_compile` for these models: on a CPU, XLA makes 3-D convolutions slow. JAX knows nothing else."""
    return keras.backend.backend() == "jax"


def noise_of(rng, energies):
    """Draws inputs of the generator: normal noise, times the energy that the shower shall have.

    Args:
        rng: a `numpy.random.Generator`.
        energies: (n, 1), units of 100 GeV.

    Returns:
        (n, 200), float32.
    """
    return (rng.standard_normal((len(energies), LATENT)) * energies).astype("float32")


def generate(generator, rng, energies, batch_size=64):
    """Generates one shower for each energy.

    Args:
        generator: a trained generator.
        rng: a `numpy.random.Generator`.
        energies: (n,), GeV.
        batch_size: showers at a time.

    Returns:
        (n, size, size, size), GeV, float32.
    """
    inputs = noise_of(rng, np.asarray(energies)[:, None] / ENERGY_UNIT_GEV)
    parts = [
        keras.ops.convert_to_numpy(generator.predict_on_batch(inputs[begin : begin + batch_size]))
        for begin in range(0, len(inputs), batch_size)
    ]
    return np.concatenate(parts)[..., 0] * np.float32(CELL_UNIT_GEV)


def judge(discriminator, images, energies, batch_size=64):
    """Asks the discriminator about showers.

    Args:
        discriminator: a trained discriminator.
        images: (n, size, size, size), GeV.
        energies: (n,), theirs, GeV.
        batch_size: showers at a time.

    Returns:
        a dictionary of arrays (n,): "real", the probability that a shower is real, and "energy ratio", the energy that
        the discriminator measures / the true one.
    """
    found = [
        discriminator.predict_on_batch(images[begin : begin + batch_size, ..., None] / np.float32(CELL_UNIT_GEV))
        for begin in range(0, len(images), batch_size)
    ]
    real, energy = (
        np.concatenate([keras.ops.convert_to_numpy(part[head])[:, 0] for part in found]) for head in HEADS[:2]
    )
    return {"real": real, "energy ratio": energy * ENERGY_UNIT_GEV / energies}


@keras.saving.register_keras_serializable(package="gan3d")
class CellSum(keras.layers.Layer):
    """The sum of all cells: (batch, x, y, z, 1) to (batch, 1)."""

    def call(self, image):
        return keras.ops.sum(image, axis=(1, 2, 3))


def _leaky():
    return keras.layers.LeakyReLU(negative_slope=SLOPE)


def _convolution(filters, kernel, padding="valid", **options):
    return keras.layers.Conv3D(filters, kernel, padding=padding, **options)


def _normalized(filters, kernel, momentum=0.99, **options):
    return [_convolution(filters, kernel, **options), _leaky(), keras.layers.BatchNormalization(momentum=momentum)]


def _image_of_cells():
    return _convolution(1, 2, use_bias=False, kernel_initializer="glorot_normal", activation="relu")


def _paper_generator():
    he = {"kernel_initializer": "he_uniform"}
    return [
        keras.layers.Dense(7 * 7 * 8 * 8),
        keras.layers.Reshape((7, 7, 8, 8)),
        *_normalized(64, (6, 6, 8), padding="same", **he),
        keras.layers.UpSampling3D(2),  # 14 x 14 x 16
        keras.layers.ZeroPadding3D((2, 2, 0)),
        *_normalized(6, (6, 5, 8), **he),  # 13 x 14 x 9
        keras.layers.UpSampling3D((2, 2, 3)),  # 26 x 28 x 27
        keras.layers.ZeroPadding3D((1, 0, 3)),
        _convolution(6, (3, 3, 8), **he),  # 26 x 26 x 26
        _leaky(),
        _image_of_cells(),  # 25 x 25 x 25
    ]


def _mini_generator():
    # Few steps: statistics of batches must be learned faster than with the default momentum of 0.99.
    options = {"padding": "same", "kernel_initializer": "he_uniform"}
    return [
        keras.layers.Dense(7 * 7 * 7 * 8),
        keras.layers.Reshape((7, 7, 7, 8)),
        *_normalized(16, 3, momentum=0.9, **options),
        *_normalized(16, 3, momentum=0.9, **options),
        keras.layers.UpSampling3D(2),  # 14 x 14 x 14
        _convolution(8, 3, **options),
        _leaky(),
        _image_of_cells(),  # 13 x 13 x 13
    ]


def _paper_discriminator():
    layers = [_convolution(32, 5, padding="same"), _leaky(), keras.layers.Dropout(0.2)]
    for padding in (2, 2, 1):
        layers += [keras.layers.ZeroPadding3D(padding), *_normalized(8, 5), keras.layers.Dropout(0.2)]
    return [*layers, keras.layers.AveragePooling3D(2), keras.layers.Flatten()]


def _mini_discriminator():
    # Without BatchNormalization: real and generated showers come in batches of their own, which their statistics give
    # away, and the generator, which sees moving statistics, is taught little by that.
    layers = []
    for kernel, strides in ((5, 2), (3, 1), (3, 1)):
        layers += [_convolution(16, kernel, padding="same", strides=strides), _leaky(), keras.layers.Dropout(0.2)]
    return [*layers, keras.layers.Flatten()]
