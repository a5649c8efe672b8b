# SPDX-License-Identifier: Apache-2.0
"""Memory: at most one extra copy of the gradients, and none that grows with the number of steps."""

import keras
import numpy as np
import pytest

import keras_hpc

RANKS = {"jax": (2,)}
ALONE = True


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def test_ten_thousand_steps_take_no_more_memory_than_some():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    x, y = np.zeros((40_000, 4), np.float32), np.zeros((40_000, 2), np.float32)
    # 40,000 samples in steps of 8: 5,000 steps an epoch.
    model.fit(x[:16_000], y[:16_000], batch_size=4, verbose=0)
    before = resident_mib()
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    steps = keras_hpc.runtime.job().teams[0].report()["steps"]
    assert steps >= 12_000
    # Keeping one gradient (1.8 kB) of each step would be 18 MiB.
    assert resident_mib() - before < 12


def test_segments_hold_at_most_one_copy_of_the_gradients():
    team = keras_hpc.runtime.job().teams[0]
    before = team.report()
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(4096), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    model.train_on_batch(np.zeros((2, 256), np.float32), np.zeros((2, 4), np.float32))
    after = team.report()
    assert after["plan_bytes"] - before["plan_bytes"] == pytest.approx(4 * model.count_params(), rel=0.01)
    assert after["segment_bytes"] - before["segment_bytes"] <= 4 * model.count_params() + 16_384
