"""Trains with TensorFlow, on GPUs that are not there or on the CPU: `train_on_gpu.py OUT [TENSORFLOW_GPU CUDA]`.

Rank 0 writes what came out: losses and a digest of the weights of each case, and what was copied.
"""

import ctypes
import hashlib
import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

out, *libraries = sys.argv[1:]
cuda = None
if libraries:
    from tensorflow.python.framework.load_library import load_pluggable_device_library

    cuda = ctypes.CDLL(libraries[1])
    cuda.fake_show(0, 2)
    cuda.fake_let_host()  # TensorFlow has no kernels for this GPU: those of CPUs do its work
    cuda.fake_any_pointer(1)
    load_pluggable_device_library(libraries[0])

import keras_hpc  # noqa: E402

keras_hpc.init(teams=2)
RANK, SIZE = keras_hpc.rank(), keras_hpc.size()
X = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
TOKENS = np.random.default_rng(1).integers(0, 20, size=(50, 6))
Y = X.sum(axis=1, keepdims=True)
found = {"devices": [device.name for device in tf.config.get_visible_devices("GPU")]}


def network():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )


def words():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def train(name, model, optimizer, data=X, team=0, eagerly=False, **options):
    # XLA knows no such GPU.
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False, run_eagerly=eagerly)
    keras_hpc.assign_team(model, team)
    history = model.fit(data, Y, batch_size=4, epochs=2, verbose=0, **options).history
    keras_hpc.check_replicas(model)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())).hexdigest()
    found[name] = {"history": {k: list(map(float, v)) for k, v in history.items()}, "weights": digest}
    found[name]["on"] = sorted({tf.DeviceSpec.from_string(v.value.device).device_type for v in model.variables})


train("a tail", network(), keras.optimizers.Adam(0.01))
if "TESTS_SOAK" in os.environ:
    train("validation", network(), "sgd", validation_data=(X, Y))
    train("accumulation", network(), keras.optimizers.SGD(0.05, gradient_accumulation_steps=3))
    train("step by step", network(), keras.optimizers.Adam(0.01), eagerly=True)
train("rows of an embedding", words(), keras.optimizers.Adam(0.01), TOKENS)
keras_hpc.configure_team(1, schedule="pipelined", synchronous_steps=2, cooldown_steps=2)
train("pipelined", network(), keras.optimizers.SGD(0.01), team=1)
train("pipelined, step by step", network(), keras.optimizers.SGD(0.01), team=1, eagerly=True)

mine = tf.constant(X * (RANK + 1))
found["allreduce"] = [keras_hpc.allreduce(mine, op="sum").device.split(":")[-2], mine.device.split(":")[-2]]
found["sum"] = float(np.abs(keras_hpc.allreduce(mine, op="sum").numpy() - X * SIZE * (SIZE + 1) / 2).max())
everywhere = keras_hpc.broadcast(mine, root=SIZE - 1)
found["broadcast"] = float(np.abs(np.asarray(everywhere) - X * SIZE).max())

if cuda is not None:
    # A step, once everything is traced: each gradient is copied once, within the GPU.
    model = network()
    model.compile("sgd", "mse", jit_compile=False)
    batch = tf.constant(X[:4]), tf.constant(Y[:4])
    model.train_on_batch(*batch)
    before = cuda.fake_calls(b"cuMemcpyDtoDAsync")
    model.train_on_batch(*batch)
    found["gradients lent"] = cuda.fake_calls(b"cuMemcpyDtoDAsync") - before
    if RANK == 0:
        cuda.fake_fail(b"cuMemHostRegister", 0)  # then TensorFlow copies them to the host
train("on the host", network(), keras.optimizers.Adam(0.01))

if RANK == 0:
    Path(out).write_text(json.dumps(found))
