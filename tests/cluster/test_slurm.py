"""In a real Slurm of several hosts: nodes and ranks are seen as they are, and they train as one rank does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import child_environment, launch

FOLDER = Path(__file__).parent
TRAIN = FOLDER / "train.py"
CANNOT = 77  # with_slurm.py where a machine cannot do it
# With two network devices (lo is one) MPICH 5.0.2's UCX has addresses that Slurm 22.05's pmi2 cuts off, and MPI_Init
# fails or hangs: see docs/clusters.md.
ONE_DEVICE = {"UCX_NET_DEVICES": "eth0"}

pytestmark = pytest.mark.mpi


@pytest.fixture
def slurm(tmp_path):
    """A function that runs a shell command in a Slurm of so many hosts, in an empty folder."""

    def run(hosts, command, *, options=(), timeout=240, expect_failure=False):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = [sys.executable, str(FOLDER / "with_slurm.py"), *options, str(hosts), "bash", "-c", command]
        env = child_environment("jax", {"PATH": path} | ONE_DEVICE)
        done = launch(1, words, timeout=timeout, env=env, cwd=tmp_path, mpi=False)
        if done.returncode == CANNOT:
            pytest.skip(done.output.strip())
        assert done.returncode is not None, f"still running after {timeout} s:\n{done.output}"
        assert not done.leaked_processes
        assert (done.returncode != 0) == expect_failure, done.output
        return done.output

    return run


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    report = tmp_path_factory.mktemp("one") / "report.json"
    done = launch(1, [sys.executable, str(TRAIN), str(report)], timeout=120, env=child_environment("jax"), mpi=False)
    assert done.returncode == 0, done.output
    return json.loads(report.read_text())


def _check(report, one_rank, nodes, per_node):
    """The report of `train.py` on so many nodes and ranks of each, in blocks."""
    assert report["nodes"] == nodes
    assert report["ranks"] == [
        {
            "rank": rank,
            "node": rank // per_node,
            "local_rank": rank % per_node,
            "local_size": per_node,
            "host": f"host{rank // per_node + 1}",
        }
        for rank in range(nodes * per_node)
    ]
    for name, values in one_rank["history"].items():
        np.testing.assert_allclose(report["history"][name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(report["bias"], one_rank["bias"], rtol=1e-4, atol=1e-6)
    assert np.ptp(one_rank["history"]["loss"]) > 0.01, "nothing was learnt"


def test_one_task_per_node(slurm, one_rank, tmp_path):
    slurm(4, f"srun --mpi=pmi2 -N4 --ntasks-per-node=1 python {TRAIN} report.json")
    _check(json.loads((tmp_path / "report.json").read_text()), one_rank, 4, 1)


def test_two_tasks_per_node(slurm, one_rank, tmp_path):
    slurm(2, f"srun --mpi=pmi2 -N2 --ntasks-per-node=2 python {TRAIN} report.json")
    _check(json.loads((tmp_path / "report.json").read_text()), one_rank, 2, 2)


def test_mpiexec_and_keras_hpc_run_in_a_batch_job(slurm, one_rank, tmp_path):
    """mpiexec finds the hosts of the allocation; `keras_hpc run` takes srun, with the --mpi that belongs to the MPI."""
    (tmp_path / "job.sh").write_text(
        "#!/bin/bash\n"
        "set -e\n"
        f"mpiexec -n 4 python {TRAIN} mpiexec.json\n"
        f"python -m keras_hpc run -n 2 --output-dir out {TRAIN} run.json\n"
    )
    slurm(2, "sbatch --wait -N2 --ntasks-per-node=2 -o log.txt job.sh; status=$?; cat log.txt; exit $status")
    for name, per_node in (("mpiexec", 2), ("run", 1)):
        _check(json.loads((tmp_path / f"{name}.json").read_text()), one_rank, 2, per_node)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["rank0.txt", "rank1.txt"]
    assert "trained on 2 ranks of 2 nodes" in (tmp_path / "out" / "rank0.txt").read_text()


def test_the_template(slurm, one_rank, tmp_path):
    template = subprocess.run([sys.executable, "-m", "keras_hpc", "template", "slurm"], capture_output=True, check=True)
    (tmp_path / "job.sh").write_text(template.stdout.decode().replace("train.py", f"{TRAIN} report.json"))
    sizes = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1"
    slurm(2, f"sbatch --wait {sizes} --output=log.txt job.sh; status=$?; cat log.txt; exit $status")
    _check(json.loads((tmp_path / "report.json").read_text()), one_rank, 2, 1)


def test_srun_without_mpi_is_refused(slurm, tmp_path):
    """Each task would train alone and take itself for rank 0."""
    output = slurm(2, f"srun -N2 --ntasks-per-node=1 python {TRAIN} report.json", expect_failure=True)
    assert output.count("LaunchError: srun started 2 processes (SLURM_STEP_NUM_TASKS=2)") == 2, output
    assert "srun --mpi=pmi2" in output
    assert not (tmp_path / "report.json").exists()


def test_a_task_that_is_killed_ends_the_job(slurm, tmp_path):
    script = FOLDER.parent / "ranks" / "fail_training.py"
    output = slurm(
        2, f"SLURM_KILL_BAD_EXIT=1 timeout 100 srun --mpi=pmi2 -N2 python {script} kill; test $? != 124", timeout=120
    )
    assert "FAILS AT" in output
    assert "trained to the end" not in output


def test_the_status_of_the_command_comes_back(slurm):
    slurm(1, "srun hostname | grep -qx host1 && exit 7", expect_failure=True)
