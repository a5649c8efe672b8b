"""The engine under sanitizers: no data race, no deadlock, and no memory used that was given back."""

import os
import subprocess

import pytest
import sanitizer
from launch import child_environment, launch

AT_ONCE = 200  # moments of one process
# For their time; `make sanitize` runs them.
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not sanitizer.has_compiler(), reason="needs g++"),
]


def test_two_teams_at_once_have_no_data_race(tmp_path):
    """ThreadSanitizer, ranks as threads; at the end some that give up, and close while others wait."""
    program = sanitizer.build(tmp_path, "two_teams", "thread")
    environment = os.environ | sanitizer.options()
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert done.stdout.count("done") == 10


@pytest.mark.skipif(
    not sanitizer.has_compiler("clang++", "undefined"), reason="needs clang++ and its sanitizers (libclang-rt)"
)
def test_clang_makes_no_use_of_what_is_not_defined(tmp_path):
    """UndefinedBehaviorSanitizer of the other compiler, whose vector code asks for alignment where GCC's does not."""
    program = sanitizer.build(tmp_path, "two_teams", "undefined", compiler="clang++")
    environment = os.environ | sanitizer.options()
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert done.stdout.count("done") == 10


@pytest.mark.mpi
@pytest.mark.skipif(not sanitizer.MPICC.exists(), reason="needs mpicc")
@pytest.mark.timeout(6000)
@pytest.mark.parametrize(
    ("sanitizers", "moments", "mebibytes"),
    [("address,undefined", 1000, 8), ("address,undefined", 1000, 128), ("thread", 300, 4)],
)
def test_calls_that_are_given_up_at_random_moments(tmp_path, sanitizers, moments, mebibytes):
    """Two processes with MPI; the program lives on. Of MPICH, which is not instrumented, nothing need be suppressed.

    In several processes, one after the other: each call that is given up may keep its memory for the process' life.
    """
    program = sanitizer.build(tmp_path, "give_up", sanitizers, mpi=True)
    environment = child_environment() | sanitizer.options()
    for first in range(0, moments, AT_ONCE):
        count = min(AT_ONCE, moments - first)
        done = launch(2, [str(program), str(count), str(mebibytes), str(first)], timeout=1800, env=environment)
        assert done.returncode == 0, done.output[-8000:]
        assert f"{count} moments" in done.output
