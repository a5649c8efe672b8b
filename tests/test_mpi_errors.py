"""Calls of MPI that fail, in a library made for that: an error and never a wrong sum, and the team's on all ranks."""

import contextlib
import ctypes
import functools
import struct
import tempfile
import threading
import time
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
from device_steps import fresh_driver
from fake_cuda import Stream, Tensor, nvrtc
from in_process import EVERY_SIZE, SOON, as_bytes, caught

from keras_hpc import _native

COUNT = 100_000
ENDED = 1  # News::Why


@functools.cache
def library():
    """Load it into this process; returns it, and what the engine reaches it by."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(fake_cuda.build_mpi(Path(folder)))
        fake = ctypes.CDLL(path)
        fake.fake_mpi_world.restype = ctypes.c_void_p
        constants = dict.fromkeys(("BYTE", "ERRORS_RETURN", "STATUS_IGNORE", "IN_PLACE"), 0)
        mpi = _native.Mpi(path, ctypes.sizeof(ctypes.c_void_p), fake.fake_mpi_world(), constants, {}, {})
        mpi.transport([0, 1])  # binds the functions
        return fake, mpi


@contextlib.contextmanager
def two_nodes(threads):
    """A team of this rank and one that does the same on another node."""
    fake, mpi = library()
    team = _native.Team(mpi.transport([0, 1]), 0, threads, 20.0, 20.0)
    team.add_choice("network", 0, EVERY_SIZE, "pairwise")
    with contextlib.closing(team):
        yield fake, team


@pytest.mark.parametrize("in_segment", [False, True])
def test_what_a_receive_that_failed_has_left_is_no_sum(in_segment):
    """The thread of the team finds the error, and looks for a second whose fault it is. The caller waits meanwhile."""
    with two_nodes(threads=1) as (fake, team):
        plan = team.plan("p", [("a", "float32", COUNT), ("b", "float32", 5 * COUNT)], "sum", False, "", in_segment)
        arrays = [np.empty(COUNT, np.float32), np.empty(5 * COUNT, np.float32)]
        for step in range(3):
            fake.fake_mpi_fail(b"MPI_Test", 1 if step == 1 else -1)
            with contextlib.suppress(_native.Error):  # who has its sum already need not be told
                for i, x in enumerate(arrays):
                    x[:] = 1 + step
                    plan.start(i, as_bytes(x))
                for i, x in enumerate(arrays):
                    plan.wait(i)
                    got = plan.memory(i).view(np.float32) if in_segment else x
                    assert np.all(got == 2 * (1 + step)), (step, i, np.unique(got))
        assert fake.fake_mpi_has_failed()
        assert "this library has failed" in caught(team.barrier)[0]


def test_memory_that_this_rank_cannot_share_is_an_error_of_the_team():
    """The other ranks wait for it, and are told."""
    with two_nodes(threads=0) as (fake, team):
        fake.fake_mpi_fail(b"MPI_Iallgatherv", 0)
        text, _ = caught(lambda: team.plan("p", [("a", "float32", COUNT)], "sum", False))
        assert "MPI_Iallgatherv: this library has failed" in text
        assert caught(team.barrier)[0] == text
    with two_nodes(threads=0) as (_, team):
        with pytest.raises(MemoryError):
            team.plan("p", [("a", "float32", 2**42)], "sum", False, "", True, bucket_bytes=2**45)
        with pytest.raises(MemoryError):
            team.barrier()


def test_an_error_of_mpi_says_whose_fault_it_is():
    """That the other rank has ended is told a little later than MPI says that it has lost something."""
    with two_nodes(threads=0) as (fake, team):
        plan = team.plan("p", [("a", "float32", COUNT)], "sum", False)
        x = np.ones(COUNT, np.float32)
        fake.fake_mpi_fail(b"MPI_Test", 0)
        threading.Timer(0.3, fake.fake_mpi_tell, [struct.pack("=iii", 1, 1, ENDED), 12]).start()
        begin = time.monotonic()

        def reduce():
            plan.start(0, as_bytes(x))
            plan.wait(0)

        text, _ = caught(reduce)
        assert text == "Rank 0 cannot go on: the process of rank 1 has ended. MPI_Test: this library has failed"
        assert time.monotonic() - begin < 1.4  # it was not waited any longer


def test_a_library_that_only_its_environment_tells_of(monkeypatch):
    """Of Cray's some versions have no function that says whether messages may be in memory of GPUs."""
    with two_nodes(threads=1) as (_, team):
        for value, takes in (("", False), ("0", False), ("1", True)):
            monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", value)
            assert team.takes_device_memory == takes


@pytest.fixture
def fake_gpu():
    for found in fresh_driver():
        yield found
        with two_nodes(threads=0):  # frees what the library was still asked about
            pass


@pytest.mark.parametrize("call", ["MPI_Isend", "MPI_Test"])
def test_an_error_while_memory_of_a_gpu_is_sent(call, monkeypatch, fake_gpu):
    """It is one in time, and then the tensor is the caller's."""
    nvrtc()
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    with two_nodes(threads=1) as (fake, team):
        fake.fake_mpi_copy(fake_gpu.fake_copy_any)
        plan = team.plan("p", [("x", "float32", COUNT)], "sum", False, in_segment=True)
        plan.open_mpi(0)
        stream, x = Stream(), Tensor(np.empty(COUNT, np.float32))
        for step in range(2):
            if step == 1:
                fake.fake_mpi_fail(call.encode(), 0)
            x.write(stream, np.full(COUNT, 1.0 + step, np.float32))
            plan.start_on(0, x.address, x.nbytes, 1.0, stream.handle)
            if step == 0:
                plan.wait_on(stream.handle)
                assert (x.read(stream) == 2).all()
        begin = time.monotonic()
        with pytest.raises(_native.Error, match=f"{call}: this library has failed"):
            plan.wait_on(stream.handle)
        assert time.monotonic() - begin < SOON
        x.free()
        stream.close()
