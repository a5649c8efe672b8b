# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""Losses and metrics that mix positions, and outputs of several kinds: models in parts then give them whole."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_cases import enough, enough_on
from spatial_cases import assert_like_one_rank, grid, ranks

import keras_hpc

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2, 3, 4), "jax": (2, 3, 4), "torch": (3, 4)}
TIMEOUT = 900


def of_pixels():
    inputs = keras.Input((13, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="softmax")(x))


def of_scales():
    """A split output, one with other extents, and a whole one."""
    inputs = keras.Input((13, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    y = layers.Conv2D(3, 3, strides=2, padding="same")(x)
    outputs = [layers.Conv2D(3, 1, activation="softmax", name="a")(x), layers.Softmax(name="b")(y)]
    return keras.Model(inputs, [*outputs, layers.GlobalAveragePooling2D(name="c")(y)])


class Penalized(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@keras_hpc.spatial.whole
class PenalizedWhole(Penalized):
    pass


def with_penalties():
    """Losses that layers add where they have all positions: behind a pooling, and marked."""
    inputs = keras.Input((13, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
    x = PenalizedWhole()(
        x * Penalized()(layers.Dense(4, activity_regularizer="l2")(layers.GlobalAveragePooling2D(keepdims=True)(x)))
    )
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="softmax")(x))


def soft_dice(y_true, y_pred):
    space = (1, 2)
    both, sums = ops.sum(y_true * y_pred, axis=space), ops.sum(y_true + y_pred, axis=space)
    return 1 - ops.mean((2 * both + 1) / (sums + 1), axis=-1)


def with_entropy(y_true, y_pred):
    entropy = keras.losses.categorical_crossentropy(y_true, y_pred)
    return soft_dice(y_true, y_pred) + ops.mean(entropy, axis=(1, 2))


def differences(y_true, y_pred):
    """A value for each position, of which each depends on a neighbour."""
    error = y_true - y_pred
    return ops.mean(ops.abs(error - ops.roll(error, 1, axis=1)), axis=-1)


def weighed(y_true, y_pred):
    """Rows have weights, which are those of all rows."""
    weights = ops.convert_to_tensor(np.linspace(0, 1, 13, dtype="float32").reshape(-1, 1))
    return ops.mean(ops.square(y_true - y_pred), axis=-1) * weights


class Beside(keras.losses.Loss):
    """A value for each position, of which each depends on a neighbour along the last axis but one."""

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(ops.square(error - ops.roll(error, 1, axis=-2)), axis=-1)


def of_lines():
    inputs = keras.Input((13, 8, 2))
    x = layers.Reshape((13, 16))(layers.Conv2D(2, 3, padding="same")(inputs))
    return keras.Model(inputs, layers.Conv1D(3, 3, padding="same", activation="softmax")(x))


class Found(keras.metrics.Metric):
    """A metric of the user's own: which part of what is true was found."""

    def __init__(self, name="found"):
        super().__init__(name=name)
        self.both, self.true = (self.add_weight(initializer="zeros", name=one) for one in ("both", "true"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = ops.cast(y_true, y_pred.dtype)
        self.both.assign(self.both + ops.sum(y_true * y_pred))
        self.true.assign(self.true + ops.sum(y_true))

    def result(self):
        return self.both / self.true


def assert_trains(network, loss, metrics=None, weighs=False):
    """Trains, evaluates and predicts, before and after it, as one rank does."""

    def train():
        keras.utils.set_random_seed(3)
        model = network()
        model.compile(keras.optimizers.SGD(0.5), loss(), weighted_metrics=metrics and metrics())
        if keras_hpc.is_initialized() and keras_hpc.size() > 1:
            keras_hpc.partition(model, min_rows=1)
        random = np.random.default_rng(0)
        x = random.normal(size=(6, 13, 8, 2)).astype("float32")
        y = [np.eye(3, dtype="float32")[random.integers(0, 3, (6, *out.shape[1:-1]))] for out in model.outputs]
        y = y if len(y) > 1 else y[0]
        weight = random.random(6).astype("float32") if weighs else None
        # On JAX a program more would be compiled for the first one.
        outputs = [model.predict(x, verbose=0)] if keras.backend.backend() != "jax" else []
        history = model.fit(x, y, sample_weight=weight, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        scores = model.evaluate(x, y, sample_weight=weight, batch_size=4, verbose=0)
        return {"history": history, "scores": scores, "outputs": [*outputs, model.predict(x, verbose=0)]}, model

    assert_like_one_rank(train, of_weights=1e-5, of_results=1e-5)


LOSSES = {
    "own": lambda: with_entropy,
    "dice": lambda: keras.losses.Dice(axis=(1, 2, 3)),
    "tversky": lambda: keras.losses.Tversky(alpha=0.3, beta=0.7, axis=(1, 2, 3)),
    "differences": lambda: differences,
}


@pytest.mark.parametrize("loss", ["own", *enough(["dice", "tversky"], "torch"), *enough(["differences"])])
def test_losses_that_mix_positions(loss, grid):
    def metrics():
        # Of weights, and on JAX, Keras' own IoU gives warnings.
        iou = [] if weighs or keras.backend.backend() == "jax" else [keras.metrics.OneHotMeanIoU(3, name="iou")]
        return ["accuracy", soft_dice, *iou]

    weighs = loss == "tversky"
    assert_trains(of_pixels, LOSSES[loss], metrics, weighs)


@enough_on("torch")
def test_metrics_that_mix_positions(grid):
    assert_trains(of_pixels, lambda: "categorical_crossentropy", lambda: [Found(), "mae"])


@enough_on("torch")
def test_a_loss_that_needs_all_positions_though_it_has_a_value_for_each(grid):
    assert_trains(of_pixels, lambda: weighed)


@enough_on("torch")
def test_one_loss_of_outputs_that_are_split_elsewhere(grid):
    loss = Beside()
    assert_trains(of_pixels, lambda: loss)
    assert_trains(of_lines, lambda: loss)


@enough_on("torch")
def test_samples_by_names_that_are_sorted_otherwise(grid):
    """Of one tensor all rows are as many as a part of another has."""

    def train():
        keras.utils.set_random_seed(3)
        large, small = keras.Input((12, 8, 2), name="z"), keras.Input((6, 8, 2), name="a")
        x = layers.Conv2D(3, 3, padding="same", activation="tanh")(layers.UpSampling2D((2, 1))(small) + large)
        half = layers.Conv2D(3, 3, strides=(2, 1), padding="same", name="half")(x)
        model = keras.Model([large, small], [layers.Conv2D(3, 1, name="last")(x), half])
        model.compile(keras.optimizers.SGD(0.1), {"last": "mse", "half": "mae"}, metrics={"half": ["mse"]})
        random = np.random.default_rng(0)
        samples = {one.name: random.normal(size=(6, *one.shape[1:])).astype("float32") for one in model.inputs}
        targets = {name: np.ones((6, rows, 8, 3), "float32") for name, rows in (("last", 12), ("half", 6))}
        return model.fit(samples, targets, batch_size=4, epochs=2, shuffle=False, verbose=0).history, model

    assert_like_one_rank(train, of_weights=1e-5, of_results=1e-5)


@enough_on("torch")
@pytest.mark.parametrize("mixes", [False, True])
def test_outputs_of_several_extents(mixes, grid):
    assert_trains(of_scales, lambda: [with_entropy if mixes else "mse", "mae", "mse"], lambda: [["mae"], ["mse"], []])


@enough_on("torch")
def test_a_ratio_of_sums_over_a_batch(grid):
    """A group that computes all samples computes what one rank does; several groups cannot."""
    if keras_hpc.group_count() == 1:
        assert_trains(of_pixels, keras.losses.Dice, lambda: [keras.losses.Dice(reduction=None)])
        return
    with pytest.raises(ValueError, match=r"keras\.losses\.Dice\(axis=\(1, 2, 3\)\)"):
        assert_trains(of_pixels, keras.losses.Dice)


@enough_on("torch")
def test_losses_that_layers_add_of_all_positions(grid):
    assert_trains(with_penalties, lambda: "categorical_crossentropy")


@enough_on("torch")
def test_targets_are_whole_where_outputs_are(grid):
    model = of_pixels()
    model.compile("sgd", soft_dice)
    x, y = np.ones((2, 13, 8, 2), "float32"), np.ones((2, 13, 8, 3), "float32")
    begin, end = keras_hpc.part(13)
    model.train_on_batch(x[:, begin:end] if grid[-1] == 1 else x, y)
    model.compile("sgd", soft_dice)
    with pytest.raises(ValueError, match=r"Expected targets and sample weights of whole samples, \(13, 8, 3\)"):
        model.train_on_batch(x, y[:, begin:end])
