"""`python -m keras_hpc template`: scripts a shell can read. PBS's is run on hosts here, Slurm's in tests/cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import child_environment

from benchmarks.hosts import Hosts, HostsError

SHOW = "from mpi4py import MPI; import os; print(MPI.COMM_WORLD.rank, os.uname().nodename)"


def _template(system, status=0):
    command = [sys.executable, "-m", "keras_hpc", "template", system]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


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
        ("flux", ["cpu-affinity=per-task", "exit-on-error", "pmi=pmix", "OMP_NUM_THREADS"]),
    ],
)
def test_scripts_set_what_matters(system, said):
    text = _template(system)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)
    assert text.startswith("#!/bin/bash\n")
    assert [word for word in said if word not in text] == []


def test_an_unknown_system_is_explained():
    assert "invalid choice: 'lsf'" in _template("lsf", status=2)


@pytest.mark.mpi
def test_pbs_on_two_hosts(tmp_path):
    """The hosts in the order of the file, with as many ranks as it has lines for them."""
    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "nodes").write_text("host2\nhost1\nhost2\n")
    (tmp_path / "job.sh").write_text(_template("pbs"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in child_environment().items() if not name.endswith("_THREADS")}
    env |= {"PATH": path, "PBS_O_WORKDIR": str(tmp_path), "PBS_NODEFILE": str(tmp_path / "nodes")}
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
    assert [line[:3] for line in words] == [["[0]", "0", "host2"], ["[1]", "1", "host2"], ["[2]", "2", "host1"]], done
