# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""Checkpoints on disk: who writes what, what is refused, and what ranks tell each other when something goes wrong."""

import errno
import json
import os
import resource
import shutil
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from checkpoint_cases import (
    BATCH,
    X,
    Y,
    _job,
    compiled,
    folder,
    network,
    only_on,
    resumed_equals_uninterrupted,
    start,
    trained,
)
from keras_cases import enough_on, job

import keras_hpc
from keras_hpc.job import supervised
from keras_hpc.keras_hooks.checkpoint import callback_state, snapshot, stop_signals, storage, tensors

RANKS = {"torch": (2,)}
SOAK = {"jax": (2,), "torch": (2,)}


@only_on("torch")
@enough_on("torch")
def test_damaged_checkpoints(folder):
    trained(folder, every_steps=4)
    whole, newest = sorted(os.listdir(folder))
    if job().rank == 0:
        part = max(Path(folder, newest).glob("rank*.safetensors"))  # of the last rank
        with part.open("r+b") as file:
            file.seek(-20, os.SEEK_END)
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
    """Changes what the newest checkpoint says, check sums included, as somebody with a grudge can."""
    if job().rank == 0:
        path = Path(folder, max(os.listdir(folder)), "manifest.json")
        manifest = json.loads(path.read_text())
        change(manifest["body"]["facts"])
        manifest["body_crc32"] = storage._crc(manifest["body"])
        path.write_text(json.dumps(manifest))
    job().teams[0].barrier()


def set_state(facts, name, state):
    facts["callbacks"] = list((dict(facts["callbacks"]) | {name: state}).items())


REFUSED = [
    ("EarlyStopping 1", {"patience": 9}, r"EarlyStopping 1 .*Received: \['patience'\]"),
    ("EarlyStopping 1", {"model": None, "wait": 0}, r"Received: \['model'\]"),
    ("EarlyStopping 1", {"wait": "two"}, "`wait` of EarlyStopping 1 .*a number, or nothing. Received: two"),
    ("EarlyStopping 1", {"best_weights": [{"array": -1}]}, "`best_weights` .*a list of arrays"),
    ("EarlyStopping 1", [1], "no dictionary. Received: list"),
    ("LambdaCallback 1", {"on_epoch_end": None}, r"Received: \['on_epoch_end'\]"),
    ("Notes 1", {"seen": 1, "on_epoch_end": 0}, r"Notes 1 .*\['seen'\]. Received: \['on_epoch_end'\]"),
]


@only_on("torch")
@enough_on("torch")
def test_a_manifest_sets_only_what_callbacks_save(folder):
    def callbacks():
        stopping = keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)
        return [stopping, Notes(), keras.callbacks.LambdaCallback(), keras_hpc.callbacks.RootOnly(Notes())]

    trained(folder, callbacks=callbacks())
    given = callbacks()
    trained(folder, callbacks=given)  # goes on at the end
    assert (given[0].best_epoch, given[1].seen, given[3].callback.seen) == (0, 1, int(job().rank == 0))
    assert given[0].best < 9
    for name, state, said in REFUSED:
        given = keras.callbacks.CallbackList(callbacks(), add_history=False)
        with pytest.raises(ValueError, match=said):
            callback_state.put_back(given, [("Notes 1", {"seen": 1}), (name, state)], [])
        assert given.callbacks[1].seen == 0, "nothing is put back"
    rewritten(folder, lambda facts: set_state(facts, "EarlyStopping 1", {"patience": 9}))
    with pytest.raises(ValueError, match="EarlyStopping 1 holds what the callback does not save"):
        trained(folder, callbacks=callbacks())
    rewritten(folder, lambda facts: facts.pop("done"))
    with pytest.raises(OSError, match="does not say the step"):  # on all ranks, though one reads it
        trained(folder)


@pytest.mark.parametrize("state", [np.zeros(2), {1: 2}], ids=["an array", "a key that is no text"])
@only_on("torch")
@enough_on("torch")
def test_a_state_that_json_would_change(state):
    callback = Notes()
    callback.get_state = lambda: state
    with pytest.raises(ValueError, match=r"`get_state\(\)` of Notes 1 returns what the checkpoint cannot hold"):
        callback_state.take(keras.callbacks.CallbackList([callback], add_history=False))


