"""Every way to let others wait, by mpiexec on one host and by srun on two, with MPICH and Open MPI or `--every-mpi`."""

import re
from pathlib import Path

import pytest
from launch import launch

pytestmark = [pytest.mark.mpi, pytest.mark.soak]

CHOSEN_MPIS = ("mpich", "openmpi")
SCRIPT = Path(__file__).parent.parent / "ranks" / "fail_waiting.py"
END_SECONDS = 4 + 20  # timeout_seconds of the script, and in what time the job must end after it
SAID = {
    "sleep": r"innermost first:\n.* in misbehave\n",
    "loop": r"innermost first:\n.* in loop\n.* in misbehave\n",
    "skip": r"innermost first:\n(.*keras_hpc/.*\n)+.* in misbehave\n",
    "stop": r"rank 1 \(\S+, process \d+\) does not answer: its process is stopped",
    "kill": r"rank 1 \(\S+, process \d+\) does not answer: its process has ended",
}


@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("launcher", ["mpiexec", "srun"])
def test_a_rank_that_lets_others_wait_ends_the_job(mpi, launcher, how, python_and_environment, request, tmp_path):
    python, environment = python_and_environment
    if launcher == "mpiexec":
        # More ranks than cores, as Open MPI 5 and 4 allow it.
        policy = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
        command = [str(mpi.mpiexec(python)), "-n", "3", str(python), str(SCRIPT), f"{how}:1"]
        done = launch(1, command, timeout=120, env=environment | policy, cwd=tmp_path, mpi=False)
    else:
        # Without --kill-on-bad-exit: Slurm itself would let a job wait for a task that was killed.
        command = f"timeout 100 srun --mpi={mpi.srun} -N2 -n3 python {SCRIPT} {how}:1"
        slurm = request.getfixturevalue("slurm")
        done = slurm(2, command, python=python, env=environment, status=None, timeout=120)
    assert done.returncode not in (0, None, 124), done.output
    assert not done.leaked_processes
    assert "went on to the end" not in done.output
    assert done.ended_at - float(re.search(r"FAILS AT ([\d.]+)", done.output)[1]) < END_SECONDS, done.output
    if how == "kill" and (launcher, mpi.name) != ("srun", "mpich"):
        return  # the launcher ends the job at once
    assert re.search(
        r"ranks 0, 2 waited \d s in step 4 of plan 'gradients' \(team 0\), tensor 'kernel'\.\n", done.output
    )
    assert re.search(r"  arrived: ranks 0, 2\n.*  missing: rank 1\n", done.output), done.output
    assert re.search(SAID[how], done.output), done.output
    assert "ends the job: " in done.output
