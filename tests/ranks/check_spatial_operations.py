# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""Operations on tensors, and layers that are no windows, in parts: gradients and outputs are those of one rank."""

import math

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_cases import assert_identical, enough, enough_on, on_one_rank, values
from spatial_cases import assert_like_one_rank, direct, grid, ranks

import keras_hpc

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2, 3, 4), "jax": (2, 3, 4), "torch": (3, 4)}
TIMEOUT = 900


def excited(x, reduce):
    """Squeeze and excitation."""
    return x * layers.Dense(6, activation="sigmoid")(reduce(x))


def shuffled(x):
    """Pixels of channels and back: rows are merged and divided."""
    rows, columns = x.shape[1:3]
    y = ops.reshape(layers.Conv2D(12, 1)(x), (-1, rows, columns, 2, 2, 3))
    y = ops.reshape(ops.transpose(y, (0, 1, 3, 2, 4, 5)), (-1, 2 * rows, 2 * columns, 3))
    return layers.Conv2D(3, 2, strides=2)(y)


def focused(x):
    """Every second row and column."""
    y = ops.concatenate([x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]], axis=-1)
    return layers.UpSampling2D(2)(layers.Conv2D(6, 3, padding="same")(y))


def axial(x):
    """Rows become samples, of as many columns as there were rows."""
    rows = ops.reshape(x[:, : x.shape[2]], (-1, *x.shape[2:]))
    rows = layers.Conv1D(6, 3, padding="same")(rows - ops.mean(rows, axis=1, keepdims=True))
    return ops.reshape(rows, (-1, x.shape[2], *x.shape[2:]))


def swish(x):
    return x * ops.sigmoid(x)


@keras_hpc.spatial.whole
class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=(1, 2), keepdims=True)


@keras_hpc.spatial.pointwise
class Gated(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(shape[-1])
        self.dense.build(shape)

    def call(self, x, training=None):
        return x * ops.sigmoid(self.dense(x))


OPERATIONS = {
    "slices": lambda x: x[..., :3] * x[..., 3:] + x[:, :, :, 1:2],
    "a channel": lambda x: ops.expand_dims(x[..., 0] + ops.relu(x[..., -1]), -1),
    "cropped": lambda x: ops.pad(x[:, 1:-2, 2:], ((0, 0), (2, 1), (1, 1), (0, 0)), constant_values=0.5),
    "reflected": lambda x: ops.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0)), mode="reflect"),
    "focused": focused,
    "split": lambda x: ops.concatenate([ops.tanh(y) for y in ops.split(x, 3, axis=-1)][::-1], axis=-1),
    "stacked": lambda x: ops.max(ops.stack([x, 2 * x, ops.tanh(x)], axis=-1), axis=-1),
    "unstacked": lambda x: ops.stack(ops.unstack(x, axis=-1)[::-1], axis=-1),
    "groups": lambda x: ops.mean(ops.reshape(x, (-1, *x.shape[1:3], 2, 3)), axis=-2),
    "layer of groups": lambda x: layers.Reshape((*x.shape[1:3], 6))(layers.Reshape((*x.shape[1:3], 2, 3))(x)),
    "shuffled": shuffled,
    "axial": axial,
    "transposed": lambda x: ops.transpose(layers.Permute((2, 1, 3))(ops.tanh(x)), (0, 2, 1, 3)),
    "moved": lambda x: ops.moveaxis(ops.swapaxes(x, 2, -1), 2, 3),
    "flipped": lambda x: x + ops.flip(x, axis=1) + ops.roll(x, 2, axis=2),
    "joined": lambda x: layers.Concatenate(axis=1)([x, layers.Conv2D(6, 1)(x)]),
    "softmax of rows": lambda x: x * layers.Softmax(axis=1)(x) + ops.softmax(x, axis=-1),
    "mean": lambda x: excited(x, lambda y: ops.mean(y, axis=(1, 2), keepdims=True)),
    "sum": lambda x: x * 0.01 * ops.sum(x, axis=[1, 2], keepdims=True),
    "extremes": lambda x: x * ops.max(x, axis=(1, 2), keepdims=True) - ops.min(x, axis=(1, 2, 3), keepdims=True),
    "normalized": lambda x: (x - ops.mean(x, (1, 2), True)) / (ops.std(x, (1, 2), True) + ops.var(x, (1, 2), True)),
    "of an axis": lambda x: x * ops.mean(x, axis=1, keepdims=True) + ops.sum(x, axis=2, keepdims=True),
    "moments": lambda x: (
        x * ops.moments(x, axes=(1, 2), keepdims=True)[1] + ops.expand_dims(ops.moments(x, axes=[1, 2])[0], (1, 2))
    ),
    "of channels": lambda x: layers.Multiply()([x, ops.max(x, axis=-1, keepdims=True), ops.mean(x, -1, True)]),
    "lambda": lambda x: layers.Lambda(lambda y: y * ops.sigmoid(y))(x),
    "activation": lambda x: layers.Conv2D(3, 3, padding="same", activation=swish)(x),
    "own": lambda x: Gated()(Centred()(x)),
    "spectral": lambda x: layers.SpectralNormalization(layers.Conv2D(3, 3, strides=2, padding="same"))(
        layers.SpectralNormalization(layers.Dense(4))(x)
    ),
    "constant": lambda x: x * np.linspace(0, 1, x.shape[1]).reshape(-1, 1, 1).astype("float32"),
    "clipped": lambda x: ops.clip(x, -1, np.linspace(0, 1, x.shape[1]).reshape(-1, 1, 1).astype("float32")),
    "constant of the last axis": lambda x: (
        x * ops.expand_dims(ops.mean(x, axis=(2, 3)) * np.linspace(0, 1, x.shape[1], dtype="float32"), (2, 3))
    ),
    "over rows": lambda x: layers.TimeDistributed(layers.Conv1D(3, 3, padding="same"))(x),
    "recurrent": lambda x: layers.TimeDistributed(layers.SimpleRNN(3, return_sequences=True))(x),
    "attention": lambda x: layers.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x),
    "cubic": lambda x: layers.UpSampling2D(2, interpolation="bicubic")(x),
    "dropped": lambda x: layers.Dropout(0.5, noise_shape=(None, 1, 1, 6))(layers.SpatialDropout2D(0.5)(x)),
    "PReLU": lambda x: layers.PReLU(alpha_initializer="ones")(x - 1),
}


