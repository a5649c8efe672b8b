"""A rank that does not come to an exchange inside of a model: `fail_spatial.py HOW`. See test_failures.py."""

import os
import signal
import sys
import time

import keras
import numpy as np

import keras_hpc

how = sys.argv[1]
keras_hpc.init(spatial=2, timeout_seconds=4, stall_seconds=0.5)
calls = []


@keras_hpc.spatial.pointwise
class Fails(keras.layers.Layer):
    def call(self, x):
        calls.append(1)
        if len(calls) == 12 and keras_hpc.rank() == 1:
            sys.stdout.write(f"FAILS AT {time.time()}\n")
            sys.stdout.flush()
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "raise":
                raise RuntimeError("boom in a layer")
            else:
                time.sleep(1000)
        return x


model = keras.Sequential([keras.Input((16, 8, 2)), Fails(), keras.layers.Conv2D(1, 3, padding="same", name="third")])
model.compile("sgd", "mse")
x = np.ones((40, 16, 8, 2), "float32")
model.fit(x, x[..., :1], batch_size=4, epochs=3, verbose=0)
sys.stdout.write("trained to the end\n")
