# SPDX-License-Identifier: Apache-2.0
"""What the checks of schedules share: a linear model that NumPy trains, too, its data, and a job of two teams."""

import keras
import numpy as np
import pytest

import keras_hpc

BATCH, FEATURES = 12, 4
STEPS = 12  # an epoch
RATE, MOMENTUM = 0.05, 0.8
W = np.array([[0.1], [0.2], [-0.3], [0.4]], "float32")
SCHEDULED, SYNCHRONOUS = 0, 1  # teams


def data(samples):
    x = np.random.default_rng(3).normal(size=(samples, FEATURES)).astype("float32")
    return x, (x @ np.array([1.0, -2.0, 0.5, 3.0], "float32") + 0.7)[:, None].astype("float32")


@pytest.fixture
def two_teams():
    keras_hpc.init(teams=2, batch="global")
    yield
    keras_hpc.finalize()


def linear(team=SCHEDULED, optimizer=None, **compiled):
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.set_weights([W, np.zeros(1, "float32")])
    model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse", **compiled)
    keras_hpc.assign_team(model, team)
    return model


def fit_on(x, y, model, epochs=2, **kwargs):
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **kwargs)
