"""`keras-hpc template`: scripts a shell can read. PBS' and LSF's are run on hosts here, Slurm's in tests/cluster."""

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import child_environment

from benchmarks.hosts import Hosts, HostsError
from keras_hpc.tools import template

SHOW = "from mpi4py import MPI; import os; print(MPI.COMM_WORLD.rank, os.uname().nodename)"


def _run(*words):
    """Status and output of the command, without a process of its own."""
    parser = argparse.ArgumentParser()
    template.add_command(parser.add_subparsers())
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            arguments = parser.parse_args(["template", *map(str, words)])
            status = arguments.run(arguments)
        except SystemExit as error:  # a text, which Python prints as it exits with 1
            status = error.code if isinstance(error.code, int) else 1
            said.write("" if isinstance(error.code, int) else str(error.code))
    return status, said.getvalue()


def _template(*words, status=0):
    ended, said = _run(*words)
    assert ended == status, said
    return said


@pytest.mark.parametrize(
    ("system", "said"),
    [
        (
            "slurm",
            [
                "SLURM_KILL_BAD_EXIT=1",
                "--cpu-bind=cores",
                "--mpi=pmi2",
                "pmix",
                "OMP_NUM_THREADS",
                "--ntasks-per-node=1",
                "--signal=USR1@120",
                "scontrol requeue",
            ],
        ),
        ("pbs", ["mpiprocs=1", "PBS_NODEFILE", "keras_hpc run --hosts", "OMP_NUM_THREADS"]),
        ("lsf", ["span[ptile=32]", "LSB_DJOB_HOSTFILE", "keras_hpc run --hosts", "OMP_NUM_THREADS"]),
        ("pals", ["--depth $cores", "--cpu-bind depth", "MPI4PY_LIBMPI", "OMP_NUM_THREADS"]),
        ("flux", ["cpu-affinity=per-task", "exit-on-error", "pmi=pmix", "OMP_NUM_THREADS"]),
    ],
)
def test_scripts_set_what_matters(system, said):
    text = _template(system)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    assert text.startswith("#!/bin/bash\n")
    assert [word for word in said if word not in text] == []


def test_an_unknown_system_is_explained():
    assert "invalid choice: 'condor'" in _template("condor", status=2)


OPTIONS = ["--nodes", 3, "--ranks-per-node", 2, "--cores-per-rank", 8, "--time", "2:30:30"]
SCRIPT = ["run", "me.py", "--nodes", "9", "a b"]
SITE = ["--account", "abc123", "--queue", "debug", "--env", "module:gcc/12,mpich", "--env", "conda:my env"]


@pytest.mark.parametrize(
    ("system", "said"),
    [
        (
            "slurm",
            ["--nodes=3", "--ntasks-per-node=2", "--cpus-per-task=8", "--time=02:30:30", "--account=abc123"]
            + ["--partition=debug", "\n#SBATCH --gpus-per-task=1", "python run me.py --nodes 9 'a b'\n"],
        ),
        (
            "pbs",
            ["select=3:ncpus=16:mpiprocs=2:ngpus=4", "walltime=02:30:30", "#PBS -A abc123", "#PBS -q debug"]
            + ["\"$hosts\" run me.py --nodes 9 'a b'\n"],
        ),
        ("pals", ["select=3:ncpus=16:mpiprocs=2:ngpus=4", "nodes=3", "ranks_per_node=2", "cores=8", "#PBS -A abc123"]),
        (
            "lsf",
            ["#BSUB -n 48", "ptile=16", "#BSUB -W 02:31", "#BSUB -P abc123", "#BSUB -q debug", '-gpu "num=4"'],
        ),
        ("flux", ["--time-limit=151m", "--nodes=3", "--bank=abc123", "--queue=debug", "--gpus-per-task=2"]),
    ],
)
def test_options_are_filled_in(system, said):
    text = _template(system, *OPTIONS, *SITE, "--gpus-per-node", 4, *SCRIPT)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    assert [word for word in said if word not in text] == []
    assert "module load gcc/12 mpich\neval \"$(conda shell.bash hook)\" && conda activate 'my env'\n" in text
    assert "@" not in text.replace("USR1@120", "")


def test_scripts_and_modules_are_given_as_to_run():
    assert " python train.py\n" in _template("slurm")
    assert " python train.py --time x -m y\n" in _template("slurm", "--nodes", 2, "train.py", "--time", "x", "-m", "y")
    assert " python -m package.train -x\n" in _template("pals", "-m", "package.train", "-x")


def test_each_system_says_what_it_takes():
    shown = {system: _template(system, "--help") for system in template._SYSTEMS}
    assert [system for system, said in shown.items() if "--account" in said] == ["slurm", "pbs", "pals", "lsf", "flux"]
    assert [system for system, said in shown.items() if "--image" in said] == ["kubernetes"]
    assert [system for system, said in shown.items() if "--nodes" not in said] == ["apptainer-cpu", "apptainer-cuda"]