def model_of(operations):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((14, 8, 2))
    x = layers.Conv2D(6, 3, padding="same", activation="tanh")(inputs)
    outputs = [layers.Conv2D(2, (3, 1), padding="same")(OPERATIONS[name](x)) for name in operations]
    pooled = [layers.GlobalAveragePooling2D()(ops.tanh(y)) for y in outputs]
    model = keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(pooled) if len(pooled) > 1 else pooled[0]))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    return model


def check(operations):
    def step(samples):
        model = model_of(operations)
        before = values(model)
        x = np.random.default_rng(0).normal(size=(4, 14, 8, 2)).astype("float32")
        y = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")
        rows = slice(0, 4) if samples == 4 else slice(keras_hpc.group() * samples, (keras_hpc.group() + 1) * samples)
        loss = model.train_on_batch(x[rows], y[rows])
        return float(loss), [b - a for a, b in zip(before, values(model), strict=True)], direct(model, x), model

    loss, expected, outputs, _ = on_one_rank(lambda: (*step(4)[:3], None))
    mine, found, of_parts, model = step(4 // keras_hpc.group_count())
    assert keras_hpc.allreduce(mine) == pytest.approx(loss, rel=1e-5)
    scale = max(np.abs(g).max() for g in expected)
    assert scale > 1e-2
    names = [w.path for w in model.weights]
    for name, a, b in zip(names, found, expected, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * scale, (name, np.abs(a - b).max(), scale)
    np.testing.assert_allclose(of_parts, outputs, rtol=1e-5, atol=1e-5 * np.abs(outputs).max())
    assert_identical(values(model))


@enough_on("torch", "tensorflow")
def test_numbers_that_are_drawn_for_all_parts(grid):
    """A channel is dropped in all parts or in none, as one rank drops it."""
    if keras_hpc.group_count() > 1:
        pytest.skip("each group draws numbers of its own")
    check(["dropped"])


def test_operations_at_once(grid):
    if keras.backend.backend() == "torch":
        check([name for name in OPERATIONS if name != "dropped"])
    else:  # most of the time is compiling
        check(["a channel", "normalized"])


@enough_on()
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "dropped"])
def test_an_operation(operation, grid):
    check([operation])


def recomputed(grows):
    """Windows with and without padding, normalization over space, and operations, all of which are computed twice."""
    inputs = keras.Input((14, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="tanh", name="same")(inputs)
    if grows:  # also a layer that another one calls, and one that keeps something, as often as it is computed
        wrapped = layers.SpectralNormalization(layers.Conv2D(4, 3, padding="same", strides=2), name="spectral")
        x = layers.UpSampling2D(2)(wrapped(layers.BatchNormalization(name="norm")(x)))
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu", name="transposed")(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same", name="pooled")(x)
    x = layers.AveragePooling2D(3, strides=1, padding="same", name="averaged")(x)
    x = layers.LayerNormalization(axis=(1, 2, 3), name="of_space")(layers.GroupNormalization(2, name="groups")(x))
    x = layers.ZeroPadding2D(1, name="padded")(x)
    x = layers.Reshape((*x.shape[1:3], 4), name="merged")(layers.Reshape((*x.shape[1:3], 2, 2), name="apart")(x))
    x = layers.Conv2D(2, 3, strides=2, name="valid")(x * ops.mean(x, axis=(1, 2), keepdims=True))
    return keras.Model(inputs, x)


@pytest.mark.skipif(not hasattr(keras, "RematScope"), reason="an older Keras")
@pytest.mark.parametrize("mode", ["full", *enough(["list_of_layers", "activations"])])
def test_layers_that_are_computed_again_backward(grid, mode):
    """On TensorFlow and JAX Keras itself cannot compute all layers again."""
    on_torch = keras.backend.backend() == "torch"
    names = ["same", "transposed", "pooled", "averaged", "groups", "of_space", "apart", "merged", "valid"]
    if mode == "full" and not on_torch:
        mode = "list_of_layers"
    x = np.random.default_rng(0).normal(size=(4, 14, 8, 2)).astype("float32")

    def train():
        keras.utils.set_random_seed(3)
        with keras.RematScope(mode, layer_names=names):
            model = recomputed(on_torch and keras_hpc.size() == math.prod(grid))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        y = np.random.default_rng(1).normal(size=(4, *model.output_shape[1:])).astype("float32")
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return (history["loss"], model.evaluate(x, y, batch_size=4, verbose=0)), model

    assert_like_one_rank(train, 1e-5, 1e-5)
