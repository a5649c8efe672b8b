"""Trains on a GPU that is not there until the last rank fails, in the middle of a backward pass: `fail_on_gpu.py HOW`.

test_gpu.py says what must follow.
"""

import os
import signal
import sys
import time

import fake_gpu
import keras
import mapped
import numpy as np

import keras_hpc

fake_gpu.pytest_configure(None)
fake = fake_gpu._fake
how = sys.argv[1]
keras_hpc.init(timeout_seconds=5, stall_seconds=2)
mapped.tell()
backwards = 0


def fail(gradient):
    """Called between the gradients of the two layers; those of the last one are on their way."""
    global backwards
    backwards += 1
    if keras_hpc.rank() < keras_hpc.size() - 1 or backwards != 3:
        return
    sys.stdout.write(f"FAILS AT {time.time()}\n")
    sys.stdout.flush()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "driver":
        fake.fake_fail(b"cuMemcpyDtoHAsync", 0)
    if how == "hangs":
        fake.fake_hang(None, 1)  # no copy to the device ends any more
    if how == "elsewhere":
        fake.fake_any_pointer(0)  # what the driver hears of from now on is no memory of its GPU


class Watched(keras.layers.Layer):
    def call(self, x):
        if x.requires_grad:
            x.register_hook(fail)
        return x


x = np.random.default_rng(0).normal(size=(400, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), Watched(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x.sum(axis=1, keepdims=True), batch_size=4, epochs=2, verbose=0)
sys.stdout.write("trained to the end\n")
