# SPDX-License-Identifier: Apache-2.0
"""Sharded optimizers in files: they hold what they hold without sharding, and any number of ranks reads them."""

import keras
import numpy as np
import pytest
from keras_cases import assert_identical, enough, enough_on, everyone, values
from sharded_cases import Job, X, compiled, fit

import keras_hpc
from keras_hpc.errors import CommunicationError

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,), "torch": (3,)}

# On JAX, Keras cannot train on after a `fit` with averages: weights and averages are then one buffer, donated twice.
AVERAGES = keras.backend.backend() != "jax"


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


def whole_state(path):
    """Returns what the optimizer of a saved model keeps, as one rank alone reads it."""
    with keras_hpc.local():
        model = keras.models.load_model(path)
        return [np.array(variable) for variable in model.optimizer.variables]


@pytest.fixture
def folder(tmp_path):
    """A folder that all ranks see."""
    keras_hpc.init()
    path = everyone(str(tmp_path))[0]
    keras_hpc.finalize()
    return path


def test_saved_whole_and_loaded_in_parts(folder):
    with Job(False):
        model = fit(compiled(adam(use_ema=AVERAGES)))
        model.save(f"{folder}/whole.keras")
        expected = whole_state(f"{folder}/whole.keras")
        fit(model)
        after = values(model)
    with Job(True):
        model = fit(compiled(adam(use_ema=AVERAGES)))
        model.save(f"{folder}/sharded.keras")
        for a, b in zip(whole_state(f"{folder}/sharded.keras"), expected, strict=True):
            assert a.tobytes() == b.tobytes()
        for name in ("whole", "sharded"):
            loaded = keras.models.load_model(f"{folder}/{name}.keras")
            fit(loaded)
            assert [v.tobytes() for v in values(loaded)] == [v.tobytes() for v in after]
        # Weights of a model that trains already, with the state of its optimizer.
        loaded = fit(compiled(adam(use_ema=AVERAGES)))
        model.save_weights(f"{folder}/model.weights.h5")
        loaded.load_weights(f"{folder}/model.weights.h5")
        fit(loaded)
        assert [v.tobytes() for v in values(loaded)] == [v.tobytes() for v in after]


@pytest.mark.parametrize("whole", [True, *enough([False])])
def test_weights_of_an_optimizer_are_set(folder, whole):
    """All of them, as a file has them, or a rank's own parts."""

    def state():
        values = [keras.ops.convert_to_numpy(variable) for variable in model.optimizer.variables]
        return whole_state(f"{folder}/before.keras") if whole else values

    with Job(True):
        model = fit(compiled(adam()))
        model.save(f"{folder}/before.keras")
        before, weights = state(), model.get_weights()
        ended = []
        for _ in range(2):
            ended.append([v.tobytes() for v in values(fit(model))])
            model.set_weights(weights)
            model.optimizer.set_weights(before)
        assert ended[0] == ended[1]


@enough_on("torch")
def test_one_rank_alone_sets_the_weights_of_an_optimizer(folder):
    def last():
        return keras_hpc.rank() == keras_hpc.size() - 1

    with Job(True):
        optimizer = adam()
        model = fit(compiled(optimizer))
        model.save(f"{folder}/before.keras")
        state = whole_state(f"{folder}/before.keras")
        own = [keras.ops.convert_to_numpy(variable) for variable in optimizer.variables]
        for given in (state, own):
            optimizer.set_weights(given)
            keras_hpc.check_replicas(model)
            if last():
                optimizer.set_weights(given)  # the same once more
            with pytest.raises(keras_hpc.ReplicaMismatchError, match="or set the same"):
                keras_hpc.check_replicas(model)
        optimizer.set_weights([value + last() if value.ndim else value for value in state])
        with pytest.raises(ValueError, match="or set the same"):
            fit(model)


@enough_on()
def test_saved_by_a_callback_of_one_rank(folder):
    with Job(True):
        saver = keras.callbacks.ModelCheckpoint(f"{folder}/best.keras")
        model = fit(compiled(adam()), callbacks=[saver])
        keras_hpc.barrier()
        loaded = keras.models.load_model(f"{folder}/best.keras")
        for one in (model, loaded):
            fit(one)
        assert [v.tobytes() for v in values(loaded)] == [v.tobytes() for v in values(model)]


@enough_on()
def test_loaded_by_one_rank_alone(folder):
    with Job(True):
        model = fit(compiled(adam()))
        model.save_weights(f"{folder}/model.weights.h5")
        if keras_hpc.rank() == 0:
            model.load_weights(f"{folder}/model.weights.h5")
        with pytest.raises(ValueError, match="all ranks load the same"):
            fit(model)
        with keras_hpc.local(), pytest.raises(RuntimeError, match="no rank alone can save it"):
            model.save(f"{folder}/alone.keras")


@enough_on()
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("adafactor", marks=enough_on())])
def test_checkpoint_goes_on(folder, optimizer):
    def train(shard, path, epochs, steps=None):
        with Job(shard):
            model = compiled(keras.optimizers.get(optimizer))
            checkpoint = keras_hpc.callbacks.Checkpoint(path, every_steps=2)
            fit(model, epochs=epochs, callbacks=[checkpoint])
            assert_identical(values(model))
            return [v.tobytes() for v in values(model)]

    for shard, other in ((True, True), (False, True), (True, False)):
        path = f"{folder}/{shard}-{other}"
        train(shard, path, 2)
        assert train(other, path, 4) == train(not other, f"{path}-through", 4)


@enough_on("torch")
def test_checkpoint_goes_on_on_other_numbers_of_ranks(folder):
    """With the bits of whole optimizers that go on so: all of the state was there, and each rank took its part."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def train(ranks, shard, path, epochs):
        comm = world.Split(int(world.rank < ranks), world.rank)
        try:
            if world.rank >= ranks:
                return None
            with Job(shard, comm=comm):
                model = fit(compiled(adam()), epochs=epochs, callbacks=[keras_hpc.callbacks.Checkpoint(path)])
                return [v.tobytes() for v in values(model)]
        finally:
            world.Barrier()
            comm.Free()

    for first, then in ((2, 1), (2, 3), (3, 2)):
        ended = []
        for shard in (False, True):
            path = f"{folder}/{first}-{then}-{shard}"
            before = train(first, shard, path, 1)
            ended.append(train(then, shard, path, 3))
            assert before is None or ended[-1] != before
        assert ended[0] == ended[1]


@enough_on("torch")
@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has none")
def test_momenta_that_begin_with_weights_of_one_rank_alone():
    with Job(True):
        model = compiled(keras.optimizers.ScheduleFreeAdamW(0.01))
        model.set_weights([w + keras_hpc.rank() for w in model.get_weights()])
        with pytest.raises(ValueError, match="all ranks load the same"):
            fit(model)


def test_one_rank_that_saves_alone_is_told(folder):
    """At the end: the team has failed then."""
    keras_hpc.init(shard_optimizer=True, timeout_seconds=60)
    model = fit(compiled(adam()))

    def alone():
        if keras_hpc.rank() == 0:
            model.save(f"{folder}/alone.keras")
        else:
            model.predict(X, verbose=0)

    with pytest.raises(CommunicationError, match="all ranks save together"):
        alone()
    keras_hpc.finalize()
