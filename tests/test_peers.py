"""benchmarks.peers: what it reads from its ranks, and one small run of every contender that needs no other package."""

import json
import sys

import pytest
from launch import child_environment, launch

from benchmarks import page
from benchmarks.peers import compare


def test_times_are_those_of_each_rank():
    ours = 'RESULT {"ranks": [{"step_ms": [1, 2]}, {"step_ms": [3, 4]}]}'
    apart = ['RESULT {"ranks": [{"step_ms": [1, 2]}]}', "[0] RESULT {" + '"ranks": [{"step_ms": [5, 6]}]}']
    peers = ["a warning", "RESULT 1 [3.5, 4]", "RESULT 0 [1, 2]"]
    assert compare._times(ours) == [[1, 2], [3, 4]]
    assert compare._times("\n".join(apart)) == [[1, 2], [5, 6]]
    assert compare._times("\n".join(peers)) == [[3.5, 4], [1, 2]]


def test_peers_get_the_versions_of_this_environment():
    here = compare.installed()
    for contender in compare.CONTENDERS.values():
        pins = compare._pins(contender)
        assert len(pins) == len(contender.packages)
        for name, _, version in (pin.partition("==") for pin in pins):
            assert version == here.get(name, "").partition("+")[0]
    (tensorflow, *_) = compare._pins(compare.CONTENDERS["mpi4py"])
    assert tensorflow.startswith("tensorflow"), tensorflow
    assert "==" in tensorflow


def test_wrong_use_is_explained(capsys):
    with pytest.raises(SystemExit):
        compare.arguments(["--contenders", "horovod"])
    assert "invalid choice: 'horovod'" in capsys.readouterr().err


def test_a_contender_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    calls = []

    def run(python, module, options, args, *, ranks, mpi, backend):
        calls.append((module, ranks))
        if "mpi4py" in module or (backend == "jax" and len(calls) > 7):
            raise RuntimeError("no such cluster")
        return 10.0 * ranks + len(calls)

    monkeypatch.setattr(compare, "run", run)
    contenders = ["keras_hpc", "mpi4py", "keras_hpc-jax", "DataParallel-jax"]
    with pytest.raises(SystemExit, match="Failed: mpi4py, Keras on JAX"):
        compare.main(["--rounds", "2", "--shared", "--out", str(tmp_path), "--contenders", *contenders])
    found = json.loads((tmp_path / "lenet.json").read_text())
    assert [line["contender"] for line in found["lines"]] == ["keras_hpc", "keras_hpc-jax", "DataParallel-jax"]
    assert [len(times) for times in found["steps"]["2 ranks"].values()] == [2, 1, 1]
    assert "2 rounds" in found["title"]
    said = capsys.readouterr().out
    assert "1 round of 20 steps" in said, "each round writes what is known"
    assert said.count("no such cluster") == 2


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_run(tmp_path):
    contenders = ["apart", "keras_hpc", "mpi4py", "DataParallel-jax", "DDP-keras", "keras_hpc-torch"]
    words = ["--model", "lenet", "--batch-size", "4", "--steps", "3", "--rounds", "1", "--shared"]
    command = [sys.executable, "-m", "benchmarks.peers.compare", *words, "--out", str(tmp_path), "--contenders"]
    done = launch(1, [*command, *contenders], timeout=500, env=child_environment("tensorflow"), mpi=False)
    assert done.returncode == 0, done.output
    found = json.loads((tmp_path / "lenet.json").read_text())
    assert [line["contender"] for line in found["lines"]] == contenders
    for line in found["lines"]:
        assert line["efficiency"] == pytest.approx(line["1 rank ms"] / line["2 ranks ms"])
        assert line["exposed ms"] == pytest.approx(line["2 ranks ms"] - line["1 rank ms"])
    assert (tmp_path / "lenet.png").read_bytes().startswith(b"\x89PNG")
    shown = page.page([found]).splitlines()
    assert [line.split("|")[1].strip() for line in shown if line.startswith("| ")] == ["2 ranks with", *contenders]
