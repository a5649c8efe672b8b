"""Every MPI: the same installed package, never rebuilt, trains on two hosts with two ranks each.

`make test` takes Open MPI here (all other tests use MPICH), `make test-mpi` all: `pytest --every-mpi`.
"""

from pathlib import Path

import pytest
from launch import launch

from benchmarks.hosts import Hosts, HostsError

pytestmark = pytest.mark.mpi

CHOSEN_MPIS = ("openmpi",)
TRAIN = Path(__file__).parent / "train.py"
SAYS = {"mpich": "MPICH", "openmpi": "Open MPI", "intel": "Intel(R) MPI"}


def test_mpiexec(mpi, python_and_environment, check_report, tmp_path):
    python, environment = python_and_environment
    command = [str(python), "-m", "keras_hpc", "run", "-n", "4", "--hosts", "host1,host2", str(TRAIN), "report.json"]
    try:
        with Hosts(2) as hosts:
            env = environment | hosts.environment
            done = launch(1, hosts.on_head(command), timeout=240, env=env, cwd=tmp_path, mpi=False)
    except HostsError as why:
        pytest.skip(str(why))
    if mpi.ends:
        assert done.returncode == 0, done.output
        assert not done.leaked_processes
    assert "trained on 4 ranks of 2 nodes" in done.output, done.output
    assert SAYS[mpi.name.removeprefix("debian-")] in done.output, "another MPI was used"
    check_report("report.json", nodes=2, per_node=2)


@pytest.mark.soak
def test_srun(mpi, python_and_environment, slurm, check_report):
    python, environment = python_and_environment
    command = f"salloc -N2 --ntasks-per-node=2 python -m keras_hpc run {TRAIN} report.json"
    done = slurm(2, command, python=python, env=environment, must_end=mpi.ends)
    assert "trained on 4 ranks of 2 nodes" in done.output, done.output
    check_report("report.json", nodes=2, per_node=2)
