# SPDX-License-Identifier: Apache-2.0
"""A run that stops and goes on from its checkpoint ends with the bits of one that does not."""

import json
import os
import resource
import shutil
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_cases import Parts, assert_close, assert_identical, data, enough_on, job

import keras_hpc
from keras_hpc.keras_hooks.checkpoint import storage

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}  # for what is enough on one of them

BATCH, EPOCHS, STEPS = 12, 3, 8  # of 185 samples on 2 ranks
X, Y = data()
VALIDATION = (X[:40], Y[:40])


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
    values = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]
    return values, history.history, history.epoch


def assert_same(ours, reference):
    for a, b in zip(ours[0], reference[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert ours[1:] == reference[1:]


def resumed_equals_uninterrupted(folder, make, stops, arguments, every=5, callbacks=list, before=lambda: None, **fit):
    """Trains at once, and in pieces that end after so many steps; both must end alike. Returns the second model.

    Args:
        folder: for checkpoints.
        make: returns a compiled model.
        stops: the steps of each piece.
        arguments: returns data for `fit`.
        every: `every_steps`.
        callbacks: returns what else is called.
        before: called in each "process" before the model is made.
        fit: for `fit`.
    """
    results = []
    for pieces, name in (((None,), "whole"), ((*stops, None), "pieces")):
        for piece in pieces:
            start(teams=1)
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


def test_arrays_with_validation_and_plateau(folder):
    def callbacks():
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=1.0, patience=1)
        return [keras_hpc.callbacks.LearningRateWarmup(1.5), plateau]

    # From the middle of an epoch, and from its last step, without another checkpoint in between. Where models take long
    # to compile, from the middle.
    stops = (7, 12) if keras.backend.backend() == "torch" else (7,)
    fit = {"callbacks": callbacks, "batch_size": BATCH, "validation_data": VALIDATION}
    model = resumed_equals_uninterrupted(folder, network, stops, lambda: (X, Y), **fit)
    assert_identical(model.get_weights())
    names = sorted(os.listdir(os.path.join(folder, "pieces")))
    assert names == ["step-000000020", "step-000000024"]


@only_on("jax", "torch")
@enough_on("torch")
def test_a_pipelined_team(folder):
    def before():
        keras_hpc.configure_team(0, schedule="pipelined", synchronous_steps=3, cooldown_steps=4)

    def make():
        return network(keras.optimizers.SGD(0.05, momentum=0.9))

    # An average is outstanding where it goes on, and the cool-down comes as if nothing had been.
    resumed_equals_uninterrupted(folder, make, (11,), lambda: (X, Y), before=before, batch_size=BATCH)


@only_on("torch")
@enough_on("tensorflow")
def test_a_dataset_with_accumulated_gradients(folder):
    def make():
        return network(keras.optimizers.Adam(0.02, gradient_accumulation_steps=3))

    # In the middle of micro-batches. Each rank draws its own dropout from PyTorch's generator.
    dataset = lambda: (Parts(X, Y, batch=8, whole=True),)  # noqa: E731
    resumed_equals_uninterrupted(folder, make, (10,), dataset, every=4)


@only_on("torch")
@enough_on("torch")
def test_steps_per_epoch(folder):
    # A pass of 8 steps goes on through epochs of 2.
    fit = {"batch_size": BATCH, "steps_per_epoch": 2}
    resumed_equals_uninterrupted(folder, network, (3, 3), lambda: (X, Y), every=2, **fit)


@only_on("torch")
@enough_on("torch")
def test_a_data_loader(folder):
    import torch

    def loader():
        rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
        return (torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True),)

    resumed_equals_uninterrupted(folder, network, (12,), loader)


@only_on("tensorflow")
@enough_on("torch")
def test_a_pipeline_that_shuffles_by_itself(folder):
    import tensorflow as tf

    def pipeline():
        return (tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=4).batch(BATCH),)

    resumed_equals_uninterrupted(folder, network, (12,), pipeline)


