# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""Checkpoints of another model, optimizer or format: refused on all ranks, and left as they are."""

import json
import os
from pathlib import Path

import keras
import pytest
from checkpoint_cases import X, Y, _job, folder, trained
from keras_cases import enough_on, job

import keras_hpc

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}


def dense(*names, optimizer="adam"):
    """Returns a function that makes a model of layers of equal shapes."""

    def make():
        model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(6, name=name) for name in names)])
        model.compile(optimizer() if callable(optimizer) else optimizer, "sparse_categorical_crossentropy")
        return model

    return make


def rms(**options):
    return dense("a", optimizer=lambda: keras.optimizers.RMSprop(**options))


@enough_on()
def test_another_optimizer(folder):
    """Which keeps as many variables of the same shapes."""
    trained(f"{folder}/adam", dense("a"))
    with pytest.raises(ValueError, match="the optimizer is Adam in the checkpoint and Lamb here"):
        trained(f"{folder}/adam", dense("a", optimizer=keras.optimizers.Lamb))
    rate = dense("a", optimizer=lambda: keras.optimizers.Adam(0.1))
    assert trained(f"{folder}/adam", rate).epoch == [0], "another rate is a wish"
    trained(f"{folder}/rms", rms(momentum=0.5))
    with pytest.raises(ValueError, match=r"kernel_momentum` of .* in the checkpoint and .*kernel_average_gradient` of"):
        trained(f"{folder}/rms", rms(centered=True))


@enough_on()
def test_other_layers_of_equal_shapes(folder, caplog):
    trained(folder, dense("a", "b"))
    with pytest.raises(ValueError, match=r"in another order: `\S*a/kernel` .* is where `\S*b/kernel` .* is here"):
        trained(folder, dense("b", "a"))
    with caplog.at_level("INFO", "keras_hpc"):
        assert trained(folder, dense("a", "b")).epoch == [0]
        assert "other names" not in caplog.text
        assert trained(folder, dense("a", "c")).epoch == [0]
    assert ("b/kernel` of float32[6, 6] of the checkpoint is" in caplog.text) == (job().rank == 0)

    def norm(name):
        layers = [keras.Input((6,)), keras.layers.BatchNormalization(center=name == "gamma", scale=name == "beta")]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    trained(f"{folder}/norm", lambda: norm("beta"))
    with pytest.raises(ValueError, match=r"/gamma` .* in the checkpoint and .*/beta` "):
        trained(f"{folder}/norm", lambda: norm("gamma"))


@enough_on("torch")
def test_a_newer_format_is_left_alone(folder):
    trained(folder, every_steps=4)
    names = sorted(os.listdir(folder))
    path = Path(folder, names[-1], "manifest.json")
    if job().rank == 0:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    job().teams[0].barrier()
    with pytest.raises(ValueError, match=rf"{names[-1]} was written by a newer keras_hpc.*Received: format 3"):
        trained(folder)
    job().teams[0].barrier()
    assert sorted(os.listdir(folder)) == names
