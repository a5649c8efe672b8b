"""Trains on a GPU that is not there, which rank 1 may be unable to use for its gradients: `refused_gpu.py [CALL]`.

CALL: the function of the driver that fails on it.
"""

import hashlib
import sys

import fake_gpu
import keras
import numpy as np

import keras_hpc

fake_gpu.pytest_configure(None)
keras_hpc.init()
if keras_hpc.rank() == 1 and len(sys.argv) > 1:
    fake_gpu._fake.fake_fail(sys.argv[1].encode(), 0)
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
try:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, x.sum(axis=1, keepdims=True), batch_size=8, verbose=0)
    said = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
except RuntimeError as error:
    said = str(error).replace("\n", " ")
sys.stdout.write(f"<{keras_hpc.rank()}: {said}>\n")
sys.stdout.flush()