@only_on("torch")
@enough_on("torch")
def test_a_state_that_one_rank_alone_refuses(folder):
    only = [Notes()] if job().rank == 0 else []
    trained(folder, callbacks=only)
    rewritten(folder, lambda facts: set_state(facts, "Notes 1", {"model": 1}))
    only = [Notes()] if job().rank == 0 else []
    expected = ValueError if only else keras_hpc.PlanMismatchError
    with pytest.raises(expected, match="Notes 1 holds what the callback does not save"):
        trained(folder, callbacks=only)


def in_the_first_format(path):
    """Rewrites a checkpoint as it was written until November 2026."""
    facts, arrays = storage._read(path)
    for part in path.glob("*.safetensors"):
        part.unlink()
    assert not any("[" in name for name in arrays), "a variable in pieces"
    named = {name.split(" ")[0]: array.reshape(-1).view(np.uint8) for name, array in arrays.items()}
    np.savez(path / "arrays.npz", **named)
    del facts["kind"]
    size = (path / "arrays.npz").stat().st_size
    manifest = {"format": 1, "array_bytes": size, "facts_crc32": storage._crc(facts), "facts": facts}
    (path / "manifest.json").write_text(json.dumps(manifest))


@only_on("torch")
@enough_on()
def test_a_checkpoint_in_the_first_format_goes_on(folder):
    def change(path):
        if job().rank == 0:
            in_the_first_format(max(Path(path).iterdir()))
        job().teams[0].barrier()

    resumed_equals_uninterrupted(folder, network, (12,), lambda: (X, Y), batch_size=BATCH, between=change)


@only_on("torch", "jax")
@enough_on()
def test_variables_in_pieces_of_several_dtypes(folder, monkeypatch):
    monkeypatch.setattr(snapshot, "_PIECE_BYTES", 100)

    def make():
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(9, dtype="bfloat16"), keras.layers.Dense(3, "softmax", dtype="float16")]
        return compiled(keras.Sequential([keras.Input((6,)), *layers]))

    def names():
        parts = Path(folder, "pieces", "step-000000024").glob("*.safetensors")
        return {part.name[:9]: set(tensors.read(part, part.stem[10:])) for part in parts}

    model = resumed_equals_uninterrupted(folder, make, (12,), lambda: (X, Y), batch_size=BATCH)
    by_rank = names()
    kernel = model.layers[0].kernel.path
    assert len(by_rank) == job().size
    for found in by_rank.values():
        assert any(name.startswith("variable") for name in found), "each rank writes its share"
    assert {f"variable0[0:3] {kernel}", f"variable0[3:6] {kernel}"} <= set.union(*by_rank.values())


@only_on("torch")
@enough_on("torch")
def test_ranks_that_do_not_share_a_disk(folder, monkeypatch):
    answer = storage.Probe.answer
    monkeypatch.setattr(storage.Probe, "answer", lambda path, rank: answer(path, rank) if rank == 0 else None)
    resumed_equals_uninterrupted(folder, network, (12,), lambda: (X, Y), batch_size=BATCH)
    (newest,) = Path(folder, "pieces").glob("step-000000024")
    assert [path.name[:9] for path in newest.glob("rank*")] == ["rank00000"]


@only_on("torch")
@enough_on("torch")
def test_a_job_ends_at_the_end_of_an_epoch_where_ranks_wait_to_join(folder, monkeypatch):
    """As `keras_hpc run --elastic --rejoin` asks for; what it goes on with is tested there."""
    notes = Path(folder, "notes")
    if job().rank == 0:
        notes.mkdir()
        monkeypatch.setenv(supervised.NAME, str(notes))
    given = [keras_hpc.callbacks.Checkpoint(os.path.join(folder, "run"), 3), Ask(notes if job().rank == 0 else None)]
    with pytest.raises(SystemExit) as left:
        network().fit(X, Y, BATCH, epochs=3, verbose=0, callbacks=given)
    assert left.value.code == 0
    assert supervised.has_left(notes)
    assert sorted(os.listdir(os.path.join(folder, "run")))[-1] == "step-000000008", "of the first epoch"
    history = network().fit(X, Y, BATCH, epochs=1, verbose=0, callbacks=given[:1]).history
    assert len(history["loss"]) == 1, "which is over"


