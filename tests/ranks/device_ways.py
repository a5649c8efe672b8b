"""Plans on GPUs that are not there, and which way they go: with TESTS_FAKE_GPU, TESTS_FAKE_NCCL, TESTS_FAKE_NVRTC and
TESTS_GPU_AWARE_MPI.

`trials` are the ways that were measured, in order.
"""

import ctypes
import os

import numpy as np
from mpi4py import MPI

fake = ctypes.CDLL(os.environ["TESTS_FAKE_GPU"])
fake.fake_reset(4, 30)
nccl = ctypes.CDLL(os.environ["TESTS_FAKE_NCCL"])
nvrtc = ctypes.CDLL(os.environ["TESTS_FAKE_NVRTC"])
mpi = ctypes.CDLL(os.environ["TESTS_GPU_AWARE_MPI"])
MPI.__file__ = os.environ["TESTS_GPU_AWARE_MPI"]  # which the engine asks for functions

from keras_hpc import _native  # noqa: E402
from keras_hpc.job import device_plans, launch  # noqa: E402
from keras_hpc.job.plan import TensorSpec  # noqa: E402

world = launch.connect(None)
rank = world.rank
trials = []
device_plans._ROUNDS = 2
_measure = device_plans._seconds


def _way_since(before):
    """Return which way plans have gone since `_calls` returned this."""
    sums, scattered, kernels = (now > then for now, then in zip(_calls(), before, strict=True))
    return (
        ("mpi" if world.node_count > 1 else "peer")
        if kernels
        else "hierarchical"
        if scattered
        else "nccl"
        if sums
        else "staged"
    )


def _calls():
    of_nccl = [nccl.fake_nccl_calls(name) for name in (b"ncclAllReduce", b"ncclReduceScatter")]
    return [*of_nccl, fake.fake_calls(b"cuLaunchKernel")]


def pretend(**seconds):
    """Measure, and believe that each way takes so many seconds."""

    def believed(plan, memory):
        before = _calls()
        assert _measure(plan, memory) > 0
        trials.append(_way_since(before))
        return seconds[trials[-1]]

    device_plans._seconds = believed


def way_of(team, name, count, **options):
    """Return which way a new plan goes, once it was seen to be right."""
    plan = team.plan(name, [TensorSpec("x", (count,), "float32")], device=rank, in_segment=True, **options)
    before = _calls()
    x = _native.DeviceArray(rank, 4 * count)
    x.write(np.full(count, 1.0 + 2 * rank, np.float32).view(np.uint8))
    plan.start_on(0, x.address, 4 * count, 1.0, x.stream)
    plan.wait_on(x.stream)
    found = np.empty(count, np.float32)
    x.read(found.view(np.uint8))
    assert (found == world.size).all()
    return _way_since(before)
