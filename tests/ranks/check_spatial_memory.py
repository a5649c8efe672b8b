# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F811
"""Models in parts on JAX: what their programs take of memory while they are compiled, and what stays of trials."""

import functools

import jax
import keras
import numpy as np
import pytest
from jax import monitoring
from keras import layers
from spatial_cases import grid, ranks  # noqa: F401

import keras_hpc
from keras_hpc.backends import jax_compiling
from keras_hpc.keras_hooks import keras_private

RANKS = {"jax": (2,)}
SOAK = {"jax": (3, 4)}

compiled = []  # names of programs


@functools.cache
def watch():
    def note(event, _, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about.get("fun_name", ""))

    monitoring.register_event_duration_secs_listener(note)


def trained(loss):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((16, 8, 2))
    model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(inputs))
    model.compile(keras.optimizers.SGD(0.1), loss)
    rng = np.random.default_rng(0)
    watch()
    compiled.clear()
    model.train_on_batch(rng.normal(size=(2, 16, 8, 2)), rng.integers(0, 2, (2, 16, 8, 1)))
    return list(compiled)


def test_a_loss_of_keras_own_leaves_no_programs(grid):
    names = trained(keras.losses.BinaryCrossentropy(from_logits=True))
    assert any("train_step" in name for name in names)
    assert not any("log_sigmoid" in name or "multiply" in name for name in names), names


def test_a_loss_of_ones_own_is_asked_as_it_is(grid):
    def own(y_true, y_pred):
        return keras.ops.mean(keras.ops.tanh(y_pred - keras.ops.cast(y_true, y_pred.dtype)), axis=-1)

    assert any("tanh" in name for name in trained(own))


@pytest.fixture
def emitters(monkeypatch):
    """Whether this XLA has the option, of which the tests' own flags say nothing here."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    jax_compiling._has_emitters.cache_clear()
    found = jax_compiling._has_emitters()
    assert found or not (0, 6) <= jax.__version_info__ < (0, 11)
    yield found
    jax_compiling._has_emitters.cache_clear()


def test_steps_have_the_compiler_that_needs_least_where_memory_is_short(emitters):
    trainer = keras_private.module(keras_private.JAX_TRAINER)
    for keep_memory in (False, True):
        keras_hpc.init(batch="global", spatial=(ranks(), 1), keep_memory=keep_memory)
        made = trainer.jit
        names = trained("mse")
        keras_hpc.finalize()
        assert any("train_step" in name for name in names)
        assert trainer.jit is jax.jit
        if keep_memory or not emitters:
            assert made is jax.jit
        else:
            assert made.func is jax.jit
            assert made.keywords == {"compiler_options": {"xla_cpu_use_fusion_emitters": False}}


def test_what_the_user_or_xla_says_of_the_compiler_stands(emitters, monkeypatch):
    known = jax_compiling._has_emitters.__wrapped__
    monkeypatch.setattr(jax_compiling, "_EMITTERS", "xla_cpu_no_such_option")
    assert not known()
    monkeypatch.undo()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=true")
    assert not known()
