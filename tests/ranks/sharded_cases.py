# SPDX-License-Identifier: Apache-2.0
"""What the checks of sharded optimizers share: a network, its training, and the comparison with a job without."""

import keras
import numpy as np
from keras_cases import assert_identical, job, values

import keras_hpc

X = np.random.default_rng(0).normal(size=(52, 6)).astype("float32")
Y = np.argmax(X[:, :3], axis=1).astype("int32")


class Job:
    """A job in which optimizers are sharded, or not."""

    def __init__(self, shard_optimizer, **options):
        keras_hpc.init(shard_optimizer=shard_optimizer, **options)

    def __enter__(self):
        return job()

    def __exit__(self, *_):
        keras_hpc.finalize()


def network(**options):
    """Returns a network whose second kernel ranks cut, on two and on three of them."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(37, activation="tanh"),
            keras.layers.Dense(11, activation="tanh", **options),
            keras.layers.Dense(3, name="output"),
        ]
    )


def compiled(optimizer, model=None):
    model = network() if model is None else model
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model, epochs=2, **options):
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)
    return model


def state_of(optimizer):
    """Returns this rank's part of what an optimizer keeps, without what is alike on all ranks."""
    return [np.array(variable) for variable in optimizer.variables if len(variable.shape)]


def assert_same_bits(train):
    """Trains whole and sharded. `train()` returns a model. Returns what `train` made in the second."""
    with Job(False):
        whole = train()
        expected, count = values(whole), len(whole.optimizer.variables)
    with Job(True):
        model = train()
        found = values(model)
        assert_identical(found)
        for variable, a, b in zip(model.variables, found, expected, strict=True):
            assert a.tobytes() == b.tobytes(), f"{variable.path} differs, in {(a != b).sum()} of {a.size}"
        assert len(model.optimizer.variables) == count
        keras_hpc.check_replicas(model)
    return model