class Ask(keras.callbacks.Callback):
    """Asks, in the first epoch, on one rank."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def on_train_batch_begin(self, batch, logs=None):
        if self.notes is not None:
            supervised.ask_to_rejoin(self.notes)


@only_on("torch")
@enough_on("torch")
def test_a_last_rank_that_cannot_write_is_known_to_all_before_training_ends(folder, monkeypatch):
    class Patience(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            time.sleep(0.05)

    monkeypatch.setattr(stop_signals, "_LOOK_SECONDS", 0.1)
    write = tensors.write
    last = job().rank == job().size - 1

    def full(path, arrays):
        if last and "000000008" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, arrays)

    monkeypatch.setattr(tensors, "write", full)
    patience = Patience()
    start()
    given = [patience, keras_hpc.callbacks.Checkpoint(folder, 4)]
    with pytest.raises(OSError, match=rf"after step 8 was not written; .* rank {job().size - 1}: .*No space left"):
        network().fit(X, Y, BATCH, epochs=9, verbose=0, callbacks=given)
    assert 8 <= patience.steps <= 16
    job().teams[0].barrier()
    assert os.listdir(folder) == ["step-000000004"]


def looped(folder, steps, stop=None, state=None):
    """Trains in a loop of its own, with two models that share a layer, on teams of their own. Returns all values."""
    start(teams=2)
    keras.utils.set_random_seed(4)
    shared = keras.layers.Dense(6, name="shared")
    models = []
    for team in (0, 1):
        keras.utils.set_random_seed(5)
        layers = [keras.Input((6,)), shared, keras.layers.Dropout(0.3), keras.layers.Dense(3, activation="softmax")]
        models.append(keras.Sequential(layers))
        models[-1].compile("adam", "sparse_categorical_crossentropy")
        keras_hpc.assign_team(models[-1], team)
    keras_hpc.configure_team(1, schedule="pipelined")
    checkpoint = keras_hpc.callbacks.Checkpoint(folder, keep=2)
    found = checkpoint.restore(*models)
    first = (found or {"steps": 0})["steps"]
    assert state is None or found == state
    for step in range(first, steps):
        rows = slice(job().rank + 8 * step, job().rank + 8 * step + 8)
        for model in models:
            model.train_on_batch(X[rows], Y[rows])
        if step + 1 == stop:
            checkpoint.save(*models, step=step + 1, state={"steps": step + 1})
    if stop is None:
        for model in models:
            keras_hpc.drain(model)
    return [keras.ops.convert_to_numpy(v) for m in models for v in (*m.variables, *m.optimizer.variables)], models


@only_on("torch", "jax")
@enough_on("torch")
def test_loops_of_their_own_go_on(folder):
    whole, _ = looped(os.path.join(folder, "whole"), 9)
    keras_hpc.finalize()
    pieces = os.path.join(folder, "pieces")
    looped(pieces, 7, stop=4)  # what follows step 4 is lost
    keras_hpc.finalize()  # waits for the writer
    ours, models = looped(pieces, 9, state={"steps": 4})
    for a, b in zip(ours, whole, strict=True):
        np.testing.assert_array_equal(a, b)
    checkpoint = keras_hpc.callbacks.Checkpoint(pieces)
    with pytest.raises(ValueError, match=r"has a checkpoint of step 4\. Expected a later step"):
        checkpoint.save(*models, step=3)
    with pytest.raises(ValueError, match=r"an integer >= 0\. Received: step=-1"):
        checkpoint.save(*models, step=-1)
    with pytest.raises(ValueError, match=r"Expected a fit\. Received: loop"):
        models[0].fit(X, Y, BATCH, verbose=0, callbacks=[checkpoint])


@only_on("torch")
@enough_on("torch")
def test_every_rank_needs_it(folder):
    start()
    model = compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]))
    given = [keras_hpc.callbacks.Checkpoint(folder)] if job().rank == 0 else []
    with pytest.raises(ValueError, match="Checkpoint is collective"):
        model.fit(X, Y, verbose=0, callbacks=given)
    given = [keras_hpc.callbacks.Checkpoint(folder, every_steps=2 + (job().rank == 1))]
    with pytest.raises(ValueError, match=r"the same `every_steps` and `keep` on .* Received: every_steps=[23]"):
        model.fit(X, Y, verbose=0, callbacks=given)


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
def test_a_disk_that_fills_up_leaves_the_checkpoint_before(folder):
    class Full(keras.callbacks.Callback):
        """From now on no file of the first rank may become larger than a kilobyte."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 6 and job().rank == 0:
                while not os.path.exists(os.path.join(folder, "step-000000004")):
                    time.sleep(0.01)
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
