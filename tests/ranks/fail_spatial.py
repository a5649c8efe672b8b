"""A rank that does not come to an exchange inside of a model: `fail_spatial.py HOW WHERE`. See test_failures.py."""

import os
import signal
import sys
import time

import keras
import numpy as np

import keras_hpc

how, where = sys.argv[1:]
calls = []
fits = False


def fail(x):
    """Returns x, but for the twelfth time in `fit` on rank 1."""
    calls.extend([1] * fits)
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


def on_host(x):
    """Calls `fail` whenever the step runs, not only when it is traced."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        y = tf.numpy_function(fail, [x], x.dtype)
        y.set_shape(x.shape)
        return y
    if keras.backend.backend() == "jax":
        import jax

        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return fail(x)


@keras.ops.custom_gradient
def failing(x):
    def gradient(*arguments, upstream=None):
        if upstream is None:  # PyTorch names it, and has others before it
            (upstream,) = arguments
        return on_host(upstream) if where == "backward" else upstream

    return on_host(x) if where == "forward" else x + 0, gradient


@keras_hpc.spatial.pointwise
class Fails(keras.layers.Layer):
    def call(self, x):
        return failing(x)


def main():
    global fits
    keras_hpc.init(spatial=2, timeout_seconds=4, stall_seconds=0.5)
    conv = keras.layers.Conv2D
    # Of the layer before, backward comes after; of the first one it has nothing to exchange.
    model = keras.Sequential(
        [
            keras.Input((16, 8, 2)),
            conv(2, 1),
            *([conv(2, 3, padding="same", name="third"), Fails()] if where == "backward" else
              [Fails(), conv(1, 3, padding="same", name="third")]),
            conv(1, 1),
        ]
    )  # fmt: skip
    model.compile("sgd", "mse")
    x = np.ones((40, 16, 8, 2), "float32")
    fits = True  # compile() tries layers, too
    model.fit(x, x[..., :1], batch_size=4, epochs=3, verbose=0)
    sys.stdout.write("trained to the end\n")


main()
