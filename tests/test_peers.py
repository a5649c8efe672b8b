"""benchmarks.peers: how it starts its ranks, what it reads from them, and small runs of all contenders."""

import json
import shlex
import sys
import types
from pathlib import Path

import pytest
from launch import child_environment, launch

from benchmarks import page
from benchmarks.peers import compare, installing, ranks
from benchmarks.peers.contenders import ALONE, CONTENDERS


def test_times_are_those_of_each_rank():
    ours = 'RESULT {"ranks": [{"step_ms": [1, 2]}, {"step_ms": [3, 4]}]}'
    apart = ['RESULT {"ranks": [{"step_ms": [1, 2]}]}', "[0] RESULT {" + '"ranks": [{"step_ms": [5, 6]}]}']
    peers = ["a warning", "RESULT 1 [3.5, 4]", "RESULT 0 [1, 2]"]
    assert ranks.times(ours) == [[1, 2], [3, 4]]
    assert ranks.times("\n".join(apart)) == [[1, 2], [5, 6]]
    assert ranks.times("\n".join(peers)) == [[3.5, 4], [1, 2]]


def test_peers_get_the_versions_of_this_environment():
    here = installing.installed()
    for contender in CONTENDERS.values():
        pins = installing.pins(contender)
        assert len(pins) == len(contender.packages)
        for name, _, version in (pin.partition("==") for pin in pins):
            assert version == here.get(name, "").partition("+")[0]
    (tensorflow, *_) = installing.pins(CONTENDERS["mpi4py"])
    assert tensorflow.startswith("tensorflow"), tensorflow
    assert "==" in tensorflow


def test_wrong_use_is_explained(capsys):
    with pytest.raises(SystemExit):
        compare.arguments(["--contenders", "ray"])
    assert "invalid choice: 'ray'" in capsys.readouterr().err


def test_a_contender_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    calls = []

    def run(python, module, options, args, *, ranks, mpi, backend):
        calls.append((module, ranks))
        if "mpi4py" in module or (backend == "jax" and len(calls) > 7):
            raise RuntimeError("no such cluster")
        return 10.0 * ranks + len(calls)

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    contenders = ["keras_hpc", "mpi4py", "keras_hpc-jax", "DataParallel-jax"]
    with pytest.raises(SystemExit, match="Failed: mpi4py, Keras on JAX"):
        compare.main(["--rounds", "2", "--shared", "--out", str(tmp_path), "--contenders", *contenders])
    found = json.loads((tmp_path / "lenet.json").read_text())
    assert [line["contender"] for line in found["lines"]] == ["keras_hpc", "keras_hpc-jax", "DataParallel-jax"]
    assert [len(times) for times in found["steps"]["2 ranks"].values()] == [2, 1, 1]
    assert "2 rounds" in found["title"]
    assert ", HOROVOD_CYCLE_TIME=2" in found["title"]
    said = capsys.readouterr().out
    assert "1 round of 20 steps" in said, "each round writes what is known"
    assert said.count("no such cluster") == 2


def test_every_contender_has_its_own_environment_and_a_way_alone():
    for name, contender in CONTENDERS.items():
        way = ALONE[contender.alone]
        assert way.environment in ("", *CONTENDERS), name
        assert not contender.installer or (installing.HERE / contender.installer).exists(), name
        assert installing.python_of(name, shared=True) == Path(sys.executable), name


class Network:
    """Stands for hosts."""

    agent = "/agent"
    names = ("host1", "host2")
    environment = types.MappingProxyType({"PRTE_MCA_plm_ssh_agent": "/agent"})

    def on_head(self, command):
        return [self.agent, "head", shlex.join(command)]


def test_ranks_without_mpiexec_learn_of_each_other():
    alone = ranks._one_by_one(["train"], {}, 1, None)
    assert alone == [(["train"], {})]
    here = ranks._one_by_one(["train", "a b"], {}, 2, None)
    assert [command for command, _ in here] == [["train", "a b"]] * 2
    assert [more["RANK"] for _, more in here] == ["0", "1"]
    first, second = here[0][1]["ADDRESSES"].split(",")
    assert first == f"{here[1][1]['MASTER_ADDR']}:{here[1][1]['MASTER_PORT']}"
    assert second.startswith("127.0.0.1:")
    assert first != second
    there = ranks._one_by_one(["train", "a b"], {}, 2, Network())
    assert [command for command, _ in there] == [["/agent", name, "train 'a b'"] for name in Network.names]
    assert there[1][1]["ADDRESSES"].startswith("host1:")
    assert ",host2:" in there[0][1]["ADDRESSES"]


def test_mpiexec_puts_a_rank_on_each_host_with_the_settings_of_all(monkeypatch):
    found = ranks.launchers.Mpiexec(Path("/env/bin/mpiexec"), "Open MPI")
    monkeypatch.setattr(ranks.launchers, "mpiexec_at", lambda path: found)
    settings = {"MALLOC_ARENA_MAX": "1", "HOROVOD_CYCLE_TIME": "2"}
    ((command, more),) = ranks._by_mpiexec(["/env/bin/python", "-m", "x"], settings, 2, None)
    assert command[:3] == ["/env/bin/mpiexec", "-n", "2"]
    assert more["PRTE_MCA_hwloc_default_binding_policy"] == "none", "the shim binds ranks"
    ((command, more),) = ranks._by_mpiexec(["/env/bin/python", "-m", "x"], settings, 2, Network())
    assert command[:2] == ["/agent", "head"]
    assert "--host host1:1,host2:1" in command[2]
    assert "env MALLOC_ARENA_MAX=1 HOROVOD_CYCLE_TIME=2 /env/bin/python" in command[2]
    assert more["PRTE_MCA_plm_ssh_agent"] == "/agent"


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


PLAIN_STEP = """
import argparse, itertools
import numpy as np, tensorflow as tf
from benchmarks.peers import common, tensorflow_horovod

args = argparse.Namespace(model="lenet", batch_size=4, steps=3)
x, y = common.batches(args)
by_fit, by_step = common.keras_model(args), common.keras_model(args)
by_fit.fit(x, y, batch_size=4, shuffle=False, verbose=0)
step = tensorflow_horovod.step_of(by_step, lambda tape: tape)
samples = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
for _ in range(args.steps):
    step(samples)
for one, other in zip(by_fit.weights, by_step.weights, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
moved = max(float(abs(v.numpy()).max()) for v in by_step.optimizer.variables[2:])
assert moved > 0, "momentum"
"""


@pytest.mark.soak
def test_the_plain_step_of_tensorflow_is_that_of_fit():
    command = [sys.executable, "-c", PLAIN_STEP]
    done = launch(1, command, timeout=300, env=child_environment("tensorflow"), mpi=False)
    assert done.returncode == 0, done.output


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_run_of_those_with_packages_of_their_own(tmp_path):
    """Makes their environments, if there are none: Horovod is built in two to five minutes."""
    words = ["--batch-size", "4", "--steps", "3", "--rounds", "1", "--contenders", "Horovod", "MWMS"]
    command = [sys.executable, "-m", "benchmarks.peers.compare", *words, "--out", str(tmp_path)]
    done = launch(1, command, timeout=1200, env=child_environment("tensorflow"), mpi=False)
    assert done.returncode == 0, done.output
    found = json.loads((tmp_path / "lenet.json").read_text())
    assert [line["contender"] for line in found["lines"]] == ["Horovod", "MWMS"]
    assert found["versions"]["horovod"] == "0.28.1"
    assert "tf-keras" in found["versions"]
