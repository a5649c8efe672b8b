# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 (a fixture)
"""Local steps with what else belongs to a training: evaluation, saving, statistics, callbacks, errors; bad input."""

import re
import time

import keras
import numpy as np
import pytest
from keras_cases import enough_on, everyone, job, part
from linear_cases import BATCH, FEATURES, RATE, STEPS, linear, two_teams
from local_cases import LOCAL, LocalSGD, X, Y, check, check_weights, executions, fit

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (1, 2)}
SOAK = {"tensorflow": (1, 2, 3), "jax": (1, 3), "torch": (3,)}

pytestmark = pytest.mark.usefixtures("two_teams")


@enough_on("torch")
def test_evaluate_and_save_in_the_middle_of_a_period(tmp_path):
    keras_hpc.configure_team(LOCAL, schedule="local", every=6)
    model, reference = linear(), LocalSGD(6)
    for s in range(STEPS):
        model.train_on_batch(part(X, s, False, BATCH), part(Y, s, False, BATCH))
        reference.local(s)
        if s == 3:
            if job().size > 1:
                weights = everyone(np.array(model.get_weights()[0]))
                assert not all((w == weights[0]).all() for w in weights), "ranks are apart"
            loss = model.evaluate(X, Y, verbose=0)
            reference.settle()
            error = X @ reference.w[0][0] + reference.w[0][1] - Y
            np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
            check(model, reference)
        if s == 6:
            path = str(tmp_path / "model.keras")
            model.save(path)
            reference.settle()
            check(model, reference)
            with keras_hpc.local():
                check_weights(keras.saving.load_model(path), reference)
    keras_hpc.drain(model)
    check(model, reference.settle())
    np.testing.assert_allclose(
        model.predict(X, verbose=0), X @ reference.w[0][0] + reference.w[0][1], rtol=1e-4, atol=1e-5
    )


@enough_on("torch")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, "Received: every=0"),
        ({"every": 1.5}, "Received: every=1.5"),
        ({"every": None}, "Received: every=None"),
        ({"every": True}, "Received: every=True"),
        ({"outer": "adam"}, "Received: outer='adam'"),
        ({"outer_rate": 0.5}, "Received: outer_rate=0.5"),
        ({"outer": "nesterov", "outer_rate": 0}, "Received: 0"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "Received: 1.0"),
        ({"overlap_steps": 8}, "Received: overlap_steps=8, every=8"),
        ({"every": "epoch", "overlap_steps": 1}, "Received: overlap_steps=1, every='epoch'"),
        ({"average_optimizer": 1}, "Received: 1"),
        ({"schedule": "synchronous"}, "Received: schedule='synchronous', every=8"),
        ({"schedule": "pipelined", "every": None, "outer": "nesterov"}, "outer='nesterov'"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        keras_hpc.configure_team(**{"schedule": "local", "every": 8, **arguments})


@enough_on("torch")
def test_what_cannot_be_local_is_refused(tmp_path):
    keras_hpc.configure_team(LOCAL, schedule="local", every=4)
    model = linear(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE)))
    with pytest.raises(ValueError, match="Received: a LossScaleOptimizer"):
        model.train_on_batch(part(X, 0, False, BATCH), part(Y, 0, False, BATCH))
    often = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"), save_freq=3)
    with pytest.raises(ValueError, match="save_freq=3"):
        fit(linear(), callbacks=[often])


def test_statistics_of_batch_normalization():
    keras_hpc.configure_team(LOCAL, schedule="local", every=2)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    moving = np.zeros((job().size, FEATURES))
    for s in range(5):
        before = job().teams[LOCAL].report()["bytes"]
        model.train_on_batch(part(X, s, False, BATCH), part(Y, s, False, BATCH))
        if s == 2:
            assert job().teams[LOCAL].report()["bytes"] == before, "statistics wait for the end, too"
        for r, rows in enumerate(np.array_split(X[s * BATCH :][:BATCH], job().size)):
            moving[r] = 0.99 * moving[r] + 0.01 * rows.mean(axis=0)
    keras_hpc.drain(model)
    np.testing.assert_allclose(model.layers[0].moving_mean, moving.mean(axis=0), rtol=1e-5, atol=1e-6)
    keras_hpc.check_replicas(model)


@enough_on("torch")
def test_a_callback_that_stops_on_one_rank():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4 and job().rank == job().size - 1:
                self.model.stop_training = True

    keras_hpc.configure_team(LOCAL, schedule="local", every=4)
    model = linear()
    fit(model, callbacks=[Stop()])
    assert int(model.optimizer.iterations) == 8, "ranks stop together, where they ask each other"
    keras_hpc.check_replicas(model)


@enough_on("torch")
def test_a_callback_that_looks_at_logs_sees_those_of_all_ranks():
    class FromLogs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(0.01 * logs["loss"])
            self.model.optimizer.learning_rate = rates[-1]

    rates = []
    keras_hpc.configure_team(LOCAL, schedule="local", every=4)
    model = linear()
    history = fit(model, callbacks=[FromLogs()]).history
    assert all(other == rates for other in everyone(rates))
    assert rates[-1] == pytest.approx(0.01 * history["loss"][-1])
    keras_hpc.check_replicas(model)


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen", aggregation="sum")

    def call(self, x):
        return x


@enough_on("torch")
def test_what_layers_count_is_named(caplog):
    keras_hpc.configure_team(LOCAL, schedule="local", every=4)
    model = keras.Sequential([keras.Input((FEATURES,)), Counting(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    keras_hpc.assign_team(model, LOCAL)
    with caplog.at_level("INFO", "keras_hpc"):
        fit(model)
        fit(model)
    told = [text for text in caplog.messages if "is each rank's own" in text and "/seen" in text]
    assert len(told) == (job().rank == 0 and job().size > 1)


@enough_on("torch")
def test_accumulation_counts_updates():
    keras_hpc.configure_team(LOCAL, schedule="local", every=2)
    optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=3)
    model = linear(optimizer=optimizer)
    sent = []
    for s in range(STEPS - 1):
        before = executions()
        model.train_on_batch(part(X, s, False, BATCH), part(Y, s, False, BATCH))
        sent.append(executions() - before)
    assert sent == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    keras_hpc.drain(model)
    keras_hpc.check_replicas(model)


@enough_on("torch")
def test_what_is_left_apart_is_said(caplog):
    keras_hpc.configure_team(LOCAL, schedule="local", every=4)
    model = linear()
    model.train_on_batch(part(X, 0, False, BATCH), part(Y, 0, False, BATCH))
    rank = keras_hpc.rank()
    with caplog.at_level("INFO", "keras_hpc"):
        keras_hpc.finalize()
    told = any("weights of 1 optimizer with local steps" in record.getMessage() for record in caplog.records)
    assert told == (rank == 0)


@enough_on("torch")
def test_a_rank_that_does_not_come_is_named():
    if job().size == 1:
        return
    keras_hpc.finalize()
    keras_hpc.init(batch="global", timeout_seconds=2)
    keras_hpc.configure_team(0, schedule="local", every=3)
    model = linear(0)
    batch = part(X, 0, False, BATCH), part(Y, 0, False, BATCH)
    model.train_on_batch(*batch)
    if job().rank == 0:  # it has met an error in a local step, and does not go on
        with pytest.raises(keras_hpc.CommunicationError):
            keras_hpc.barrier()
    else:
        begin = time.monotonic()
        model.train_on_batch(*batch)
        # TensorFlow has an error of its own for what fails in a step.
        with pytest.raises(Exception, match=r"rank 0|did not come|not every rank"):
            model.train_on_batch(*batch)
        assert time.monotonic() - begin < 20
