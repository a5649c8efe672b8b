# SPDX-License-Identifier: Apache-2.0
"""Memory: at most one more copy of the gradients, and none that grows with the number of steps."""

import keras
import numpy as np
import pytest
from keras_cases import enough_on

import keras_hpc
from keras_hpc.job import current

RANKS = {"jax": (2,)}
SOAK = {"jax": (2,)}
ORDER = -1  # before much memory has been taken and given back: what is lost could hide there
# Few steps, with large gradients.
UNITS, SAMPLES = 1024, 3_200


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


@enough_on()
def test_many_steps_take_no_more_memory_than_some():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(UNITS, activation="relu"), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    x, y = np.zeros((SAMPLES, 4), np.float32), np.zeros((SAMPLES, 2), np.float32)
    # In steps of 8 samples: 400 an epoch.
    model.fit(x[: SAMPLES * 2 // 5], y[: SAMPLES * 2 // 5], batch_size=4, verbose=0)
    before = resident_mib()
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    steps = current.job().teams[0].report()["steps"]
    assert steps >= SAMPLES // 8 * 2.4
    # Keeping one gradient of each step would be 23 MiB: 800 of 28.7 kB.
    assert resident_mib() - before < 12


def test_segments_hold_at_most_one_copy_of_the_gradients():
    team = current.job().teams[0]
    before = team.report()
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(4096), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    model.train_on_batch(np.zeros((2, 256), np.float32), np.zeros((2, 4), np.float32))
    after = team.report()
    assert after["plan_bytes"] - before["plan_bytes"] == pytest.approx(4 * model.count_params(), rel=0.01)
    assert after["segment_bytes"] - before["segment_bytes"] <= 4 * model.count_params() + 16_384