@only_on("torch")
@enough_on("torch")
def test_a_run_that_early_stopping_ended_does_not_train_again(folder):
    results = []
    for _ in range(2):  # the second finds the end of the first
        start()
        model = network()
        stopping = keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=1, restore_best_weights=True)
        given = [stopping, keras_hpc.callbacks.Checkpoint(folder)]
        results.append(outcome(model, model.fit(X, Y, BATCH, epochs=EPOCHS, verbose=0, callbacks=given)))
    assert results[0][2] == [0, 1]
    assert_same(results[1], results[0])


@only_on("tensorflow")  # where the first rank alone has an optimizer with variables then
@enough_on("torch")
def test_backup_and_restore_of_keras_goes_on_at_its_epoch(folder):
    path = os.path.join(folder, "backup")

    class Weights(keras.callbacks.Callback):
        """Notes weights before and after the first step."""

        def on_epoch_begin(self, epoch, logs=None):
            self.before = [keras.ops.convert_to_numpy(v) for v in self.model.trainable_weights]

        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                self.after = [keras.ops.convert_to_numpy(v) for v in self.model.trainable_weights]

    for stop in (Stop(13), None):
        start()
        model = network()
        weights = Weights()
        given = [keras.callbacks.BackupAndRestore(path, save_freq=4), weights] + ([stop] if stop else [])
        try:
            history = model.fit(X, Y, BATCH, epochs=2, verbose=0, callbacks=given)
        except StopError:
            interrupted = [v + 0 for v in weights.after]
    assert history.epoch == [1]
    assert_identical(weights.after, "restored weights")  # which the first rank alone has read
    if job().rank == 0:
        assert_close(weights.after, weights.before, 0.05)
        assert np.abs(interrupted[0] - weights.before[0]).max() > 0
    assert_identical(model.get_weights())
    assert not os.path.exists(path)


def trained(folder, make=network, callbacks=(), **options):
    """Trains one epoch with a checkpoint at its end."""
    start()
    given = [*callbacks, keras_hpc.callbacks.Checkpoint(folder, **options)]
    return make().fit(X, Y, BATCH, epochs=1, verbose=0, callbacks=given)


@only_on("torch")
@enough_on("torch")
def test_damaged_checkpoints(folder):
    trained(folder, every_steps=4)
    whole, newest = sorted(os.listdir(folder))
    if job().rank == 0:
        with open(os.path.join(folder, newest, "arrays.npz"), "r+b") as file:
            file.seek(500)
            file.write(b"damage")
    trained(folder, every_steps=4)
    if job().rank == 0:
        assert sorted(os.listdir(folder)) == [f"damaged-{newest}", whole, newest]
        for name in (whole, newest):
            os.truncate(os.path.join(folder, name, "manifest.json"), 40)
    job().teams[0].barrier()
    with pytest.raises(OSError, match="All checkpoints are damaged"):
        trained(folder)


