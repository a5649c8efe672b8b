"""A forked rank is to its script, to mpiexec and to these tests what a rank of plain Python is."""

import json
import signal
import subprocess
import sys

import forks
import pytest
from launch import child_environment, launch

TOKEN = "none"  # launch() gives each job one
SHOW = """
import json, os, sys
import keras
print(json.dumps([sys.argv, sys.path[0], __name__, os.getcwd(), keras.backend.backend(), os.environ["MINE"],
                  sorted(os.sched_getaffinity(0)), input(), "matplotlib" in sys.modules]))
print(sys.modules["__main__"].json is json, file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def _token():
    yield
    forks.forget(TOKEN)


def both(*args, env=None, **options):
    """What a forked rank does, and what plain Python does: returncode, stdout, stderr."""
    environment = child_environment("jax", {"MINE": "a\nb", "KERAS_HPC_TEST_TOKEN": TOKEN, **(env or {})}, lean=True)
    return [
        subprocess.run([*command, *args], env=environment, capture_output=True, timeout=60, check=False, **options)
        for command in (forks.python("jax"), [sys.executable])
    ]


@pytest.mark.parametrize("how", ["script", *(pytest.param(how, marks=pytest.mark.soak) for how in ("-m", "-c"))])
def test_scripts_modules_and_commands_see_the_same(how, tmp_path):
    (tmp_path / "shows.py").write_text(SHOW)
    args = {"script": ["shows.py", "-x", "y"], "-m": ["-m", "shows", "-x"], "-c": ["-c", SHOW, "z"]}[how]
    forked, plain = both(*args, cwd=tmp_path, input=b"read\n")
    assert forked.stdout == plain.stdout
    assert json.loads(forked.stdout)[4:6] == ["jax", "a\nb"]
    assert forked.stderr == plain.stderr == b"True\n"
    assert forked.returncode == 0


@pytest.mark.parametrize(
    "end", ["sys.exit(7)", "sys.exit('words')", "os._exit(3)", "os.abort()", "os.kill(os.getpid(), 15)", "1 / 0"]
)
def test_ends_are_the_same(end):
    forked, plain = both("-c", f"import os, sys; {end}", env={"PYTHONFAULTHANDLER": ""})
    assert forked.returncode == plain.returncode != 0
    forked, plain = both("-c", f"import os, sys; {end}")
    assert forked.returncode == plain.returncode != 0


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_signals_reach_the_rank(name):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    environment = child_environment("jax", {"KERAS_HPC_TEST_TOKEN": TOKEN}, lean=True)
    with subprocess.Popen([*forks.python("jax"), "-c", code], env=environment, stdout=subprocess.PIPE) as client:
        rank = int(client.stdout.readline())
        client.send_signal(getattr(signal, f"SIG{name}"))
        assert client.wait(10) == -getattr(signal, f"SIG{name}")
        assert client.stdout.read() == b""  # its writer has ended
    assert rank != client.pid


def test_what_frameworks_read_as_they_are_imported_is_respected():
    code = "import sys; print('keras' in sys.modules)"
    assert [done.stdout for done in both("-c", code)] == [b"True\n", b"False\n"]
    assert [done.stdout for done in both("-c", code, env={"JAX_ENABLE_X64": "1"})] == [b"False\n"] * 2


def test_a_process_that_a_rank_leaves_behind_is_found():
    code = "import os, time; os.fork() or time.sleep(30)"
    done = launch(1, [*forks.python("jax"), "-c", code], timeout=60, env=child_environment("jax", lean=True), mpi=False)
    assert len(done.leaked_processes) == 1


def test_ranks_draw_numbers_of_their_own():
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    outputs = {both("-c", code)[0].stdout for _ in range(3)}
    assert len(outputs) == 3
    assert len({number for output in outputs for number in output.split()}) == 6
