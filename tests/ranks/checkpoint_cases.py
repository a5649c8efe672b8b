# SPDX-License-Identifier: Apache-2.0
"""What the checks of checkpoints share: a network, and runs that stop and go on, beside those that do not."""

import os
import shutil
import tempfile

import keras
import numpy as np
import pytest
from keras_cases import data, job

import keras_hpc
from keras_hpc.keras_hooks.state import variables

BATCH, EPOCHS, STEPS = 12, 3, 8  # of 185 samples on 2 ranks
X, Y = data()


class StopError(Exception):
    """What ends a run here, on all ranks after the same step."""


class Stop(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_begin(self, batch, logs=None):
        if self.left == 0:
            raise StopError
        self.left -= 1


@pytest.fixture
def folder():
    """The same for all ranks, and gone when all have left it."""
    names = job().teams[0].allgather_object(tempfile.mkdtemp() if job().rank == 0 else "")
    yield names[0]
    job().teams[0].barrier()
    if job().rank == 0:
        shutil.rmtree(names[0])


def start(**options):
    """A new process, as far as that can be had in one."""
    keras_hpc.finalize()
    keras.utils.clear_session()
    keras_hpc.init(**options)


@pytest.fixture(autouse=True)
def _job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


def network(optimizer=None):
    """Everything that a step may change: weights, statistics, seeds, metrics."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=3),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def outcome(model, history):
    buffers = [buffer.value for buffer in variables.buffers(model)]
    values = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables, *buffers)]
    return values, history.history, history.epoch


def assert_same(ours, reference):
    for a, b in zip(ours[0], reference[0], strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a.astype("float64")).all(), "it has learned nothing"
    assert ours[1:] == reference[1:]


def resumed_equals_uninterrupted(
    folder, make, stops, arguments, every=5, callbacks=list, before=int, between=lambda _: None, init=None, **fit
):
    """Trains at once, and in pieces that end after so many steps; both must end alike. Returns the second model.

    Args:
        folder: for checkpoints.
        make: returns a compiled model.
        stops: the steps of each piece.
        arguments: returns data for `fit`.
        every: `every_steps`.
        callbacks: returns what else is called.
        before: called in each "process" before the model is made.
        between: called with the folder before training goes on.
        init: for `init`.
        fit: for `fit`.
    """
    results = []
    for pieces, name in (((None,), "whole"), ((*stops, None), "pieces")):
        for piece in pieces:
            start(**(init or {"teams": 1}))
            if name == "pieces" and os.path.exists(os.path.join(folder, name)):
                between(os.path.join(folder, name))
            before()
            model = make()
            given = [*callbacks(), keras_hpc.callbacks.Checkpoint(os.path.join(folder, name), every, keep=2)]
            given += [] if piece is None else [Stop(piece)]
            try:
                history = model.fit(*arguments(), epochs=EPOCHS, verbose=0, callbacks=given, **fit)
            except StopError:
                assert piece is not None
            else:
                assert piece is None, "it was not stopped"
        results.append(outcome(model, history))
    assert len(results[0][2]) == EPOCHS
    assert_same(results[1], results[0])
    return model


def only_on(*backends):
    return pytest.mark.skipif(keras.backend.backend() not in backends, reason="another backend finds nothing more")


def compiled(model):
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def trained(folder, make=network, callbacks=(), **options):
    """Trains one epoch with a checkpoint at its end."""
    start()
    given = [*callbacks, keras_hpc.callbacks.Checkpoint(folder, **options)]
    return make().fit(X, Y, BATCH, epochs=1, verbose=0, callbacks=given)