class Notes(keras.callbacks.Callback):
    """Remembers as its user wrote it: whatever it is given."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1

    def get_state(self):
        return {"seen": self.seen}

    def set_state(self, state):
        self.__dict__.update(state)


def rewritten(folder, change):
    """Changes what the newest checkpoint says of callbacks, check sums included, as somebody with a grudge can."""
    if job().rank == 0:
        path = Path(folder, max(os.listdir(folder)), "manifest.json")
        manifest = json.loads(path.read_text())
        states = dict(manifest["facts"]["callbacks"])
        change(states)
        manifest["facts"]["callbacks"] = list(states.items())
        manifest["facts_crc32"] = storage._crc(manifest["facts"])
        path.write_text(json.dumps(manifest))
    job().teams[0].barrier()


@only_on("torch")
@enough_on("torch")
@pytest.mark.parametrize(
    ("name", "state", "said"),
    [
        ("EarlyStopping 1", {"patience": 9}, r"EarlyStopping 1 .*Received: \['patience'\]"),
        ("EarlyStopping 1", {"model": None, "wait": 0}, r"Received: \['model'\]"),
        ("EarlyStopping 1", {"wait": "two"}, "`wait` of EarlyStopping 1 .*a number, or nothing. Received: two"),
        ("EarlyStopping 1", {"best_weights": [{"array": -1}]}, "`best_weights` .*a list of arrays"),
        ("EarlyStopping 1", [1], "no dictionary. Received: list"),
        ("LambdaCallback 1", {"on_epoch_end": None}, r"Received: \['on_epoch_end'\]"),
        ("Notes 1", {"seen": 1, "on_epoch_end": 0}, r"Notes 1 .*\['seen'\]. Received: \['on_epoch_end'\]"),
    ],
)
def test_a_manifest_sets_only_what_callbacks_save(folder, name, state, said):
    def callbacks():
        stopping = keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)
        return [stopping, Notes(), keras.callbacks.LambdaCallback()]

    trained(folder, callbacks=callbacks())
    given = callbacks()
    trained(folder, callbacks=given)  # goes on at the end
    assert (given[0].best_epoch, given[1].seen) == (0, 1)
    assert given[0].best < 9
    rewritten(folder, lambda states: states.update({name: state}))
    given = callbacks()
    with pytest.raises(ValueError, match=said):
        trained(folder, callbacks=given)
    assert given[1].seen == 0, "nothing is put back"


@only_on("torch")
@enough_on("torch")
def test_a_state_that_one_rank_alone_refuses(folder):
    only = [Notes()] if job().rank == 0 else []
    trained(folder, callbacks=only)
    rewritten(folder, lambda states: states.update({"Notes 1": {"model": 1}}))
    only = [Notes()] if job().rank == 0 else []
    expected = ValueError if only else keras_hpc.PlanMismatchError
    with pytest.raises(expected, match="Notes 1 holds what the callback does not save"):
        trained(folder, callbacks=only)


@only_on("torch")
@enough_on("torch")
def test_another_model_is_refused(folder):
    trained(folder)
    with pytest.raises(ValueError, match=r"another model.*float32\[6, 16\] in the checkpoint and .*\[6, 8\] here"):
        trained(folder, lambda: compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)])))


@only_on("torch")
@enough_on("torch")
def test_every_rank_needs_it(folder):
    start()
    model = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    given = [keras_hpc.callbacks.Checkpoint(folder)] if job().rank == 0 else []
    with pytest.raises(ValueError, match="Checkpoint is collective"):
        model.fit(X, Y, verbose=0, callbacks=given)


def compiled(model):
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@only_on("torch")
@enough_on("torch")
def test_paths_and_disks_that_cannot_be_written(folder, monkeypatch):
    if job().rank == 0:
        with open(os.path.join(folder, "file"), "w"):
            pass
    job().teams[0].barrier()
    never = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: pytest.fail("it trained"))
    with pytest.raises(OSError, match=r"No checkpoint can be kept in .*Not a directory"):
        trained(os.path.join(folder, "file", "inside"), callbacks=[never])
    full = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(OSError, match=r"3 checkpoints, and one more.* 0\.0 MB free"):
        trained(folder, callbacks=[never])


@only_on("torch")
@enough_on("torch")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # NumPy 1.26 does not close its file
def test_a_disk_that_fills_up_leaves_the_checkpoint_before(folder):
    class Full(keras.callbacks.Callback):
        """From now on no file of the first rank may become larger than a kilobyte."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 6 and job().rank == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match=r"after step 8 was not written; .*File too large"):
            trained(folder, callbacks=[Full()], every_steps=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    job().teams[0].barrier()
    assert os.listdir(folder) == ["step-000000004"]
    if job().rank == 0:
        assert storage.newest(Path(folder))[1]["done"] == 4
