# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""A training with local steps that stops in the middle of a period goes on bit for bit."""

import os

import keras
import numpy as np
import pytest
from checkpoint_cases import BATCH, X, Y, _job, assert_same, folder, network, resumed_equals_uninterrupted, start
from keras_cases import assert_identical, enough_on, everyone, job

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2, 3), "jax": (2, 3), "torch": (3,)}


def sgd():
    return network(keras.optimizers.SGD(0.05, momentum=0.9))


@pytest.mark.parametrize(
    ("arguments", "stop"),
    [
        ({"every": 4, "outer": "nesterov", "cooldown_steps": 5}, 11),
        pytest.param({"every": 4, "overlap_steps": 3, "outer": "nesterov"}, 11, marks=enough_on("jax", "torch")),
        pytest.param({"every": "epoch"}, 7, marks=enough_on("torch")),
    ],
    ids=str,
)
def test_in_the_middle_of_a_period(folder, arguments, stop):
    def before():
        keras_hpc.configure_team(0, schedule="local", **arguments)

    model = resumed_equals_uninterrupted(folder, sgd, (stop,), lambda: (X, Y), before=before, batch_size=BATCH)
    assert_identical(model.get_weights())


@enough_on("torch")
def test_a_loop_of_ones_own(folder):
    results = []
    for pieces in ((9,), (5, 4)):
        path = os.path.join(folder, f"{len(pieces)}")
        for steps in pieces:
            start()
            keras_hpc.configure_team(0, schedule="local", every=3, overlap_steps=1)
            model = sgd()
            checkpoint = keras_hpc.callbacks.Checkpoint(path)
            first = checkpoint.restore(model) or 0
            for step in range(first, first + steps):
                rows = slice(20 * step + 10 * job().rank, 20 * step + 10 * job().rank + 10)
                model.train_on_batch(X[rows], Y[rows])
            checkpoint.save(model, step=first + steps, state=first + steps)
            checkpoint.wait()
        weights = everyone(np.array(model.get_weights()[0]))
        assert job().size == 1 or (weights[0] != weights[1]).any(), "the period is over"
        results.append([np.array(v) for v in (*model.trainable_variables, *model.optimizer.variables)])
    for whole, pieces in zip(*results, strict=True):
        np.testing.assert_array_equal(whole, pieces)


@enough_on("torch")
def test_a_checkpoint_of_local_steps_needs_them(folder):
    keras_hpc.configure_team(0, schedule="local", every=4)
    given = keras_hpc.callbacks.Checkpoint(folder)
    sgd().fit(X, Y, BATCH, epochs=1, verbose=0, callbacks=[given])
    start()
    with pytest.raises(ValueError, match="Received: another schedule"):
        sgd().fit(X, Y, BATCH, epochs=2, verbose=0, callbacks=[keras_hpc.callbacks.Checkpoint(folder)])
