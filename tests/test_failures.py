"""Bad luck: a job that cannot go on ends, on all ranks, soon, with a reason, and leaves nothing behind."""

import errno
import io
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from endings import END_SECONDS, check_end

from keras_hpc.job.exit import Guard
from keras_hpc.job.watchdog import thread

pytestmark = pytest.mark.mpi

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.parametrize(
    ("how", "visible"),
    [
        ("raise", ["RuntimeError: boom on the last rank", "in on_train_batch_end"]),
        ("exit", []),
        pytest.param("raise-exit", [], marks=pytest.mark.soak),
        pytest.param("exit-outside-training", [], marks=pytest.mark.soak),
        pytest.param("exit-text", ["bad luck on the last rank"], marks=pytest.mark.soak),
        ("kill", []),
        ("segv", ["Segmentation fault", "on_train_batch_end"]),
        ("thread", ["ZeroDivisionError", "RuntimeError: boom on the last rank"]),
        ("other-lengths", ["must make the same number of steps"]),
        # It waits elsewhere than the others; the first whose time is up ends the job.
        (
            "fewer-batches",
            [
                r"plan 'optimizer1' \(team 0\), .*\n.*  arrived: ranks 0, 1\n.*  missing: rank 2\n",
                r"ranks? 2 waited \d s in .*\n.*  arrived: rank 2\n.*  missing: ranks 0, 1\n",
                "ends the job: uncaught .*(not every rank has started it|Do all ranks make the same calls)",
            ],
        ),
    ],
)
def test_one_rank_ends_the_job(how, visible, run_ranks):
    # Who waits for whom is said of three; the others end in the same way, however many there are.
    ranks = 3 if how in ("raise", "kill", "fewer-batches") else 2
    done = run_ranks(ranks, [RANKS / "fail_training.py", how], backend="jax", expect_failure=True)
    for pattern in visible:
        assert re.search(pattern, done.output), done.output
    check_end(done)


