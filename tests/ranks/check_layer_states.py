# SPDX-License-Identifier: Apache-2.0
"""What layers of one's own keep, as counters and means, moves in each step as on one rank."""

import keras
import numpy as np
import pytest
import regression
from keras_cases import enough, enough_on, on_one_rank
from random_steps import OwnLoss
from regression import X, Y

import keras_hpc

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2, 3), "jax": (2, 3), "torch": (3,)}
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


class Keeping(keras.layers.Layer):
    """Keeps states of many kinds, and computes with them."""

    def build(self, shape):
        def state(name, dtype="float32", value=0, shape=(), **options):
            value = float("inf") if name == "least" else value
            kind = keras.initializers.Constant(value) if dtype != "bool" else "zeros"
            kept = self.add_weight(shape=shape, initializer=kind, trainable=False, dtype=dtype, name=name, **options)
            setattr(self, name, kept)

        state("calls")
        state("temperature", value=1)
        state("mean")
        state("least")
        state("began", "bool")
        state("ticks", "int32", 7)
        state("seen", "int32", aggregation="sum")
        state("features", shape=shape[-1:], aggregation="mean")
        state("total", shape=shape[-1:], aggregation="sum")

    def call(self, x, training=False):
        scaled = x * self.temperature + self.mean + self.features
        if training:
            self.calls.assign_add(1)
            self.ticks.assign(self.ticks - 2)
            self.began.assign(ops.ones((), "bool"))
            self.temperature.assign(self.temperature * 0.9)
            self.least.assign(ops.minimum(self.least, 1 + 0 * ops.sum(x)))
            self.mean.assign(0.8 * self.mean + 0.2 * ops.mean(x))
            self.features.assign(0.5 * self.features + 0.5 * ops.mean(x, axis=0))
            self.seen.assign(self.seen + ops.shape(x)[0])
            self.total.assign(self.total + ops.sum(x, axis=0))
        return scaled


def trained(samples, batch, **options):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,)), Keeping(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", **options)
    history = model.fit(X[:samples], Y[:samples], batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    keeping = model.layers[0]
    named = {variable.name: np.array(variable).tolist() for variable in keeping.non_trainable_variables}
    return named, history["loss"], [np.array(weight) for weight in model.layers[1].get_weights()]


def compare(*args, **options):
    states, losses, weights = on_one_rank(lambda: trained(*args, **options))
    found = trained(*args, **options)
    for name, wanted in states.items():
        np.testing.assert_allclose(found[0][name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(found[1], losses, rtol=1e-5)
    for ours, theirs in zip(found[2], weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return found[0]


@pytest.mark.parametrize("sizes", [(5, 1), *enough([(33, 16), (23, 8)], "torch", "tensorflow")], ids=str)
@enough_on("torch")
def test_states_are_those_of_one_rank(sizes):
    samples, batch = sizes  # of the last batch ranks have 1 and none, or 4 and 3
    states = compare(samples, batch)
    steps = 2 * -(-samples // batch)
    assert (states["calls"], states["ticks"], states["seen"]) == (steps, 7 - 2 * steps, 2 * samples)
    assert states["began"]


@enough_on()
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="runs one step at a time")
def test_several_steps_in_one_program():
    compare(33, 4, steps_per_execution=3)


class Growing(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, training=False):
        grown = x * ops.where(self.calls > 2, 4.0, 1.0)
        if training:
            self.calls.assign_add(1)
        return grown


@enough_on("torch")
def test_a_loss_is_tried_on_the_same_state_each_time():
    def make():
        inputs = keras.Input((4,))
        model = OwnLoss(inputs, keras.layers.Dense(1)(Growing()(inputs)))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    regression.compare(make)


class Queue(keras.layers.Layer):
    def build(self, shape):
        self.rows = self.add_weight(shape=(3, shape[-1]), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.rows.assign(ops.concatenate([x, self.rows])[:3])
        return x


@enough_on("torch")
def test_rows_of_samples_are_each_ranks_own(caplog):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,)), Queue(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            found.append(np.array(self.model.layers[0].rows))

    found = []
    model.fit(X[:32], Y[:32], batch_size=16, shuffle=False, verbose=0, callbacks=[Look()])
    mine = np.array_split(X[:16], keras_hpc.size())[keras_hpc.rank()]
    np.testing.assert_allclose(found[0], mine[:3])
    others = keras.Sequential([keras.Input((4,)), Keeping(), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    others.compile("sgd", "mse")
    others.fit(X[:32], Y[:32], batch_size=16, verbose=0)
    said = [r.getMessage() for r in caplog.records if "arrays that layers of your own keep" in r.getMessage()]
    assert len(said) == (keras_hpc.rank() == 0)
    assert all(f"model `{model.name}`" in text and model.layers[0].rows.path in text for text in said)


@enough_on("torch")
def test_rows_that_train_on_batch_averages_are_named(caplog):
    model = keras.Sequential([keras.Input((4,)), Queue(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for _ in range(3):
        model.train_on_batch(*keras_hpc.shard((X[:16], Y[:16])))
    said = [r.getMessage() for r in caplog.records if model.layers[0].rows.path in r.getMessage()]
    assert len(said) == (keras_hpc.rank() == 0)
