# SPDX-License-Identifier: Apache-2.0
"""Layers in float8 on several ranks: weights, scales and the largest values seen are those of one rank."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, enough, enough_on, on_one_rank
from regression import X, Y, compare

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,)}  # Keras has no float8 on PyTorch
SOAK = {"tensorflow": (3,), "jax": (3,)}
pytestmark = pytest.mark.usefixtures("global_batches")


OPTIMIZERS = {
    "plain": lambda: keras.optimizers.SGD(0.05),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0),
    "accumulating": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
}


@enough_on("tensorflow")
@pytest.mark.parametrize("optimizer", ["plain", *enough(["scaled", "accumulating"])])
def test_scales_are_those_of_one_rank(optimizer):
    def make():
        layers = keras.layers
        model = keras.Sequential(
            [  # without biases, whose gradients Keras rounds to bfloat16
                keras.Input((4,)),
                layers.Dense(6, "tanh", use_bias=False, dtype="float8_from_float32"),
                layers.Dense(1, use_bias=False, dtype="float8_from_float32"),
            ]
        )
        model.compile(OPTIMIZERS[optimizer](), "mse")
        return model

    # The last batches, of 16 and of 1, are of 8 and 8 samples, and of one sample and none.
    model = compare(make, X[:33], Y[:33], tolerance=1e-5)
    assert any("outputs_grad_amax_history" in weight.name for weight in model.trainable_weights)


@enough_on("jax")
def test_a_layer_that_is_each_ranks_own_leaves_the_gradients_of_others_alone():
    def last():
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(6, "tanh", dtype="float8_from_float32"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        keras_hpc.keep_local(layers[0])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(X[:16], Y[:16], batch_size=16, verbose=0)  # one step: all ranks begin it with the same weights
        return [np.array(weight) for weight in layers[1].get_weights()]

    assert_close(last(), on_one_rank(last), 1e-6)


@enough_on("tensorflow", "jax")
def test_a_layer_that_is_each_ranks_own_keeps_its_scales_without_samples():
    layer = keras.layers.Dense(6, "tanh", dtype="float8_from_float32")
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    keras_hpc.keep_local(layer)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    # The first steps, of one sample, are the first rank's alone; other ranks have none.
    model.fit(X[:2], Y[:2], batch_size=1, verbose=0)
    assert float(keras.ops.max(layer.inputs_scale.value)) > 0