def test_a_rank_that_fails_above_init_ends_the_job(run_ranks, tmp_path):
    """MPI waits for it in its start, and mpiexec of MPICH does not end."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nrank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
        "if rank == '1':\n    raise ValueError('above init')\n"
        "import keras_hpc\nkeras_hpc.init(stall_seconds=1, timeout_seconds=3)\n"
    )
    done = run_ranks(2, [script], backend="torch", expect_failure=True)
    assert "rank 0 waits in init() since 1 s, because other ranks have not started MPI" in done.output
    assert "rank 0 ends the job: other ranks have not started MPI within 3 s" in done.output
    assert "ValueError: above init" in done.output


@pytest.mark.parametrize("how", ["in-update", pytest.param("in-local-step", marks=pytest.mark.soak)])
def test_one_rank_that_fails_in_its_update_ends_the_job(how, run_ranks):
    """Others wait for its weights: a sharded optimizer's in the same step, those of local steps at the period's end."""
    done = run_ranks(2, [RANKS / "fail_training.py", how], backend="torch", expect_failure=True)
    assert "RuntimeError: boom on the last rank" in done.output
    assert "in update_step" in done.output
    check_end(done)


@pytest.mark.parametrize(
    ("how", "nodes"),
    [
        ("kill", 1),
        ("stop-calling", 2),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("kill", 2), ("stop-calling", 1))),
    ],
)
def test_a_rank_that_fails_in_the_middle_of_a_call_ends_the_job(how, nodes, run_ranks):
    env = {"MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    done = run_ranks(2, [RANKS / "fail_calls.py", how], backend="jax", env=env, expect_failure=True)
    if how == "stop-calling":
        assert re.search("Timeout.*Waited 4 s in allreduce", done.output), done.output
    check_end(done)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("leave", r"rank 1 has reached the end of its script, or called finalize, and others wait for it in allr"),
        ("exit", r"rank 1 ends the job: sys.exit\(7\) while other ranks go on"),
    ],
)
def test_a_rank_that_leaves_alone_is_named_on_other_nodes(how, why, run_ranks):
    """The engine sees who has left on its own node only."""
    env = {"MPIR_CVAR_NUM_CLIQUES": "2"}
    done = run_ranks(2, [RANKS / "fail_calls.py", how], backend="jax", env=env, expect_failure=True)
    assert re.search(why, done.output), done.output
    check_end(done)


@pytest.mark.parametrize(
    ("backend", "how", "where"),
    [
        ("torch", "raise", "forward"),
        pytest.param("torch", "kill", "forward", marks=pytest.mark.soak),
        ("torch", "sleep", "backward"),
        *(
            pytest.param(backend, how, where, marks=pytest.mark.soak)
            for backend in ("tensorflow", "jax")
            for how, where in (("kill", "backward"), ("raise", "backward"), ("sleep", "backward"), ("sleep", "forward"))
        ),
        *(pytest.param("torch", how, "backward", marks=pytest.mark.soak) for how in ("kill", "raise")),
    ],
)
def test_a_rank_that_does_not_come_to_an_exchange_ends_the_job(backend, how, where, run_ranks):
    done = run_ranks(2, [RANKS / "fail_spatial.py", how, where], backend=backend, expect_failure=True)
    failed_at = float(re.search(r"FAILS AT ([\d.]+)", done.output)[1])
    assert done.ended_at - failed_at < END_SECONDS
    assert "trained to the end" not in done.output
    if how == "sleep":
        place = rf"exchange model\d+/third/\d axis 1 {where}"
        assert re.search(
            rf"rank 0 waited \d s in {place} \(.*\n.*  arrived: rank 0\n.*  missing: rank 1\n", done.output
        ), done.output
        assert re.search(rf"Waited 4 s in {place} \(team 1, rank 0\), from rank 1\.", done.output), done.output


class Full(io.RawIOBase):
    """A file on a disk that is full for a while."""

    full = True

    def writable(self):
        return True

    def write(self, data):
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


def test_a_full_disk_does_not_keep_a_job_from_ending(monkeypatch):
    """What a rank has printed cannot be written, which is why it ends: it must not wait for the others then."""
    ended = []
    mpi = SimpleNamespace(MPI=SimpleNamespace(Is_finalized=lambda: False))
    monkeypatch.setitem(sys.modules, "mpi4py", mpi)
    files = {"stdout": Full(), "stderr": Full()}
    for name, file in files.items():
        stream = io.TextIOWrapper(io.BufferedWriter(file))
        stream.write("not written yet")
        monkeypatch.setattr(sys, name, stream)
    thread._write("who waits for whom")
    Guard(SimpleNamespace(Abort=ended.append), rank=0, size=1).abort(1, "uncaught OSError: No space left on device")
    assert ended == [1]
    for file in files.values():
        file.full = False  # when it is closed


def test_abort_waits_until_its_output_was_read():
    # A launcher that is slow to read must not lose the reason: MPI_Abort kills it with what it has not read.
    script = (
        "import sys; from keras_hpc.job import exit as job_exit; sys.stderr.write('why'); job_exit.wait_for_readers()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        select.select([process.stderr], [], [], 30)
        time.sleep(1)
        assert process.poll() is None
        assert process.stderr.read() == b"why"
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    "how", ["raise", *(pytest.param(how, marks=pytest.mark.soak) for how in ("kill", "fewer-batches"))]
)
def test_one_rank_ends_the_job_with_tensorflow(how, run_ranks):
    done = run_ranks(2, [RANKS / "fail_training.py", how], expect_failure=True)
    assert how != "raise" or "RuntimeError: boom on the last rank" in done.output
    check_end(done)


@pytest.mark.parametrize(
    ("n", "how", "env", "visible"),
    [
        (2, "no-threads", {}, ["MPI_THREAD_MULTIPLE", "mpi4py.rc"]),
        (1, "no-native", {}, ["native engine", "pip install"]),
        pytest.param(1, "moved-method", {}, ["does not fit Keras 3.", "_clip_gradients"], marks=pytest.mark.soak),
        (1, "moved-module", {}, ["does not fit Keras 3.", "EpochIterator"]),
        (2, "keras-distribution", {}, ["keras.distribution", "twice"]),
        pytest.param(1, "torch-distributed", {}, ["torch.distributed", "twice"], marks=pytest.mark.soak),
        (2, "no-gpu", {}, ["sees 0 GPUs that its Keras backend can use", "init(device=0)"]),
        (1, "bad-backend", {"KERAS_BACKEND": "numpy"}, ["KERAS_BACKEND", "'numpy'"]),
    ],
)
def test_init_refuses(n, how, env, visible, run_ranks):
    args = [RANKS / "fail_start.py", how]
    done = run_ranks(n, args, timeout=80, backend="jax", env=env, expect_failure=True, mpi=n > 1)
    for text in visible:
        assert text in done.output, done.output
    assert "init worked" not in done.output


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        # What srun --mpi=none sets in each of its processes: N singletons that all take themselves for rank 0.
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, "--mpi=pmi2"),
        # mpiexec of one MPI, mpi4py with another.
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpiexec"),
    ],
)
def test_singletons_are_refused(env, hint, run_ranks):
    done = run_ranks(1, [RANKS / "fail_start.py"], timeout=80, backend="jax", env=env, mpi=False, expect_failure=True)
    assert "LaunchError" in done.output
    assert hint in done.output


@pytest.mark.parametrize(
    "env",
    [
        {},
        # A plain `python train.py` in a batch script of 4 tasks: the batch step itself has one task.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_PROCID": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_rank_alone_is_fine(env, run_ranks):
    done = run_ranks(1, [RANKS / "fail_start.py"], timeout=80, backend="jax", env=env, mpi=False)
    assert "init worked on 1 ranks" in done.output


def test_without_mpi_one_rank_works_and_a_launch_is_refused(run_ranks, tmp_path):
    nothing = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    done = run_ranks(1, [RANKS / "fail_start.py"], timeout=80, backend="jax", env=nothing, mpi=False)
    assert "init worked on 1 ranks" in done.output
    done = run_ranks(2, [RANKS / "fail_start.py"], timeout=80, backend="jax", env=nothing, expect_failure=True)
    assert "found no MPI library" in done.output
