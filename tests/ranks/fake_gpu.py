"""A plugin of pytest that lets PyTorch's tensors on the CPU count as tensors on a GPU: the one of tests/fake_cuda.py.

So the engine takes each gradient from where it is by copies on streams that run late, and puts its mean there. What
PyTorch's own streams would do, it cannot show: here a step goes on when the stream has come to its end.
"""

import ctypes
import os

from keras_hpc.backends import torch as torch_backend
from keras_hpc.backends import torch_gradients
from keras_hpc.job.plan import Plan

_DEFAULT_STREAM = 0
_fake = ctypes.CDLL(os.environ["TESTS_FAKE_GPU"])
_fake.fake_reset(1, 30)
_fake.fake_any_pointer(1)


def _and_finish(method):
    def waits(self, *args):
        method(self, *args)
        _fake.fake_finish(_DEFAULT_STREAM)

    return waits


def pytest_configure(config):
    """Put everything on the GPU, from now on."""
    torch_backend.device_of = lambda tensors: 0
    torch_backend.stream_of = torch_gradients.stream_of = lambda device: _DEFAULT_STREAM
    torch_gradients.gpu = lambda number: "cpu"
    Plan.wait_on = _and_finish(Plan.wait_on)
    Plan.second_on = _and_finish(Plan.second_on)


def pytest_sessionfinish(session, exitstatus):
    """See that it was used."""
    assert _fake.fake_calls(b"cuMemcpyDtoHAsync") > 0
    assert _fake.fake_calls(b"cuMemcpyHtoDAsync") > 0
