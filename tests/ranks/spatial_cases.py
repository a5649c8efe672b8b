# SPDX-License-Identifier: Apache-2.0
"""What the checks of models in parts share: groups of ranks, and networks with their data."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import assert_identical, enough, on_one_rank, values

import keras_hpc
from keras_hpc.spatial.geometry import Grid
from keras_hpc.spatial.partition import plan_of

# Of so many ranks; of 4, one group or two.
GRIDS = {2: [(2, 1)], 3: [(3, 1)], 4: [(2, 2), *enough([(2, 1), (4, 1)])]}


def ranks():
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


@pytest.fixture(params=GRIDS.get(ranks(), []), ids=str)
def grid(request):
    keras_hpc.init(batch="global", spatial=request.param, check_replicas_every=2)
    yield request.param
    keras_hpc.finalize()


def norm():
    return layers.BatchNormalization(momentum=0.9, synchronized=True)


def strided():
    """Strided and dilated convolutions, even kernels, both poolings, padding of both kinds; a class for each image."""
    return keras.Sequential([
        keras.Input((45, 17, 3)),
        layers.Conv2D(6, 5, strides=2, padding="same"), norm(), layers.ReLU(),
        layers.Conv2D(6, (4, 3), padding="same"), layers.MaxPooling2D(3, strides=2, padding="same"),
        layers.Conv2D(8, 3, dilation_rate=2, padding="same"), layers.LeakyReLU(),
        layers.AveragePooling2D(2, strides=1, padding="same"), layers.DepthwiseConv2D(3, padding="same"),
        layers.ZeroPadding2D(((2, 1), (0, 1))), layers.Conv2D(8, (2, 3)), layers.Cropping2D(((1, 0), (0, 0))),
        layers.AveragePooling2D(2), layers.Flatten(), layers.Dense(10, activation="relu"), layers.Dense(4),
    ])  # fmt: skip


def residual():
    """Squeeze and excitation, and global poolings."""
    inputs = keras.Input((30, 10, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="tanh", kernel_regularizer="l2")(inputs)
    short = layers.Conv2D(8, 1, strides=2, padding="same")(x)
    x = layers.Conv2D(8, 3, strides=2, padding="same")(x)
    x = layers.LeakyReLU()(x + short)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    x = layers.Multiply()([x, layers.Dense(8, activation="sigmoid")(gate)])
    x = layers.Concatenate()([layers.GlobalAveragePooling2D()(x), layers.GlobalMaxPooling2D()(x)])
    return keras.Model(inputs, layers.Dense(4)(x))


def unet():
    """Skips, transposed convolutions and both ways of upsampling; a class for each pixel."""
    inputs = keras.Input((43, 24, 2))
    skips, x = [], layers.ZeroPadding2D(((2, 3), (0, 0)))(inputs)
    for filters in (6, 8):
        x = layers.ReLU()(norm()(layers.Conv2D(filters, 3, padding="same")(x)))
        skips.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, padding="same")(x)
    x = layers.Concatenate()([x, skips.pop()])
    x = layers.Conv2D(6, 3, padding="same", activation="relu")(x)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = layers.Concatenate()([x, skips.pop()])
    x = layers.Cropping2D(((2, 3), (0, 0)))(layers.Conv2D(6, (5, 3), padding="same", activation="relu")(x))
    return keras.Model(inputs, layers.Conv2D(3, 1)(x))


def volumes():
    """Models inside of a model, over volumes, whole at first."""
    generator = keras.Sequential([
        keras.Input((13,)), layers.Dense(4 * 4 * 4 * 3), layers.Reshape((4, 4, 4, 3)),
        layers.UpSampling3D((2, 2, 3)), layers.ZeroPadding3D((2, 2, 0)), layers.Conv3D(4, (6, 5, 4)), norm(),
        layers.Conv3DTranspose(3, 4, strides=2, padding="same"), layers.Conv3D(1, 2, activation="tanh"),
    ])  # fmt: skip
    discriminator = keras.Sequential([
        keras.Input(generator.output_shape[1:]), layers.Conv3D(4, 5, strides=2, padding="same"), layers.LeakyReLU(),
        norm(), layers.Conv3D(4, 3, padding="same"), layers.AveragePooling3D(2), layers.Flatten(), layers.Dense(4),
    ])  # fmt: skip
    inputs = keras.Input((13,))
    return keras.Model(inputs, discriminator(generator(inputs)))


def lines():
    """One axis, causal."""
    return keras.Sequential([
        keras.Input((50, 3)),
        layers.Conv1D(6, 4, padding="causal", dilation_rate=2, activation="tanh"),
        layers.Conv1D(6, 3, strides=2, padding="same"), norm(), layers.AveragePooling1D(3, 2, padding="same"),
        layers.Conv1DTranspose(4, 3, strides=2, padding="same"), layers.GlobalAveragePooling1D(), layers.Dense(4),
    ])  # fmt: skip


def normalized():
    """Normalization of each sample, over groups of channels and over all of it, and a resizing."""
    # Resizing asks for TensorFlow, which is not there in the jobs of other backends.
    larger = layers.Resizing(22, 8) if keras.backend.backend() == "tensorflow" else layers.UpSampling2D(2)
    return keras.Sequential([
        keras.Input((22, 7, 3)),
        layers.Conv2D(8, 3, padding="same", activation="relu"), layers.GroupNormalization(4),
        layers.Conv2D(6, 3, strides=2, padding="same"), layers.LayerNormalization(axis=[1, 2, -1]), layers.ReLU(),
        larger, layers.Conv2D(4, 3),
    ])  # fmt: skip


def transfer():
    """A model that is trained already, frozen and called as in inference, below layers that are trained."""
    base = keras.Sequential([  # for images of any extents, as networks of keras.applications are
        keras.Input((None, None, 2)), layers.Conv2D(6, 3, padding="same"), norm(), layers.ReLU(),
        layers.MaxPooling2D(2), layers.Conv2D(4, 3, padding="same"), norm(),
    ])  # fmt: skip
    for weight in base.weights:
        weight.assign(keras.ops.abs(weight) + 0.1)
    base.trainable = False
    inputs = keras.Input((26, 9, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(base(inputs, training=False))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def pixels():
    inputs = keras.Input((13, 9, 2))
    return keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(inputs))


NETWORKS = [strided, residual, unet, volumes, lines, normalized, transfer]


def compiled(network, loss=None, optimizer=None, **options):
    keras.utils.set_random_seed(3)
    model = network()
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options.setdefault("metrics", ["accuracy"])
    model.compile(optimizer or keras.optimizers.SGD(1.0), loss, **options)
    if keras_hpc.is_initialized():
        with_parts = keras_hpc.partition(model, min_rows=1)
        assert with_parts.is_split or network is lines  # of fewer axes than a job may split
    return model


def samples(network, count):
    rng = np.random.default_rng(0)
    inputs, outputs = (t[0].shape for t in (network.inputs, network.outputs))
    x = rng.normal(size=(count, *inputs[1:])).astype("float32")
    return x, rng.integers(0, outputs[-1], (count, *outputs[1:-1])).astype("int32")


def bordered():
    """Convolutions that read rows of one side only, or of both; of one only the kernel has a gradient, or its input."""
    inputs = keras.Input((24, 6, 2))
    x = layers.Conv2D(4, 2, padding="same", activation="tanh")(inputs)
    x = layers.Conv2D(4, (4, 2), padding="same", trainable=False)(x)
    x = layers.Conv2D(4, 5, strides=2, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(x))
    steps = [step.kind for _, step in plan_of(model, Grid((ranks(),)), 1).nodes()]
    assert steps == ["window" if keras.backend.backend() == "torch" else "borders"] * 4
    return model


def even():
    """Even kernels alone, so the first rank sends nothing, and a model of two images inside of the model."""
    one, two = keras.Input((12, 7, 2)), keras.Input((12, 7, 2))
    inner = keras.Model([one, two], [layers.Conv2D(3, 2, padding="same")(one), layers.Conv2D(3, 1)(two)])
    inputs = keras.Input((12, 7, 2))
    x = layers.Add()(inner([layers.Conv2D(2, (2, 3), padding="same", activation="tanh")(inputs), inputs]))
    x = layers.Conv2D(3, 2, padding="same", trainable=False)(x)
    return keras.Model(inputs, layers.Conv2D(2, 2, padding="same")(x))


def masked_at_once():
    """A mask that is an input of a normalization, as no layer before it has destroyed it."""
    inputs = keras.Input((21, 3))
    x = layers.Add()([norm()(layers.Masking()(inputs)), layers.Conv1D(3, 3, padding="same")(inputs)])
    return keras.Model(inputs, layers.Dense(2)(x))


def masked(pooled=False):
    """Masks of the inputs, of which some parts of some samples have nothing."""
    inputs = keras.Input((21, 3))
    x = layers.Add()([layers.Masking()(inputs), layers.Conv1D(3, 3, padding="same")(inputs)])
    x = norm()(x)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x) if pooled else x))


def masked_average():
    return masked(pooled=True)


class Centred(keras.Model):
    """Subtracts a mean over all positions, behind its graph."""

    def call(self, inputs, training=None):
        y = super().call(inputs, training=training)
        return y - keras.ops.mean(y, axis=(1, 2), keepdims=True)


def centred():
    inputs = keras.Input((13, 7, 2))
    return Centred(inputs, layers.Conv2D(2, 3, padding="same")(inputs))


def ties():
    """The same maximum at all positions of a channel, and as many rows in a part of the output as in the input."""
    inputs = keras.Input((11, 8, 3))
    x = layers.ZeroPadding2D(((1, 1), (1, 1)))(layers.UpSampling2D(2)(layers.Conv2D(4, 3, padding="same")(inputs)))
    gate = layers.GlobalMaxPooling2D(keepdims=True)(x * 0.0 + layers.GlobalMaxPooling2D(keepdims=True)(x))
    return keras.Model(inputs, layers.Dense(3)(x * layers.Dense(4)(gate)))


def integers():
    """Images of few bits: a minimum in the place of infinity around them, and rows that travel."""
    inputs = keras.Input((13, 8, 2))
    x = layers.ZeroPadding2D(((3, 0), (1, 1)))(keras.ops.cast(inputs * 9 - 20, "int8"))
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    return keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(0.1 * keras.ops.cast(x, "float32")))


def direct(model, x):
    return keras.ops.convert_to_numpy(model(x, training=False))


def assert_like_one_rank(train, of_weights, of_results):
    """Compares what `train()` returns, results and a model, with the same on one rank. Returns that and this model."""

    def alone():
        results, model = train()
        return results, values(model)

    expected, weights = on_one_rank(alone)
    found, model = train()
    assert_identical(values(model))
    for a, b in zip(values(model), weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=of_weights)
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=of_results), found, expected)
    return expected, model
