"""What a rank has on a GPU that is not there, and steps of it: for tests of device plans."""

import contextlib
import ctypes
import random
from pathlib import Path

from fake_cuda import Stream, Tensor, driver
from in_process import data_of

import keras_hpc
from keras_hpc import _native

engine = ctypes.CDLL(str(next(Path(keras_hpc.__path__[0]).glob("libkeras_hpc.so"))))
engine.khpc_last_error.restype = ctypes.c_char_p
engine.khpc_write_updates.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
engine.khpc_start_on.argtypes = [*[ctypes.c_int] * 2, *[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_void_p]
DTYPES = ["float32", "float16", "float32", "bfloat16", "float64", "float32"]
COUNTS = [7, 1000, 300_000, 0, 4096, 70_001]


def fresh_driver():
    """A fixture: the driver, with two devices, of which nothing is left afterwards."""
    found = driver()
    found.fake_reset(2, 200)
    yield found
    assert found.fake_left() == 0
    assert found.fake_faults() == 0


class Step:
    """What a rank has on the device: tensors, a stream, a plan."""

    def __init__(self, team, rank, *, weighted=False, pipelined=False, wire=""):
        self.specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(COUNTS, DTYPES, strict=True))]
        self.plan = team.plan("on device", self.specs, "mean", weighted, wire, True, pipelined)
        self.plan.open_device(0)
        self.begin([Tensor(array) for array in data_of(rank, COUNTS, DTYPES)], rank)

    def begin(self, tensors, rank):
        self.stream = Stream()
        self.tensors = tensors
        self.random = random.Random(rank)
        self.is_over = False

    def start(self, arrays, weight=1.0, stream=None):
        driver().fake_in_step(1)
        stream = stream or self.stream
        order = list(range(len(arrays)))
        self.random.shuffle(order)
        for index in order:
            self.tensors[index].write(stream, arrays[index])
            tensor = self.tensors[index]
            self.plan.start_on(index, tensor.address, tensor.nbytes, weight, stream.handle)

    def wait(self, stream=None):
        stream = stream or self.stream
        self.plan.wait_on(stream.handle)
        return [tensor.read(stream) for tensor in reversed(self.tensors)][::-1]  # first what comes back last

    def abandon(self, team):
        """What cannot go on, ends with its team."""
        driver().fake_in_step(0)
        team.close()
        self.is_over = True

    def close(self):
        driver().fake_in_step(0)
        if not self.is_over:
            self.plan.end()
        self.stream.close()
        for tensor in self.tensors:
            tensor.free()


def steps(team, rank, count, weights=None, **options):
    with contextlib.closing(Step(team, rank, **options)) as step:
        results = []
        for number in range(count):
            arrays = data_of(rank, COUNTS, DTYPES, number)
            step.start(arrays, 1.0 if weights is None else weights[rank])
            results.append(step.wait())
        return results


def team_allreduce(team, tensor, op, stream):
    """keras_hpc.allreduce of a tensor on the device."""
    _native.allreduce_on(team, 0, tensor.address, "float32", op, "x", [tensor.size], stream.handle)
