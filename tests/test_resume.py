"""Jobs that are killed, or asked to end, and started again: they end with the bits of a job that was left alone."""

import contextlib
import itertools
import json
import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT

from keras_hpc.keras_hooks.checkpoint import storage

pytestmark = pytest.mark.mpi

SCRIPT = ROOT / "tests" / "ranks" / "train_resume.py"
STEPS = 32  # 4 epochs of 8


@pytest.fixture
def train(run_ranks):
    """A function that trains in a folder until a signal at a step, and returns what was said."""

    def run(n, folder, how="", step=0, signal="none", backend="torch", **options):
        return run_ranks(n, [SCRIPT, folder, how, step, signal], backend=backend, timeout=240, **options).output

    return run


def _result(folder, name="run"):
    return json.loads((folder / f"{name}.json").read_text())


def _checkpoints(folder):
    """The steps of those that are whole."""
    return sorted(int(path.name[5:]) for path in (folder / "run").glob("step-*"))


def test_a_checkpoint_may_become_whole_as_soon_as_the_last_part_has_its_name(tmp_path, monkeypatch):
    unfinished = tmp_path / ".unfinished-step"
    flush = storage._flush

    def later(folder):
        if folder == unfinished:
            unfinished.rename(tmp_path / "step")  # as the first rank does, which has seen the part
        flush(folder)

    monkeypatch.setattr(storage, "_flush", later)
    storage.write_part(unfinished, 1, {"x": np.ones(3)})
    assert len(list((tmp_path / "step").glob("rank00001-*.safetensors"))) == 1


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_checkpoint_of_the_same_step_stays_until_the_new_one_has_its_name(tmp_path, monkeypatch, renames):
    def commit(number):
        unfinished = tmp_path / storage.name_of_unfinished(5, str(number))
        storage.write_part(unfinished, 0, {"x": np.full(3, number)})
        monkeypatch.setattr(Path, "rename", until_killed)
        storage.commit(tmp_path, unfinished, 5, json.dumps({"number": number}), 1, 1, threading.Event())

    def until_killed(path, target):
        if next(left) == 0:
            raise KeyboardInterrupt
        os.rename(path, target)

    left = itertools.count(1)
    commit(0)
    monkeypatch.undo()
    with contextlib.suppress(KeyboardInterrupt):
        left = itertools.count(renames, -1)
        commit(1)
    monkeypatch.undo()
    storage.check(tmp_path, 1000, keep=1)  # as at the next start
    assert os.listdir(tmp_path) == ["step-000000005"]
    _, facts, arrays, _ = storage.newest(tmp_path)
    assert facts["number"] == (renames == 2)
    assert arrays["x"].tolist() == [facts["number"]] * 3


def test_a_rank_that_outlives_its_job_stops_no_later_one(tmp_path, monkeypatch):
    unfinished = tmp_path / storage.name_of_unfinished(5, "")
    storage.write_part(unfinished, 0, {"x": np.ones(3)})
    remove = os.rmdir

    def meanwhile(path, **options):
        if Path(path).name == unfinished.name:
            (unfinished / "rank00001.part").touch()
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", meanwhile)
    storage.check(tmp_path, 1000, keep=1)
    assert storage.newest(tmp_path) is None


@pytest.mark.parametrize("name", ["manifest.json", "rank"])
def test_a_pipe_is_no_part_of_a_checkpoint(name, tmp_path):
    """Nobody may let a job wait for ever by what is found in its folder."""
    unfinished = tmp_path / storage.name_of_unfinished(5, "")
    storage.write_part(unfinished, 0, {"x": np.ones(3)})
    storage.commit(tmp_path, unfinished, 5, "{}", 1, 1, threading.Event())
    (path,) = (tmp_path / "step-000000005").glob(f"{name}*")
    path.unlink()
    os.mkfifo(path)
    if name == "rank":
        manifest = path.with_name("manifest.json")
        written = json.loads(manifest.read_text())
        written["body"]["parts"] = {path.name: 0}
        manifest.write_text(json.dumps(written | {"body_crc32": storage._crc(written["body"])}))

    def read():
        with pytest.raises(OSError, match=f"{path.name} is no file"):
            storage.newest(tmp_path)
        ended.set()

    ended = threading.Event()
    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(5)


def test_a_job_that_is_killed_goes_on(train, tmp_path):
    train(2, tmp_path, "whole", step=11, signal="sigkill", expect_failure=True)
    steps = _checkpoints(tmp_path)
    assert steps in ([3, 6], [3, 6, 9])  # the last may have been on its way
    assert f"step-{steps[-1]:09}: epoch {1 + steps[-1] // 8} of 4, step {1 + steps[-1] % 8}" in train(2, tmp_path)
    assert _result(tmp_path) == _result(tmp_path, "whole")


@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.soak)])
def test_a_job_that_is_killed_while_it_writes_goes_on(kills, train, tmp_path):
    how, chance = "whole,large", random.Random(1)
    for _ in range(kills):
        train(2, tmp_path, how, step=chance.randrange(1, 8), signal="writing", expect_failure=True)
        how = "large"
        if (_checkpoints(tmp_path) or [0])[-1] > 18:  # too near to the end
            train(2, tmp_path, how)
            assert _result(tmp_path) == _result(tmp_path, "whole")
            shutil.rmtree(tmp_path / "run")
    train(2, tmp_path, how)
    assert _result(tmp_path) == _result(tmp_path, "whole")
    assert not list((tmp_path / "run").glob("damaged-*"))


@pytest.mark.soak
def test_a_job_that_is_killed_and_asked_to_end_goes_on(train, tmp_path):
    train(2, tmp_path, "whole", step=11, signal="sigkill", expect_failure=True)
    shutil.copytree(tmp_path / "run", tmp_path / "other" / "run")
    said = train(2, tmp_path, step=5, signal="sigusr1")  # which one rank alone receives
    assert "Checkpoint: goes on from" in said
    assert "SIGUSR1: saved" in said
    assert (tmp_path / "run" / "interrupted").exists()
    assert not (tmp_path / "run.json").exists()
    train(2, tmp_path)
    assert not (tmp_path / "run" / "interrupted").exists()
    assert _result(tmp_path) == _result(tmp_path, "whole")

    said = train(1, tmp_path / "other", mpi=False)
    assert "1 rank, were 2 ranks: not bit for bit" in said
    assert len(_result(tmp_path / "other")["history"]["loss"]) == 4


# Backends, ranks, and what they may meet, in turns.
HOW = ("", "pipelined", "accumulate", "dataset")
KILLS = [(("torch", "tensorflow", "jax")[i % 3], 1 + i // 3 % 3, HOW[i // 3 % 4]) for i in range(30)]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(KILLS)))
def test_random_kills(number, train, tmp_path):
    backend, n, how = KILLS[number]
    chance = random.Random(number)
    kinds = chance.choice([["sigkill", "SIGTERM"], ["later", "sigusr1"], ["sigterm", "later"], ["later", "later"]])
    before = "whole," + how
    for kind in kinds:
        step = chance.randrange(1, STEPS // 4)
        train(n, tmp_path, before, step, kind, backend, expect_failure=kind in ("sigkill", "later"))
        before = how
    train(n, tmp_path, how, backend=backend)
    assert _result(tmp_path) == _result(tmp_path, "whole")
