# SPDX-License-Identifier: Apache-2.0
"""A regression on a few samples: trained by all ranks together, and alone on all data."""

import keras
import numpy as np
from keras import ops
from keras_cases import assert_close, assert_identical, on_one_rank, values

SAMPLES, BATCH = 60, 16  # the last step has 12
X = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def dense(*layers):
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), *layers, keras.layers.Dense(1)]
    )


def rmse(y, p):
    """A number of a whole batch that is neither a mean nor a sum over samples."""
    return ops.sqrt(ops.mean(ops.square(y - p)))


def masked_by_hand(y, p):
    """Another one: a loss divided by its own mask."""
    known, y = (ops.cast(given, p.dtype) for given in (y != 0, y))
    return ops.sum(known * ops.square(y - p)) / ops.maximum(ops.sum(known), 1)


def compare(make, x=X, y=Y, tolerance=3e-6, **options):
    """Trains together and alone, on all data, and compares weights and history. `options`: of `fit`."""

    def trained():
        keras.utils.set_random_seed(5)
        model = make()
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **options).history
        return values(model), history, model

    alone, alone_history = on_one_rank(lambda: trained()[:2])
    weights, history, model = trained()
    assert_identical(weights)
    assert_close(weights, alone, tolerance)
    assert history.keys() == alone_history.keys()
    for name, numbers in alone_history.items():
        np.testing.assert_allclose(history[name], numbers, rtol=1e-5, err_msg=name)
    return model
