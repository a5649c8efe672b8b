"""`python -m keras_hpc run`: which launcher it takes, what ranks find, and how a job ends."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, child_environment

from benchmarks.hosts import Hosts, HostsError

pytestmark = pytest.mark.mpi

SHOW = """
import os, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
text = f"{comm.rank} of {comm.size} cores={sorted(os.sched_getaffinity(0))} omp={os.environ.get('OMP_NUM_THREADS')} "
print(text + f"tf={os.environ.get('TF_NUM_INTRAOP_THREADS')} host={os.uname().nodename} args={sys.argv[1:]}")
os.write(2, b"half a line, ")
comm.Barrier()
os.write(2, b"and the rest of rank %d\\nno newline at the end" % comm.rank)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
CORES = sorted(os.sched_getaffinity(0))
WITHOUT_LIMITS = {
    name: value
    for name, value in child_environment().items()
    if not name.endswith("_THREADS") and not name.startswith("PRTE_")  # what the tests set for ranks of their own
}


@pytest.fixture
def show(tmp_path):
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    return script


def _run(*words, env=None, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "keras_hpc", "run", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=WITHOUT_LIMITS | (env or {}),
    )


def _said(text):
    """What ranks said of themselves: label, rank, size and all that follows `=`."""
    found = []
    for line in text.splitlines():
        if match := re.match(r"\[(\d+)\] (\d+) of (\d+) (.*)", line):
            facts = dict(re.findall(r"(\w+)=(\[.*?\]|\S+)", match[4]))
            found.append((int(match[1]), int(match[2]), int(match[3]), facts))
    return sorted(found, key=lambda one: one[0])


