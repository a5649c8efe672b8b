"""Ways of an allreduce: measured once, alike on all ranks, kept for the next job, and given by the user."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from in_process import as_bytes, run

from keras_hpc.job import tuning_cache


def reduce_and_tell(team, rank):
    for n in (1, 300, 5000, 300_000):
        x = np.full(n, rank + 1.0, np.float32)
        team.allreduce(as_bytes(x), "float32", "sum")
        assert np.all(x == team.size * (team.size + 1) / 2)
        shared = team.empty(4 * n).view(np.float32)
        shared[:] = rank + 1
        team.allreduce(as_bytes(shared), "float32", "sum")
        assert np.all(shared == team.size * (team.size + 1) / 2)
    return team.choices()


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 1]], ids=str)
def test_ranks_choose_alike_and_once(nodes):
    def work(team, rank):
        first = reduce_and_tell(team, rank)
        assert reduce_and_tell(team, rank) == first
        return first

    everyone = run(nodes, work, measured=True)
    assert everyone.count(everyone[0]) == len(nodes)
    arrays = [choice for choice in everyone[0] if choice[0] != "network"]
    assert len(arrays) == 8
    assert (len(everyone[0]) > 8) == (len(set(nodes)) > 1)
    ways = {
        "private": ("slot", "staged"),
        "segment": ("slot", "push"),
        "network": ("recursive_doubling", "rabenseifner", "ring", "pairwise", "radix_k"),
    }
    for place, begin, end, way in everyone[0]:
        assert begin < end
        assert way in ways[place]


def test_nothing_is_measured_on_one_rank():
    assert run([0], reduce_and_tell, measured=True) == [[]]


def test_float16_goes_another_way_than_the_library_which_has_none():
    def work(team, rank):
        team.add_choice("private", 0, 2**40, "library")  # threads have no library at all
        x = np.ones(100, np.float16)
        team.allreduce(as_bytes(x), "float16", "sum")
        assert np.all(x == 2)

    run([0, 0], work)


def test_wishes():
    assert tuning_cache.parse("") == []
    assert tuning_cache.parse("private:0-1Ki=slot, 1Ki-=staged; segment:0-=push;network:0-=ring") == [
        ["private", 0, 1024, "slot"],
        ["private", 1024, 2**63, "staged"],
        ["segment", 0, 2**63, "push"],
        ["network", 0, 2**63, "ring"],
    ]
    for wrong in (
        "private",
        "private:0-4=push",
        "shared:0-4=slot",
        "private:0-4=ring",
        "network:0-4=push",
        "private:a-4=slot",
        "private:0-=slot",
    ):
        with pytest.raises(ValueError, match=r"KERAS_HPC_ALLREDUCE.*Received"):
            tuning_cache.parse(wrong)


@pytest.mark.mpi
def test_choices_are_kept_for_the_next_job(run_ranks, tmp_path):
    doctor = ["-m", "keras_hpc", "doctor", "--parameters", "1000"]
    kept = tmp_path / "keras_hpc" / "allreduce.json"

    def ways(**variables):
        text = run_ranks(2, doctor, backend="jax", env={"XDG_CACHE_HOME": str(tmp_path), **variables}).output
        return next(line for line in text.splitlines() if "ways, by size" in line)

    first = ways()
    assert "64 B: " in first
    content = json.loads(kept.read_text())
    (choices,) = content["choices"].values()
    assert {kind for kind, *_ in choices} == {"private"}
    # The next job measures again what was measured once.
    for choice in choices:
        choice[3] = ["library"]
    kept.write_text(json.dumps(content))
    ways()
    (again,) = json.loads(kept.read_text())["choices"].values()
    assert all(measured[0] == "library" and len(measured) == 2 for *_, measured in again)
    # It takes what two have found: also what no measurement would say.
    for choice in choices:
        choice[3] = ["library", "library"]
    kept.write_text(json.dumps(content))
    assert ways().count("library") == len(choices)
    assert "64 KiB: staged" in ways(KERAS_HPC_ALLREDUCE="private:0-=staged")
    assert json.loads(kept.read_text()) == content, "a wish is not a measurement"
    kept.write_text("not JSON")
    assert "64 B: " in ways()


def test_what_cannot_be_kept_stops_nothing(monkeypatch, tmp_path):
    """A user whom the machine does not know has no home, as in many containers; disks are full."""
    team = SimpleNamespace(choices=lambda: [("private", 0, 1024, "slot")])
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", without_home)
    assert tuning_cache.load("key", 0) == []
    tuning_cache.save(team, 0, "key")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning_cache.save(team, 0, "key")
    tuning_cache.save(team, 0, "key")
    assert tuning_cache.load("key", 0) == [["private", 0, 1024, "slot"]]
    monkeypatch.setattr(Path, "replace", on_full_disk)
    tuning_cache.save(team, 0, "other")
    assert [path.name for path in (tmp_path / "keras_hpc").iterdir()] == ["allreduce.json"]


def test_two_jobs_must_find_the_same_or_three_are_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measured(*ways):
        key = "/".join(ways)
        for way in ways:
            tuning_cache.save(SimpleNamespace(choices=lambda way=way: [("private", 0, 1024, way)]), 0, key)
        return [way for *_, way in tuning_cache.load(key, 0)]

    assert measured("slot") == measured("slot", "staged") == []
    assert (
        measured("slot", "slot")
        == measured("library", "slot", "slot")
        == measured("slot", "staged", "slot")
        == ["slot"]
    )
    assert measured("slot", "staged", "library") == measured("library", "library", "slot", "slot") == ["library"]


def without_home():
    raise RuntimeError("Could not determine home directory.")  # as pathlib says it


def on_full_disk(self, target):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.mpi
def test_a_wish_that_is_not_understood_ends_the_job(run_ranks):
    args = ["-m", "keras_hpc", "doctor", "--parameters", "1000"]
    env = {"KERAS_HPC_ALLREDUCE": "private:0-4=ring"}
    output = run_ranks(2, args, backend="jax", env=env, expect_failure=True).output
    assert "Received: 'private:0-4=ring'" in output
