# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""What models in parts refuse: other samples on the ranks of a group, and what is no sum over positions."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import enough_on
from spatial_cases import compiled, direct, grid, pixels, ranks, residual, samples, strided

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2, 3, 4)}
SOAK = {"tensorflow": (3, 4), "jax": (3, 4)}
TIMEOUT = 900


@enough_on("torch", "tensorflow")
def test_different_samples_in_a_group_are_refused(grid):
    model = compiled(strided)
    x, y = samples(model, 4)
    with pytest.raises(ValueError, match="The ranks of a group compute the same samples"):
        model.train_on_batch(x + keras_hpc.rank(), y)
    with pytest.raises(ValueError, match="same data on all ranks"):
        model.evaluate(x + keras_hpc.rank(), y, verbose=0)
    with pytest.raises(ValueError, match="same data on all ranks"):
        model.predict(x + keras_hpc.rank(), verbose=0)
    with pytest.raises(ValueError, match="a part each of input"):
        model.train_on_batch(x[:, :7], y)
    in_a_loop = compiled(residual)
    x, _ = samples(in_a_loop, 2)
    direct(in_a_loop, x)
    with pytest.raises(ValueError, match="The ranks of a group compute the same samples"):
        in_a_loop(x + keras_hpc.rank(), training=False)


def test_losses_and_metrics_that_mix_positions_are_refused(grid):
    x = np.ones((2, 13, 9, 2), "float32")

    def mean_of_all(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2)

    with pytest.raises(ValueError, match=r"The loss `dice` of outputs in parts has a value for each position"):
        compiled(pixels, keras.losses.Dice()).fit(x, x, verbose=0)
    with pytest.raises(ValueError, match=r"The loss `mean_of_all` of outputs in parts has a value for each position"):
        compiled(pixels, mean_of_all).fit(x, x, verbose=0)
    with pytest.raises(ValueError, match=r"What the metric `mean_of_all` averages"):
        compiled(pixels, "mse", metrics=[mean_of_all]).fit(x, x, verbose=0)

    def differences(y_true, y_pred):
        error = y_true - y_pred
        return keras.ops.mean(keras.ops.abs(error - keras.ops.roll(error, 1, axis=1)), axis=-1)

    with pytest.raises(ValueError, match=r"The loss `differences` of outputs in parts mixes positions"):
        compiled(pixels, differences).fit(x, x, verbose=0)
    with pytest.raises(ValueError, match=r"The metric `differences` of outputs in parts mixes positions"):
        compiled(pixels, "mse", metrics=[differences]).fit(x, x, verbose=0)

    class Own(keras.metrics.Metric):
        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

        def result(self):
            return 0.0

    with pytest.raises(ValueError, match=r"A metric of your own.*`own` \(Own\)"):
        compiled(pixels, "mse", metrics=[Own(name="own")]).fit(x, x, verbose=0)


def test_refusals_come_from_compile(grid):
    class Own(layers.Layer):
        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((36, 12, 4)), layers.Conv2D(4, 3), Own(name="odd")])
    with pytest.raises(ValueError, match=r"`odd` \(Own\) cannot be computed in parts"):
        model.compile("sgd", "mse")
    first = keras.Sequential([keras.Input((16, 36, 12)), layers.Conv2D(16, 3, data_format="channels_first")])
    with pytest.raises(ValueError, match="has its channels first; expected data_format='channels_last'"):
        first.compile("sgd", "mse")
    keras_hpc.partition(model, parts=1)
    model.compile("sgd", "mse")  # each rank of a group computes all of it
    x = np.ones((4, 36, 12, 4), "float32")
    model.fit(x, np.ones((4, 34, 10, 4), "float32"), verbose=0)
    with pytest.raises(ValueError, match=r"begins with keras\.Input"):
        keras.Sequential([layers.Conv2D(3, 3)]).compile("sgd", "mse")
    inputs = keras.Input((36, 12, 4))
    y = layers.Conv2D(2, 3, padding="same")(inputs)
    with pytest.raises(ValueError, match="split alike, or all whole"):
        keras.Model(inputs, [y, layers.GlobalAveragePooling2D()(y)]).compile("sgd", "mse")
    with pytest.raises(ValueError, match="arranged by init"):
        keras_hpc.partition(model, parts=7)
    with pytest.raises(ValueError, match="without spatial"):
        keras_hpc.keep_local(model.layers[0])


def test_arguments_of_init():
    with pytest.raises(ValueError, match=f"Expected a number of ranks that {ranks() + 1} divides"):
        keras_hpc.init(spatial=ranks() + 1)
    with pytest.raises(ValueError, match="number of parts along each"):
        keras_hpc.init(spatial=(2, 0))
