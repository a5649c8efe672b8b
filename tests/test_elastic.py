"""`python -m keras_hpc run --elastic`: a job goes on without a rank that was killed, and ends with the same bits."""

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from launch import ROOT, child_environment

pytestmark = pytest.mark.mpi

TRAIN = ROOT / "tests" / "ranks" / "train_virtual.py"
STEPS = 51  # of three epochs
SHORTCUTS = ("XLA_FLAGS", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
# The last rank kills itself, or fails, before all others are through; what is asked for is in the first argument.
SCRIPT = """
import os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
if comm.rank == comm.size - 1 and comm.size > 2:
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Abort(3)
comm.Barrier()
sys.stdout.write(f"{comm.rank} of {comm.size} is through\\n")
"""


def elastic(ranks, *words, backend="tensorflow", timeout=120):
    return subprocess.run(
        [sys.executable, "-m", "keras_hpc", "run", "--elastic", "-n", str(ranks), "--no-label", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=child_environment(backend, lean=True),
    )


def test_a_killed_rank_is_left_out_until_the_job_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = elastic(4, script, "kill")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"starts again with (\d)", done.stderr) == ["3", "2"]
    assert sorted(re.findall(r".*is through", done.stdout)) == ["0 of 2 is through", "1 of 2 is through"]


def test_an_error_of_the_script_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = elastic(3, script, "fail")
    assert done.returncode == 3, done.stderr
    assert "starts again" not in done.stderr


def test_hosts_are_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = elastic(2, "--hosts", "a,b", script)
    assert done.returncode == 1
    assert "`--elastic` starts with -n ranks" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_random_kills_end_with_the_bits_of_a_job_that_was_left_alone(backend):
    """Twenty of twenty in all: one of 4 ranks, before any step, with a checkpoint in memory after every fifth."""
    source = random.Random(backend)
    memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        digests = [_digest(elastic(4, TRAIN, backend=backend))]
        for number in range(8 if backend == "jax" else 6):
            order = f"{source.randrange(4)} {source.randrange(STEPS)}"
            (memory / f"{number}.kill").write_text(order)
            began = time.monotonic()
            done = elastic(4, TRAIN, memory / str(number), 5, backend=backend)
            assert "starts again with 3" in done.stderr, f"{order}: {done.stderr}"
            digests.append(_digest(done))
            sys.stdout.write(f"{backend}, rank and step {order}: {time.monotonic() - began:.1f} s\n")
        assert len(set(digests)) == 1, digests
    finally:
        shutil.rmtree(memory)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_one_to_eight_ranks_end_with_the_same_bits(backend, run_ranks):
    """With the frameworks as users have them, without what makes tests short."""
    unset = [word for name in SHORTCUTS for word in ("-u", name)]
    runs = [run_ranks(n, [TRAIN], backend=backend, before=["env", *unset]) for n in (1, 2, 3, 4, 8)]
    digests = [_digest_of(done.output) for done in runs]
    assert len(set(digests)) == 1, digests


def _digest(done):
    assert done.returncode == 0, done.stderr
    return _digest_of(done.stdout)


def _digest_of(text):
    (line,) = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(line)["digest"]
