"""What a user sees who takes the wrong --mpi of srun, as docs/clusters.md quotes it. Other rows have own tests."""

import re
from pathlib import Path

import pytest
from launch import ROOT

pytestmark = [pytest.mark.mpi, pytest.mark.soak]

CHOSEN_MPIS = ("mpich", "openmpi")
TRAIN = Path(__file__).parent / "train.py"
WRONG = {
    "mpich": ("pmix", "Runtime environment uses unsupported PMI version PMIx. Aborting."),
    "openmpi": (
        "pmi2",
        "LaunchError: an mpiexec or srun that speaks PMI (MPICH, Intel MPI) started 2 processes (PMI_SIZE=2), but the "
        "MPI library of this process sees only one: Open MPI v",
    ),
}


def test_the_wrong_mpi_option(mpi, python_and_environment, slurm):
    option, said = WRONG[mpi.name]
    python, environment = python_and_environment
    command = f"timeout 60 srun --mpi={option} -N2 python {TRAIN} report.json"
    done = slurm(2, command, python=python, env=environment, status=None, timeout=90)
    assert said in done.output, done.output
    assert said in re.sub(r"\s+", " ", (ROOT / "docs" / "clusters.md").read_text())
