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

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2, 3), "jax": (2, 3), "torch": (3,)}


def sgd():
    return network(keras.optimizers.SGD(0.05, momentum=0.9))


@pytest.mark.parametrize(
    ("arguments", "stop"),
    [
        pytest.param({"every": 4, "outer": "nesterov", "cooldown_steps": 5}, 11, marks=enough_on("torch")),
        pytest.param({"every": 4, "overlap_steps": 3, "outer": "nesterov"}, 11, marks=enough_on("jax")),
        pytest.param({"every": "epoch"}, 7, marks=enough_on()),
    ],
    ids=str,
)
def test_in_the_middle_of_a_period(folder, arguments, stop):
    def before():
        keras_hpc.configure_team(0, schedule="local", **arguments)

    model = resumed_equals_uninterrupted(folder, sgd, (stop,), lambda: (X, Y), before=before, batch_size=BATCH)
    assert_identical(model.get_weights())


@enough_on()
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


@enough_on()
def test_on_another_number_of_ranks(folder):
    """Weights and momenta that were apart become their means, and a new period begins."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def on(ranks, work):
        """Runs it on the first ranks, in a job of their own; returns on all ranks what the first has returned."""
        keras_hpc.finalize()
        comm = world.Split(int(world.rank < ranks), world.rank)
        result = None
        if world.rank < ranks:
            start(comm=comm)
            keras_hpc.configure_team(0, schedule="local", every=4)
            result = work()
            keras_hpc.finalize()
        result = world.bcast(result)
        comm.Free()
        return result

    def model_of_mine(weights=()):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
        model.optimizer.build(model.trainable_variables)
        for variable, value in zip(states(model), weights, strict=False):
            variable.assign(value)
        return model

    def states(model):
        return [*model.trainable_variables, *model.optimizer.variables]

    def train(model, first, last):
        for step in range(first, last):
            rows = slice(20 * (step % 7) + 10 * job().rank, 20 * (step % 7) + 10 * job().rank + 10)
            model.train_on_batch(X[rows], Y[rows])

    def first():
        model = model_of_mine()
        train(model, 0, 6)
        checkpoint.save(model, step=6, state=6)
        checkpoint.wait()
        apart = [everyone(np.array(v)) for v in states(model)]
        assert job().size == 1 or (apart[0][0] != apart[0][1]).any(), "the period is over"
        return [np.mean(np.asarray(values, "float64"), axis=0) for values in apart]

    def then():
        model = model_of_mine()
        assert checkpoint.restore(model) == 6
        restored = [np.array(v) for v in states(model)]
        assert_identical(restored)
        return restored, ended(model)

    def ended(model):
        train(model, 6, 12)
        keras_hpc.drain(model)
        return [np.array(v) for v in states(model)]

    for before, after in ((world.size, world.size - 1), (world.size - 1, world.size)):
        checkpoint = keras_hpc.callbacks.Checkpoint(os.path.join(folder, f"{before}-{after}"))
        means = on(before, first)
        restored, went_on = on(after, then)
        for mean, value in zip(means, restored, strict=True):
            np.testing.assert_allclose(value, mean, rtol=1e-6, atol=1e-7)
        begun_so = on(after, lambda: ended(model_of_mine(restored)))  # noqa: B023 (called at once)
        for ours, theirs in zip(went_on, begun_so, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    start()


@enough_on("torch")
def test_a_checkpoint_of_local_steps_needs_them(folder):
    keras_hpc.configure_team(0, schedule="local", every=4)
    given = keras_hpc.callbacks.Checkpoint(folder)
    sgd().fit(X, Y, BATCH, epochs=1, verbose=0, callbacks=[given])
    start()
    with pytest.raises(ValueError, match="Received: another schedule"):
        sgd().fit(X, Y, BATCH, epochs=2, verbose=0, callbacks=[keras_hpc.callbacks.Checkpoint(folder)])
