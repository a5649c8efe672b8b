# SPDX-License-Identifier: Apache-2.0
"""With `batch="global"`, 1 to 4 ranks compute what one rank computes: weights, history, `evaluate`, predictions."""

import keras
import numpy as np
import pytest
from keras_cases import BATCH, assert_like_one_rank, data, dense

import keras_hpc

RANKS = {"torch": (3,)}
SOAK = {"tensorflow": (3,), "jax": (3,)}
pytestmark = pytest.mark.usefixtures("global_batches")


def make():
    model = dense()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_arrays_with_a_tail_train_like_one_rank():
    """185 samples in batches of 24: 24 steps, every eighth of 17 samples."""
    x, y = data()

    def train(model, whole):
        options = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, validation_data=(x[:50], y[:50]), **options).history
        return history, model.evaluate(x, y, batch_size=31, verbose=0), np.sum(model.predict(x, verbose=0), axis=0)

    model = assert_like_one_rank(make, train)
    keras_hpc.check_replicas(model)


def test_shuffling_is_reproducible():
    x, y = data()

    def losses():
        keras.utils.set_random_seed(5)
        return make().fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]

    assert losses() == losses()


def test_batches_smaller_than_the_job():
    """In each step, one rank has the only sample."""
    x, y = data()

    def regularized():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4, kernel_regularizer="l2", kernel_initializer=keras.initializers.GlorotUniform(1))
        outputs = keras.layers.Dense(3, "softmax", kernel_initializer=keras.initializers.GlorotUniform(2))
        model = keras.Model(inputs, outputs(hidden(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def train(model, whole):
        return model.fit(x[:9], y[:9], batch_size=1, epochs=2, shuffle=False, verbose=0).history

    assert_like_one_rank(regularized, train)
