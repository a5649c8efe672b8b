"""Reduces tensors of a GPU that is not there, by TensorFlow: `reduce_on_gpu.py GPU CUDA`.

First by plans on the host, one operation after the other; then, where they are, what the GPU computes late.
"""

import ctypes
import sys

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.load_library import load_pluggable_device_library

library, cuda = sys.argv[1:]
fake = ctypes.CDLL(cuda)
fake.fake_show(0, 2)
fake.fake_let_host()
fake.fake_any_pointer(1)
load_pluggable_device_library(library)

import keras_hpc  # noqa: E402
from keras_hpc.backends import tensorflow as backend  # noqa: E402
from keras_hpc.job import current  # noqa: E402
from keras_hpc.job.plan import TensorSpec  # noqa: E402

keras_hpc.init()
plan = current.job().teams[0].plan("p", [TensorSpec(f"t{n}", (n,), "float32") for n in (1, 1000)])
for number in range(5):
    with tf.device("GPU:0"):
        means = backend.reduce(plan, [tf.constant(float(number + keras_hpc.rank()), shape=(n,)) for n in (1, 1000)])
    sys.stdout.write(f"<{keras_hpc.rank()}: {[float(mean.numpy()[0]) for mean in means]}>\n")
    sys.stdout.flush()
    keras_hpc.barrier()

job = current.job()
specs = [TensorSpec("a", (50_000,), "float32"), TensorSpec("b", (3, 5), "float32")]
plan = job.teams[0].plan("late", specs, in_segment=True, device=job.device.ordinal)


def squares(a, b, weight):
    with tf.device("GPU:0"):
        return backend.reduce(plan, [tf.square(a), tf.square(b)], weight)


for reduce in (squares, tf.function(squares)):
    kept = []
    for number in range(4):
        factor = number + 1.0 + keras_hpc.rank()
        a, b = (tf.constant(np.arange(n, dtype=np.float32).reshape(shape)) for n, shape in ((50_000, -1), (15, (3, 5))))
        means = reduce(a * factor, b * factor, tf.constant(1.0 + 2 * keras_hpc.rank(), tf.float64))
        if number % 2:
            kept.append(means)  # they are in memory of the engine, which goes on without it
        expected = ((number + 1.0) ** 2 + 3 * (number + 2.0) ** 2) / 4
        for mean, x in zip(means, (a, b), strict=True):
            assert "GPU" in mean.device
            np.testing.assert_allclose(mean.numpy(), x.numpy() ** 2 * expected, rtol=1e-6)
    for number, means in zip((1, 3), kept, strict=True):
        expected = ((number + 1.0) ** 2 + 3 * (number + 2.0) ** 2) / 4
        np.testing.assert_allclose(means[1].numpy(), np.arange(15).reshape(3, 5) ** 2 * expected, rtol=1e-6)
assert fake.fake_calls(b"cuMemcpyDtoDAsync") > 0
sys.stdout.write(f"<{keras_hpc.rank()} is done>\n")
