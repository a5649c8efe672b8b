"""init() with GPUs that are not there, and rank 1 cannot have its own: `refused_device.py memory|started GPU CUDA`."""

import ctypes
import sys

import tensorflow as tf
from mpi4py import MPI
from tensorflow.python.framework.load_library import load_pluggable_device_library

what, library, cuda = sys.argv[1:]
ctypes.CDLL(cuda).fake_show(0, 2)
load_pluggable_device_library(library)

import keras_hpc  # noqa: E402
from keras_hpc.errors import LaunchError  # noqa: E402

rank = MPI.COMM_WORLD.rank


def refused(devices, kind):
    raise tf.errors.ResourceExhaustedError(None, None, "CUDA out of memory.")


if rank == 1 and what == "memory":
    tf.config.set_visible_devices = refused  # where a context of CUDA is made, as PyTorch does
elif rank == 1:
    tf.constant(1.0) + 1.0
try:
    keras_hpc.init()
    said = "no error"
except (RuntimeError, tf.errors.OpError, LaunchError) as error:
    said = f"{type(error).__name__}: {error}".replace("\n", " ")
sys.stdout.write(f"<{rank}: {said}>\n")
sys.stdout.flush()
