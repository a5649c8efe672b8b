"""The engine under sanitizers: no data race, no deadlock, and no memory used that was given back."""

import os
import subprocess

import pytest
import sanitizer
from launch import child_environment, launch

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


@pytest.mark.mpi
@pytest.mark.skipif(not sanitizer.MPICC.exists(), reason="needs mpicc")
@pytest.mark.timeout(6000)
@pytest.mark.parametrize(("moments", "mebibytes"), [(1000, 8), (1000, 128)])
def test_calls_that_are_given_up_at_random_moments(tmp_path, moments, mebibytes):
    """AddressSanitizer and UndefinedBehaviorSanitizer, two processes with MPI; the program lives on."""
    program = sanitizer.build(tmp_path, "give_up", "address,undefined", mpi=True)
    environment = child_environment() | sanitizer.options()
    done = launch(2, [str(program), str(moments), str(mebibytes)], timeout=5400, env=environment)
    assert done.returncode == 0, done.output[-8000:]
    assert f"{moments} moments" in done.output
