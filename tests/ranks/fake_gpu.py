"""A plugin of pytest that lets tensors on the CPU count as tensors on a GPU: the one of tests/fake_cuda.py.

So the engine takes each gradient from where it is by copies on streams that run late, and puts its mean there. What the
framework's own streams would do, it cannot show: here a step goes on when the stream has come to its end.
"""

import contextlib
import ctypes
import os

import keras
from mpi4py import MPI

from keras_hpc.job import devices
from keras_hpc.job.plan import Plan

_DEFAULT_STREAM = 0
_fake = ctypes.CDLL(os.environ["TESTS_FAKE_GPU"])
_fake.fake_reset(1, 30)
_fake.fake_any_pointer(1)
_fake.fake_stream.restype = ctypes.c_void_p
if "TESTS_FAKE_NCCL" in os.environ:
    _nccl = ctypes.CDLL(os.environ["TESTS_FAKE_NCCL"])
    if "TESTS_SHARED_GPU" not in os.environ:
        _fake.fake_show(MPI.COMM_WORLD.rank, 1)  # a GPU of its own
if "TESTS_FAKE_NVRTC" in os.environ:
    _nvrtc = ctypes.CDLL(os.environ["TESTS_FAKE_NVRTC"])
if "TESTS_GPU_AWARE_MPI" in os.environ:
    _mpi = ctypes.CDLL(os.environ["TESTS_GPU_AWARE_MPI"])
    MPI.__file__ = os.environ["TESTS_GPU_AWARE_MPI"]  # which the engine asks for functions
_other_stream = _fake.fake_stream()
_of_two_streams = []  # tensors


def _and_finish(method):
    def waits(self, *args):
        method(self, *args)
        _fake.fake_finish(_DEFAULT_STREAM)

    return waits


def _torch():
    from keras_hpc.backends import torch as backend
    from keras_hpc.backends import torch_gradients

    # Half of the gradients are made on another stream than the one that waits for their means.
    start, current = torch_gradients.DeviceGradients._start, [_DEFAULT_STREAM]

    def start_elsewhere(self, index, *args):
        current[0] = _other_stream if index % 2 else _DEFAULT_STREAM
        try:
            return start(self, index, *args)
        finally:
            current[0] = _DEFAULT_STREAM

    torch_gradients.DeviceGradients._start = start_elsewhere
    torch_gradients.use_on_this_stream = _of_two_streams.append
    # What stands for a tensor while Keras asks for shapes is nowhere.
    backend.device_of = lambda tensors, pipelined=False: (
        None if any(getattr(x, "is_meta", False) for x in tensors) else 0
    )
    backend.stream_of = torch_gradients.stream_of = lambda device: current[0]
    torch_gradients.gpu = lambda number: "cpu"
    Plan.wait_on = _and_finish(Plan.wait_on)
    Plan.second_on = _and_finish(Plan.second_on)


def _jax():
    from keras_hpc.backends import jax as backend
    from keras_hpc.backends import jax_device

    @contextlib.contextmanager
    def use_device(device):
        jax_device._number = device.ordinal
        yield
        jax_device._number = None

    backend.use_device = use_device
    backend.PLATFORM_OF_GPU = "cpu"
    devices.of_rank = lambda world, backend, asked: devices.Device(0, "Fake GPU", "GPU-0", "0000:00:00.0")


def pytest_configure(config):
    """Put everything on the GPU, from now on."""
    {"torch": _torch, "jax": _jax}[keras.backend.backend()]()


def pytest_sessionfinish(session, exitstatus):
    """See that it was used; by the only rank of a job not at all."""
    alone = MPI.COMM_WORLD.size == 1
    if keras.backend.backend() == "torch":
        assert (_of_two_streams == []) == alone
    if "TESTS_FAKE_NVRTC" in os.environ:
        assert _fake.fake_calls(b"cuLaunchKernel") > 0
        return
    if "TESTS_FAKE_NCCL" in os.environ:
        by_nccl = "TESTS_SHARED_GPU" not in os.environ or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        within_nodes = "hierarchical" in os.environ["KERAS_HPC_ALLREDUCE"]
        call = b"ncclReduceScatter" if within_nodes else b"ncclAllReduce"
        assert (_nccl.fake_nccl_calls(call) > 0) == by_nccl
        return
    for copy in (b"cuMemcpyDtoHAsync", b"cuMemcpyHtoDAsync"):
        assert (_fake.fake_calls(copy) == 0) == alone
