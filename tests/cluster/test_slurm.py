"""In a real Slurm of several hosts: nodes and ranks are seen as they are, and they train as one rank does."""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from launch import ROOT

pytestmark = pytest.mark.mpi

TRAIN = Path(__file__).parent / "train.py"
SHOW = "import os, keras_hpc as k; k.init(); print(k.rank(), 'of', k.size(), 'on', os.uname().nodename)"
# What `sbatch --wait` does, but without looking only every half a minute.
BATCH = "--output=log.txt job.sh && while squeue --noheader | grep -q .; do sleep 0.2; done; cat log.txt"


def test_one_task_per_node(slurm, check_report):
    slurm(4, f"srun --mpi=pmi2 -N4 --ntasks-per-node=1 python {TRAIN} report.json")
    check_report("report.json", nodes=4, per_node=1)


@pytest.mark.soak
def test_two_tasks_per_node(slurm, check_report):
    slurm(2, f"srun --mpi=pmi2 -N2 --ntasks-per-node=2 python {TRAIN} report.json")
    check_report("report.json", nodes=2, per_node=2)


@pytest.mark.soak
def test_mpiexec_and_keras_hpc_run_in_a_batch_job(slurm, check_report, tmp_path):
    """mpiexec finds the hosts of the allocation; `keras_hpc run` takes srun, with the --mpi that belongs to the MPI."""
    (tmp_path / "job.sh").write_text(
        f"#!/bin/bash\nmpiexec -n 2 python {TRAIN} mpiexec.json\npython -m keras_hpc run --output-dir out show.py\n"
    )
    (tmp_path / "show.py").write_text(SHOW)
    slurm(2, f"sbatch -N2 --ntasks-per-node=1 {BATCH}")
    check_report("mpiexec.json", nodes=2, per_node=1)
    written = {path.name: path.read_text().splitlines()[-1] for path in (tmp_path / "out").iterdir()}
    assert written == {"rank0.txt": "0 of 2 on host1", "rank1.txt": "1 of 2 on host2"}


@pytest.mark.soak
def test_the_template(slurm, check_report, tmp_path):
    options = ["--nodes", "2", "--cores-per-rank", "1", "--time", "0:20:00", str(TRAIN), "report.json"]
    command = [sys.executable, "-m", "keras_hpc", "template", "slurm", *options]
    template = subprocess.run(command, capture_output=True, check=True)
    (tmp_path / "job.sh").write_text(template.stdout.decode())
    slurm(2, f"sbatch {BATCH}")
    check_report("report.json", nodes=2, per_node=1)


@pytest.mark.soak
def test_the_job_of_resnet50(slurm, tmp_path):
    """As it stands, but with fewer nodes, a smaller network and images of ours, whose class is the brightest color."""
    random = np.random.default_rng(0)
    (tmp_path / "imagenet").mkdir()
    for name, count in (("train", 96), ("validation", 32)):
        label = random.integers(0, 3, count)
        image = random.integers(0, 100, (count, 64, 64, 3), "uint8")
        image[np.arange(count), ..., label] += 120
        with h5py.File(tmp_path / "imagenet" / f"{name}-0.h5", "w") as file:
            file.update({"image": image, "label": label})
    job = (ROOT / "examples" / "resnet50" / "job.sh").read_text()
    smaller = {
        "nodes=32": "nodes=2",
        "tasks-per-node=2": "tasks-per-node=1",
        "per-task=32": "per-task=1",
        "classes 1000": "classes 3",
        "width 64": "width 4",
        "epochs 100": "epochs 4 --learning-rate 1",
        "global-batch 8192": "global-batch 16",
    }
    for old, new in smaller.items():
        assert old in job
        job = job.replace(old, new)
    (tmp_path / "job.sh").write_text(job)
    said = slurm(2, f"sbatch {BATCH}", timeout=400, env={"PYTHONPATH": str(ROOT)}).output
    assert "keras_hpc: 2 ranks on 2 nodes" in said
    error = float(said.rpartition("test error ")[2].partition("%")[0])
    assert error < 50, "a third is right by chance"


@pytest.mark.soak
def test_a_job_that_is_warned_goes_into_the_queue_again(slurm, tmp_path):
    """The template's recipe. Slurm waits two minutes before a job that was put into the queue again may run."""
    template = subprocess.run([sys.executable, "-m", "keras_hpc", "template", "slurm"], capture_output=True, check=True)
    script = TRAIN.parent.parent / "ranks" / "train_resume.py"
    text = template.stdout.decode().replace("train.py", f"{script} . whole 4 wait").replace("##SBATCH", "#SBATCH")
    text = text.replace("#SBATCH --gpus-per-task=1\n", "").replace("checkpoints/run", "run")
    (tmp_path / "job.sh").write_text(text)
    wait = "while ! grep -q TRAINS log.txt; do sleep 0.2; done; scancel --signal=USR1 1"
    slurm(
        2,
        f"sbatch --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --output=log.txt job.sh && {wait}; "
        "while squeue --noheader | grep -q .; do sleep 0.2; done; cat log.txt",
        timeout=400,
        env={"KERAS_BACKEND": "torch"},
    )
    said = (tmp_path / "log.txt").read_text()
    assert "SIGUSR1: saved" in said
    assert "goes on from run/step-" in said
    assert (tmp_path / "run.json").read_text() == (tmp_path / "whole.json").read_text()


def test_srun_without_mpi_is_refused(slurm, tmp_path):
    """Each task would train alone and take itself for rank 0."""
    output = slurm(2, f"srun -N2 --ntasks-per-node=1 python {TRAIN} report.json", status=None).output
    assert output.count("LaunchError: srun started 2 processes (SLURM_STEP_NUM_TASKS=2)") == 2, output
    assert "srun --mpi=pmi2" in output
    assert not (tmp_path / "report.json").exists()


def test_a_task_that_is_killed_ends_the_job(slurm):
    script = TRAIN.parent.parent / "ranks" / "fail_training.py"
    command = f"SLURM_KILL_BAD_EXIT=1 timeout 100 srun --mpi=pmi2 -N2 python {script} kill"
    done = slurm(2, command, status=None, timeout=120)
    assert done.returncode != 124, done.output
    assert "FAILS AT" in done.output
    assert "trained to the end" not in done.output


def test_the_status_of_the_command_comes_back(slurm):
    slurm(1, "srun hostname | grep -qx host1 && exit 7", status=7)
