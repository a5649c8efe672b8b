# SPDX-License-Identifier: Apache-2.0
"""Ragged and sparse batches of TensorFlow, of which a rank may have no rows in the last step."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, on_one_rank, values

RANKS = {"tensorflow": (2,)}
SAMPLES, BATCH = 9, 4  # the last step has one sample
pytestmark = pytest.mark.usefixtures("global_batches")


class Padded(keras.layers.Layer):
    def call(self, x):
        return x.to_tensor() if hasattr(x, "to_tensor") else x


def of_lengths():
    inputs = keras.Input((None,), dtype="int32", ragged=True)
    return keras.Sequential(
        [inputs, Padded(), keras.layers.Embedding(5, 3), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    )


def of_numbers():
    return keras.Sequential([keras.Input((4,), sparse=True), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])


@pytest.mark.parametrize("make", [of_lengths, of_numbers])
def test_a_rank_without_rows_takes_part(make):
    import tensorflow as tf

    def trained():
        keras.utils.set_random_seed(5)
        if make is of_lengths:
            x = tf.ragged.constant([[row % 4 + 1] * (1 + row // BATCH) for row in range(SAMPLES)], dtype="int32")
        else:
            x = tf.sparse.from_dense(np.eye(4, dtype="float32")[np.arange(SAMPLES) % 4])
        y = np.arange(SAMPLES, dtype="float32")[:, None]
        model = make()
        model.compile("sgd", "mse", metrics=["mae"])
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        history = model.fit(batches, epochs=2, verbose=0, shuffle=False).history
        scores = model.evaluate(batches, verbose=0)
        return [*values(model), history["loss"], history["mae"], scores, model.predict(batches, verbose=0)]

    alone = on_one_rank(trained)
    assert_close(trained(), alone, 1e-5)