def test_slurm_reads_the_directives():
    """Before them stands nothing but comments, and none is left that asks for nothing."""
    text = _template("slurm", "--gpus-per-node", 4)
    head = text[: text.index("\n\n")]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "--ntasks-per-node=4" in head, "a rank for each GPU"
    assert "##SBATCH --gpus" not in head
    assert "##SBATCH --gpus-per-task=1" in _template("slurm")


def test_kubernetes_job_has_what_the_operator_asks_for():
    yaml = pytest.importorskip("yaml", reason="of the tests' extra")
    options = ["--nodes", 3, "--ranks-per-node", 2, "--cores-per-rank", 4, "--gpus-per-node", 2, "--time", "1:00:00"]
    job = yaml.safe_load(_template("kubernetes", *options, "--image", "r.example.org/a/b:1", "a.py", "x y"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert set(job["spec"]) == {
        "slotsPerWorker",
        "mpiImplementation",
        "sshAuthMountPath",
        "runPolicy",
        "mpiReplicaSpecs",
    }
    assert job["spec"]["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert job["spec"]["runPolicy"] == {"cleanPodPolicy": "Running", "activeDeadlineSeconds": 3600}
    (launcher,), (worker,) = (
        job["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]["containers"] for kind in ("Launcher", "Worker")
    )
    assert launcher["command"] + launcher["args"] == ["mpirun", "-n", "6", "-ppn", "2", "python", "a.py", "x y"]
    assert launcher["image"] == worker["image"] == "r.example.org/a/b:1"
    assert worker["resources"]["limits"] == {"cpu": 8, "memory": "16Gi", "nvidia.com/gpu": 2}


@pytest.mark.parametrize("name", ["apptainer-cpu", "apptainer-cuda"])
def test_apptainer_definitions(name):
    text = _template(name)
    assert re.search(r"^Bootstrap: docker\nFrom: \S+:\S+$", text, re.M)
    sections = re.split(r"^%(\w+)$", text, flags=re.M)
    parts = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert {"post", "environment", "runscript", "help"} <= set(parts)
    for section in ("post", "environment", "runscript"):
        subprocess.run(["sh", "-n"], input=parts[section], text=True, check=True, timeout=10)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--time", "soon"], "Received: 'soon'"),
        (["slurm", "--time", "0:00"], "Received: '0:00'"),
        (["slurm", "--nodes", "0"], "Received: '0'"),
        (["slurm", "--account", "a b"], "Received: 'a b'"),
        (["slurm", "--queue", "a\n#SBATCH -N9"], "expected one word"),
        (["slurm", "--env", "pipenv:x"], "Received: 'pipenv:x'"),
        (["slurm", "--image", "x"], "unrecognized arguments: --image"),
        (["kubernetes", "--account", "x"], "unrecognized arguments: --account"),
        (["apptainer-cpu", "--gpus-per-node", "1"], "unrecognized arguments: --gpus-per-node"),
        (["--nodes", "4", "slurm"], "argument SYSTEM: invalid choice: '4'"),
        (["slurm", "-m"], "a module after -m"),
        (["slurm", "train.py", "a\n#SBATCH -N9"], "on one line"),
        (["slurm", "--gpus-per-node", "3", "--ranks-per-node", "2"], "Received: 3 GPUs, 2 ranks"),
    ],
)
def test_wrong_options_are_explained(words, said):
    status, output = _run(*words)
    assert status != 0
    assert said in output


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("system", "options", "nodes"),
    [
        ("pbs", [], ["host2", "host1", "host2"]),
        ("lsf", ["--ranks-per-node", 1], ["front", "host2", "host2", "host1", "host1"]),
    ],
)
def test_on_two_hosts(system, options, nodes, tmp_path):
    """The hosts in the order of the file: PBS' has as many lines as a host has ranks, LSF's as it has slots."""
    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    (tmp_path / "job.sh").write_text(_template(system, *options))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in child_environment().items() if not name.endswith("_THREADS")}
    env |= {"PATH": path, "PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodes")}
    env |= {"LSB_DJOB_HOSTFILE": str(tmp_path / "nodes")}
    try:
        with Hosts(2) as hosts:
            command = hosts.on_head(["bash", "job.sh"])
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                cwd=tmp_path,
                env=env | hosts.environment,
            )
    except HostsError as why:
        pytest.skip(str(why))
    words = sorted(line.split() for line in done.stdout.splitlines())
    expected = {"pbs": ["host2", "host2", "host1"], "lsf": ["host2", "host1"]}[system]
    assert [line[:3] for line in words] == [[f"[{n}]", str(n), host] for n, host in enumerate(expected)], done