def test_ranks_get_cores_threads_labels_and_arguments(show):
    done = _run("-n", 2, show, 0, "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    said = _said(done.stdout)
    assert [one[:3] for one in said] == [(0, 0, 2), (1, 1, 2)], done.stdout
    share = len(CORES) // 2
    for rank, *_, facts in said:
        wanted = CORES[rank * share : (rank + 1) * share] if share else CORES
        assert facts["cores"] == str(wanted)
        assert facts["omp"] == (str(max(1, share - 1)) if share else "None")
        assert facts["args"] == "['0', '--lr', '0.1']"
    # Whole lines, whatever pieces they were written in, and the last one even if nothing ends it.
    assert sorted(done.stderr.splitlines()) == [
        "[0] half a line, and the rest of rank 0",
        "[0] no newline at the end",
        "[1] half a line, and the rest of rank 1",
        "[1] no newline at the end",
    ]


def test_more_ranks_than_cores_share_them(show):
    ranks = len(CORES) + 1
    said = _said(_run("-n", ranks, show).stdout)
    assert [(rank, facts["cores"], facts["omp"]) for rank, _, _, facts in said] == [
        (rank, str(CORES), "None") for rank in range(ranks)
    ]
    refused = _run("-n", ranks, "--cores", 1, show)
    assert refused.returncode != 0
    assert f"{ranks} ranks share {len(CORES)} cores here. Received: 1" in refused.stderr


def test_wishes(show):
    one = _said(_run("-n", 1, "--cores", 1, "--threads", 3, show).stdout)[0][3]
    assert (one["cores"], one["omp"], one["tf"]) == (str(CORES[:1]), "3", "3")
    free = _run("-n", 1, "--no-pin", "--no-label", show).stdout
    assert free.startswith(f"0 of 1 cores={CORES} omp=None tf=None")
    mine = _said(_run("-n", 1, show, env={"OMP_NUM_THREADS": "7"}).stdout)[0][3]
    assert mine["omp"] == "7", "what the user sets stays"


def test_a_file_for_each_rank(show, tmp_path):
    folder = tmp_path / "new" / "out"
    done = _run("-n", 2, "--output-dir", folder, show, 3)
    assert done.returncode == 3
    assert str(folder) in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.txt", "rank1.txt"]
    for rank in range(2):
        text = (folder / f"rank{rank}.txt").read_text()
        assert f"and the rest of rank {rank}\n" in text
        assert f"{rank} of 2" in text


def test_a_module(show):
    done = _run("-n", 2, "-m", "show", "0", "-x", cwd=show.parent)
    assert [(one[1], one[3]["args"]) for one in _said(done.stdout)] == [(0, "['0', '-x']"), (1, "['0', '-x']")]


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1")])
def test_signals_reach_every_rank(number, said, tmp_path):
    script = tmp_path / "wait.py"
    script.write_text(
        "import signal, sys, time\n"
        "from mpi4py import MPI\n"
        "def end(number, frame):\n"
        "    print('received', signal.Signals(number).name)\n"
        "    sys.exit(5)\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1):\n"
        "    signal.signal(number, end)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log.txt"
    with log.open("w") as file:
        command = [sys.executable, "-m", "keras_hpc", "run", "-n", "2", str(script)]
        process = subprocess.Popen(command, cwd=ROOT, env=WITHOUT_LIMITS, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 40
        while log.read_text().count("ready") < 2:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(number)
        status = process.wait(20)
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert status != 0
    assert all(f"[{rank}] received {said}" in text for rank in range(2)), text


def test_hosts(show, tmp_path):
    try:
        with Hosts(2) as hosts:
            run = [sys.executable, "-m", "keras_hpc", "run"]
            command = hosts.on_head([*run, "-n", "4", "--hosts", "host1,host2", str(show)])
            env = WITHOUT_LIMITS | hosts.environment | {"KERAS_HPC_ALLREDUCE": ""}
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=env)
    except HostsError as why:
        pytest.skip(str(why))
    said = _said(done.stdout)
    assert [one[3]["host"] for one in said] == ["host1", "host1", "host2", "host2"], done.stderr


def test_the_launcher_is_the_one_of_the_library(show, tmp_path):
    """Beside the library or beside Python, not the first on the PATH: that one is of another MPI."""
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    other.chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = shlex.split(_run("-n", len(CORES) + 1, "--dry-run", show, env=path).stdout)
    assert "OMPI_MCA_rmaps_base_oversubscribe=1" in command
    assert str(Path(sys.executable).parent / "mpiexec") in command
    assert str(other) not in command
    command = shlex.split(_run("-n", 4, "--mpiexec", other, "--hosts", "a:1,b:3", "--dry-run", show).stdout)
    start = command.index(str(other))
    assert command[start + 1 : start + 3] == ["--host", "a:1,b:3"]
    assert command[command.index("-n") + 1] == "4"


def test_in_a_slurm_allocation_it_is_srun(show, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'MPI plugin types are...\n\tcray_shasta\n\tnone\n\tpmi2\n\tpmix' >&2\n")
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "8"}
    command = shlex.split(_run("--dry-run", show, env=env).stdout)
    assert command[0] == "srun"
    assert "--mpi=pmi2" in command, "for this MPI"
    assert "--cpus-per-task=8" in command
    assert not any(word.startswith("--ntasks") for word in command), "Slurm knows how many"
    assert "--pin" not in command, "Slurm binds"
    assert "--ntasks=3" in shlex.split(_run("-n", 3, "--dry-run", show, env=env).stdout)
    assert "--cores" in _run("-n", 2, "--cores", 1, show, env=env).stderr
    command = shlex.split(_run("--launcher", "mpiexec", "--dry-run", show, env=env | {"SLURM_NTASKS": "5"}).stdout)
    assert command[command.index("-n") + 1] == "5"
    for words in (["--launcher", "mpiexec"], ["--elastic"]):  # `sbatch -N 4` alone does not say how many
        done = _run(*words, "--dry-run", show, env=env)
        assert done.returncode == 1
        assert "how many ranks? Expected -n N" in done.stderr
    done = _run("-n", 2, "--elastic", "--launcher", "srun", show, env={"PATH": env["PATH"]})
    assert "left of an allocation. Received: none" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any("oversubscribe" in word for word in command), "else Open MPI puts all ranks on the first host"
    srun.write_text("#!/bin/sh\necho none\n")
    done = _run("-n", 2, show, env=env)
    assert done.returncode != 0
    assert "pmi2" in done.stderr
    assert "Received: none" in done.stderr


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["x.py"], {}, "no such script"),
        (["-m", "foo"], {}, "how many ranks"),
        (["-n", "0", "x.py"], {}, "Received: '0'"),
        (["-n", "3", "--hosts", "a,b", "-m", "foo"], {}, "multiple of 2"),
        (["-n", "3", "--hosts", "a:1,b", "-m", "foo"], {}, "Received: -n 3 --hosts a:1,b"),
        (["-n", "3", "--hosts", "a:1,b:1", "-m", "foo"], {}, "Expected 2 ranks. Received: -n 3"),
        (["-n", "2", "--hosts", "a:x", "-m", "foo"], {}, "Received: 'a:x'"),
        (["-n", "2", "--mpiexec", "/none", "-m", "foo"], {}, "Received: /none"),
        (["-n", "2", "--mpiexec", "/bin/true", "--hosts", "a,b", "-m", "foo"], {}, "Received: /bin/true"),
        (["-n", "2", "-m", "foo"], {"PMI_SIZE": "2"}, "PMI_SIZE=2"),
        (["-n", "2", "-m", "foo"], {"MPI4PY_LIBMPI": "/none/libmpi.so"}, "found no MPI library"),
        (["-n", "2", "--launcher", "srun", "-m", "foo"], {"PATH": "/none"}, "srun cannot be run"),
        (["-n", "2", "--output-dir", "/dev/null/x", "-m", "foo"], {}, "`--output-dir` is a folder"),
        ([], {}, "usage"),
    ],
)
def test_wrong_use_is_explained(words, env, said):
    done = _run(*words, env=env)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
