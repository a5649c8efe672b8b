"""Reduces tensors of a GPU that is not there, one TensorFlow operation after the other: `reduce_on_gpu.py GPU CUDA`."""

import ctypes
import sys

import tensorflow as tf
from tensorflow.python.framework.load_library import load_pluggable_device_library

library, cuda = sys.argv[1:]
ctypes.CDLL(cuda).fake_show(0, 2)
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
