# SPDX-License-Identifier: Apache-2.0
"""What a job leaves open to others on its nodes: nothing. Memory is private to the user, and no socket is opened."""

import os
import re
import stat
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


def as_nobody(work):
    """Calls `work` in a child that is another user. Returns whether it came through."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            status = 0
        except OSError:
            status = 2
        finally:  # a child of a fork must never return into the tests
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 2)
    return status == 0


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
    mine = os.getpid()
    assert as_nobody(lambda: os.stat("/proc")), "the test itself works"
    segment = f"/proc/{mine}/map_files/{mapped_segments()[0].name}"
    for path in (f"/proc/{mine}/mem", segment):
        with open(path, "rb"):  # which its owner can
            pass
        assert not as_nobody(lambda path=path: open(path, "rb"))
    assert not as_nobody(lambda: os.listdir(f"/proc/{mine}/fd"))
