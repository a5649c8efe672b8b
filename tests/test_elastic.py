"""`python -m keras_hpc run --elastic`: a job goes on without a rank that was killed, and ends with the same bits."""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import ROOT, child_environment

from keras_hpc.job import supervised
from keras_hpc.job.exit import leave
from keras_hpc.tools.elastic import _lost_a_rank, supervise
from keras_hpc.tools.places import Hosts, Machine, Placement

pytestmark = pytest.mark.mpi

TRAIN = ROOT / "tests" / "ranks" / "train_virtual.py"
STEPS = 51  # of three epochs
SHORTCUTS = ("XLA_FLAGS", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
# The last rank kills itself, or fails, before all others are through; what is asked for is in the first argument.
SCRIPT = """
import os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
print(f"begins: {comm.rank} of {comm.size}", flush=True)
comm.Barrier()
if comm.rank == comm.size - 1 and comm.size > 2:
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Abort(3)
comm.Barrier()
sys.stdout.write(f"{comm.rank} of {comm.size} is through\\n")
"""

# A rank is lost once; then the others are asked to end, and all begin again, as `callbacks.Checkpoint` lets them.
REJOIN = """
import os, pathlib, signal, sys, time
from mpi4py import MPI
from keras_hpc.job import supervised
comm, once = MPI.COMM_WORLD, pathlib.Path(sys.argv[1])
seen = comm.bcast(once.exists())
if comm.rank == comm.size - 1 and not seen:
    once.touch()
    os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
while comm.size == 2 and not supervised.asked_to_rejoin():
    time.sleep(0.05)
if comm.size == 2 and comm.rank == 0:
    supervised.leave_to_rejoin()
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
    done = elastic(4, "--output-dir", tmp_path / "out", script, "kill")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"starts again with (\d)", done.stderr) == ["3", "2"]
    said = [(tmp_path / "out" / f"rank{rank}.txt").read_text() for rank in range(4)]
    assert [re.findall(r".*is through", text) for text in said] == [
        ["0 of 2 is through"],
        ["1 of 2 is through"],
        [],
        [],
    ]
    assert "begins: 1 of 4\n" in said[1], "what was said before the loss stays"


def test_an_error_of_the_script_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = elastic(3, script, "fail")
    assert done.returncode == 3, done.stderr
    assert "starts again" not in done.stderr


def test_lost_ranks_join_again_when_the_job_lets_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REJOIN)
    done = elastic(3, "--rejoin", script, tmp_path / "once")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"starts again with (\d)", done.stderr) == ["2", "3"]
    assert "2 of 3 is through" in done.stdout


def test_only_elastic_jobs_lose_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "keras_hpc", "run", "--rejoin", "-n", "2", script], capture_output=True, text=True,
        check=False, cwd=ROOT, env=child_environment(lean=True), timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "`--rejoin` is for jobs that lose ranks. Expected --elastic" in done.stderr


@pytest.mark.parametrize(
    ("status", "reasons", "lost"),
    [
        (9, [], True),
        (137, [], True),
        (1, [], False),
        (1, ["uncaught CommunicationError: rank 2 (node1, process 7) was killed"], True),
        (9, ["uncaught CommunicationError: MPI_Test: Other MPI error, error stack: process_vm_readv failed"], True),
        (9, ["uncaught Exception: MPI_ERR_PROC_FAILED: Process Failure"], True),
        (1, ["uncaught Exception: MPI_ERR_TRUNCATE: message truncated"], False),
        (9, ["uncaught CommunicationError: rank 1 met an error, which it tells of itself."], True),
        (1, ["uncaught CommunicationError: the plan is not started"], False),
        (9, ["uncaught ValueError: a bad argument"], False),
        (1, ["rank 1 does not answer", "uncaught ValueError: a bad argument"], False),
    ],
)
def test_a_lost_rank_is_told_from_an_error_of_the_script(status, reasons, lost):
    assert _lost_a_rank(status, reasons) is lost


def test_a_script_that_exits_with_a_number_like_a_signals_is_not_a_lost_rank(tmp_path, monkeypatch):
    """`sys.exit(9)` on all ranks: MPICH's mpiexec ends with 9 where a rank was killed by SIGKILL, too."""
    monkeypatch.setenv(supervised.NAME, str(tmp_path))
    passed = SimpleNamespace(Test=lambda: True)
    leave(
        SimpleNamespace(
            size=2,
            rank=1,
            all_teams=[],
            comm=SimpleNamespace(Ibarrier=lambda: passed),
            guard=SimpleNamespace(exit_code=9),
        )
    )
    assert supervised.reasons(tmp_path) == ["sys.exit(9)"]
    assert not _lost_a_rank(9, supervised.reasons(tmp_path))


def test_a_script_that_leaves_at_once_is_not_a_lost_rank(tmp_path):
    """Of `os._exit` others see what they see of a rank that was killed; but not every child that is forked is one."""
    code = "import os\nfrom keras_hpc.job.exit import Guard\nGuard(None, 1, 2)\n"
    code += (
        "if os.fork() == 0: os._exit(7)\nos.wait(); print(os.listdir(os.environ['KERAS_HPC_RUN_NOTES'])); os._exit(9)"
    )
    environment = child_environment(lean=True) | {supervised.NAME: str(tmp_path)}
    done = subprocess.run([sys.executable, "-uc", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (9, "[]\n"), done.stderr
    assert supervised.reasons(tmp_path) == ["os._exit(9)"]
    assert not _lost_a_rank(9, ["os._exit(9)", "uncaught CommunicationError: rank 1 (node1, process 7) has ended"])


def test_a_signal_between_two_jobs_ends_them():
    class Slow(Machine):
        def without(self, now, reasons):
            os.kill(os.getpid(), signal.SIGTERM)  # while hosts are asked whether they answer
            return super().without(now, reasons)

    assert supervise(lambda placement: (["sh", "-c", "kill -9 $$"], {}), Slow(Placement(3))) == 128 + signal.SIGTERM


def test_control_c_reaches_the_launcher_once():
    """At the second one mpiexec and srun kill ranks that write what they have."""
    launcher = "import os, signal, time; signal.signal(signal.SIGINT, lambda *_: os.write(1, b'heard'));"
    launcher += "os.write(1, b'begins'); time.sleep(1)"
    code = "import subprocess, sys, time\nfrom keras_hpc.tools.elastic import supervise\n"
    code += "from keras_hpc.tools.places import Machine, Placement\n"
    code += "send = subprocess.Popen.send_signal\n"  # later than the terminal's own, so that two do not become one
    code += "subprocess.Popen.send_signal = lambda self, number: (time.sleep(0.2), send(self, number))\n"
    code += f"supervise(lambda _: ([sys.executable, '-c', {launcher!r}], {{}}), Machine(Placement(1)))"
    ours, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=its, stdout=its, start_new_session=True, env=child_environment(lean=True),
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(its)
    said = b""
    with contextlib.suppress(OSError), open(ours, "r+b", buffering=0) as terminal:  # OSError: the other end is closed
        while part := terminal.read(100):
            if b"begins" in part:
                terminal.write(b"\x03")
            said += part
    assert process.wait(60) == 0
    assert said.count(b"heard") == 1, said


def test_a_job_ends_with_its_supervisor(tmp_path):
    """Which somebody has killed; else two jobs would write the same checkpoints when he starts it again."""
    launcher = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 60"
    code = "from keras_hpc.tools.elastic import supervise\nfrom keras_hpc.tools.places import Machine, Placement\n"
    code += f"supervise(lambda _: (['sh', '-c', {launcher!r}], {{}}), Machine(Placement(1)))"
    with subprocess.Popen([sys.executable, "-c", code], env=child_environment(lean=True)) as process:
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        process.kill()
    place = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    end = time.monotonic() + 10
    while place.exists() and place.read_text().split()[2] != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)


def test_hosts_that_do_not_answer_are_left_out():
    gone = set()
    wanted = Placement(6, (("a", 2), ("b", 2), ("c", 2)))
    hosts = Hosts(wanted, lambda name: name not in gone)
    assert not hosts.lost(wanted)
    fewer = hosts.without(wanted, ["uncaught CommunicationError: rank 2 (node1, process 7) was killed"])
    assert fewer == Placement(5, (("a", 2), ("b", 1), ("c", 2)))
    assert hosts.without(wanted, []) == Placement(5, (("a", 2), ("b", 2), ("c", 1)))
    gone.add("a")
    assert hosts.lost(fewer)
    left = hosts.without(fewer, [])
    assert left == Placement(3, (("b", 1), ("c", 2)))
    assert hosts.back(left) == Placement(4, (("b", 2), ("c", 2)))
    gone.clear()
    assert hosts.back(left) == wanted
    gone |= {"a", "b", "c"}
    assert hosts.without(left, []).ranks == 0
    assert hosts.back(left) == left, "a job runs on them"


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
