# SPDX-License-Identifier: Apache-2.0
"""What a job leaves open to others on its nodes: nothing. Memory is private to the user, and no socket is opened."""

import os
import re
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import keras_hpc

NOBODY = 65534


def sockets():
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # the one that lists them
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


def mapped_segments():
    """Where this process has mapped our memory, as /proc/self/map_files names it."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:keras_hpc" in line]
    return [Path("/proc/self/map_files") / re.sub(r"\b0+(?=[0-9a-f])", "", line.split()[0]) for line in lines]


@pytest.fixture(scope="module", autouse=True)
def sockets_before():
    MPI.COMM_WORLD.Dup().Allreduce(np.ones(100_000), np.empty(100_000))  # MPI's own connections
    before = sockets()
    keras_hpc.init()
    yield before
    keras_hpc.finalize()


def may(user, command, path):
    """Returns whether a user comes through with a shell command for a path."""
    words = ["sh", "-c", command, "sh", str(path)]
    return (
        subprocess.run(words, user=user, group=user, extra_groups=[], capture_output=True, check=False).returncode == 0
    )


def test_no_socket_is_opened(sockets_before):
    keras_hpc.allreduce(np.ones(100_000, np.float32))
    assert sockets() <= sockets_before


def test_memory_has_no_name_and_no_descriptor():
    keras_hpc.allreduce(np.ones(100_000, np.float32))
    assert mapped_segments(), "there is a segment"
    assert not [name for name in os.listdir("/dev/shm") if "hpc" in name]
    targets = [os.readlink(d) for d in Path("/proc/self/fd").iterdir() if d.exists() or d.is_symlink()]
    assert not [target for target in targets if "memfd:keras_hpc" in target], "closed once all have mapped it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the files behind mappings")
def test_memory_is_private_to_the_user():
    keras_hpc.empty(100_000)
    for file in mapped_segments():
        found = file.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_uid == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_nothing():
    keras_hpc.empty(100_000)
    mine = Path(f"/proc/{os.getpid()}")
    segment = mine / "map_files" / mapped_segments()[0].name
    for command, path in ((': < "$1"', mine / "mem"), (': < "$1"', segment), ('ls "$1"', mine / "fd")):
        assert may(os.geteuid(), command, path), "the test itself works"
        assert not may(NOBODY, command, path)
    assert may(NOBODY, 'ls "$1"', "/proc")
