# SPDX-License-Identifier: Apache-2.0
"""Gradients are reduced while backward still runs: read from the trace of a real training."""

import time

import keras
import numpy as np
import pytest

import keras_hpc
from keras_hpc import _native

RANKS = {"tensorflow": (2,), "jax": (2,)}
# With one thread, TensorFlow may compute all kernels' gradients after backward has gone through all layers.
ENV = {"TF_NUM_INTEROP_THREADS": "2"}
LAYERS, UNITS, BATCH, STEPS = 6, 512, 192, 12  # a kernel fills a bucket

is_jax = keras.backend.backend() == "jax"


@pytest.fixture(params=[1] if is_jax else [0, 1], ids=lambda threads: f"{threads} threads")
def job(request):
    keras_hpc.init(threads_per_team=request.param)
    yield
    keras_hpc.finalize()


class Mark(keras.layers.Layer):
    """The identity. Writes down when backward passes."""

    def __init__(self):
        super().__init__()
        self.times = []

    def call(self, x):
        def note(_):
            self.times.append(time.monotonic())  # the clock of the trace
            return np.float32(0)

        @keras.ops.custom_gradient
        def identity(x):
            def backward(gradient):
                if is_jax:
                    import jax

                    zero = jax.pure_callback(note, jax.ShapeDtypeStruct((), "float32"), gradient[0, 0])
                else:
                    import tensorflow as tf

                    # Not stateful: stateful operations run in the order of the program, so starts would wait for it.
                    zero = tf.numpy_function(note, [gradient[0, 0]], tf.float32, stateful=False)
                return gradient + zero

            return x, backward

        return identity(x)


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 4}], ids=["step", "steps_per_execution"])
def test_last_layers_are_reduced_before_backward_reaches_the_first(job, options):
    mark = Mark()
    layers = [keras.layers.Dense(UNITS, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((UNITS,)), layers[0], mark, *layers[1:]])
    model.compile(keras.optimizers.SGD(1e-3), "mse", **options)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS * keras_hpc.size(), UNITS)).astype(np.float32)
    model.fit(x, x, batch_size=BATCH, verbose=0)
    mark.times.clear()
    _native.set_tracing(True)
    model.fit(x, x, batch_size=BATCH, verbose=0)
    _native.set_tracing(False)
    events = sorted(_native.take_trace(), key=lambda event: event[3])  # name, kind, team, begin, end

    gradients = [(kind, name) for name, kind, *_ in events if kind in ("start", "wait") and ": " in name]
    if not is_jax:  # XLA starts what is ready; TensorFlow keeps the order of the program, the same on all ranks
        order = [(kind, f"{i}: kernel") for kind in ("start", "wait") for i in reversed(range(LAYERS))]
        assert gradients == order * STEPS
    assert sum(kind == "start" for kind, _ in gradients) == LAYERS * STEPS

    assert len(mark.times) == STEPS
    begins = [begin for name, kind, _, begin, _ in events if (name, kind) == (f"{LAYERS - 1}: kernel", "start")]
    early = sum(
        any(kind == "reduce" and first <= begin and end < passed for _, kind, _, begin, end in events)
        for first, passed in zip(begins, mark.times, strict=True)
    )
    # The rank that comes first has to wait for the other. But if starts came after backward, it could never happen.
    assert keras_hpc.allreduce(early, op="sum") > 0
