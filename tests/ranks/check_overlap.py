# SPDX-License-Identifier: Apache-2.0
"""Gradients are reduced while backward still runs: read from the trace of a real training."""

import json
import time

import keras
import numpy as np
import pytest
from keras_cases import assert_like_one_rank, data, enough, part

import keras_hpc
from keras_hpc import _native

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}
LAYERS, UNITS, BATCH, STEPS = 6, 512, 192, 12  # a kernel fills a bucket

BACKEND = keras.backend.backend()
is_jax = BACKEND == "jax"


@pytest.fixture(params=[1] if is_jax else [*enough([0]), 1], ids=lambda threads: f"{threads} threads")
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

        if BACKEND == "torch":
            passed = x.clone()
            if passed.requires_grad:
                passed.register_hook(lambda gradient: gradient + float(note(gradient)))
            return passed

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


def traced_fit(model, x):
    """Returns what happened in a `fit`, sorted by its begin."""
    _native.set_tracing(True)
    model.fit(x, x, batch_size=BATCH, verbose=0)
    _native.set_tracing(False)
    return sorted(json.loads(_native.take_trace()), key=lambda event: event[3])  # name, kind, team, begin, end


@pytest.mark.parametrize("options", [*enough([{}], "torch"), {"steps_per_execution": 4}], ids=str)
def test_last_layers_are_reduced_before_backward_reaches_the_first(job, options):
    if options and BACKEND == "torch":
        pytest.skip("Keras refuses several steps per execution on PyTorch")
    mark = Mark()
    layers = [keras.layers.Dense(UNITS, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((UNITS,)), layers[0], mark, *layers[1:]])
    model.compile(keras.optimizers.SGD(1e-3), "mse", **options)
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS * keras_hpc.size(), UNITS)).astype(np.float32)
    model.fit(x, x, batch_size=BATCH, verbose=0)
    mark.times.clear()
    events = traced_fit(model, x)

    gradients = [(kind, name) for name, kind, *_ in events if kind in ("start", "wait") and ": " in name]
    if not is_jax:  # XLA starts what is ready; the others keep one order, the same on all ranks
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


# What hooks in backward bring with them.

torch_only = pytest.mark.skipif(BACKEND != "torch", reason="TensorFlow and XLA see the whole step")


class Breaks(keras.layers.Layer):
    """The identity. Fails when backward passes, if armed."""

    armed = False

    def call(self, x):
        passed = x.clone()
        if passed.requires_grad:
            passed.register_hook(self.arrive)
        return passed

    def arrive(self, gradient):
        if Breaks.armed:
            raise ZeroDivisionError


def breaking():
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(8, activation="tanh"), Breaks(), keras.layers.Dense(8), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train_some(model, whole):
    for index in range(5):
        try:
            model.train_on_batch(*(part(array, index, whole) for array in data()))
        except ZeroDivisionError:
            assert Breaks.armed
        Breaks.armed = index == 1


@torch_only
def test_a_step_that_fails_on_all_ranks_leaves_the_next_one_alone(job):
    assert_like_one_rank(breaking, train_some)


@torch_only
def test_a_step_that_fails_on_one_rank_fails_on_all(job):
    if keras_hpc.size() == 1:
        pytest.skip("needs two ranks")
    model = breaking()
    train_some(model, False)
    Breaks.armed = keras_hpc.rank() == 0
    error = ZeroDivisionError if Breaks.armed else RuntimeError
    with pytest.raises(error, match="Another rank has left" if error is RuntimeError else None):
        model.train_on_batch(*(part(array, 0, False) for array in data()))
    Breaks.armed = False
    train_some(model, False)
    keras_hpc.check_replicas(model)


@torch_only
def test_gradients_live_where_they_are_reduced_until_the_job_ends(job):
    def places():
        model.train_on_batch(*(part(array, 0, True) for array in batches))
        return [variable.value.grad.data_ptr() for variable in model.trainable_variables]

    model, batches = breaking(), data()
    first = places()
    kept = [variable.value.grad for variable in model.trainable_variables]
    assert places() == first
    keras_hpc.finalize()
    assert not set(places()) & set(first)
    assert all(np.isfinite(gradient.numpy()).all() for gradient in kept)


@torch_only
def test_a_train_step_of_the_users_own_has_no_hooks(job):
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    mark = Mark()
    layers = [keras.layers.Dense(UNITS, use_bias=False) for _ in range(2)]
    model = Own([keras.Input((UNITS,)), layers[0], mark, layers[1]])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    x = np.zeros((BATCH * keras_hpc.size(), UNITS), np.float32)
    events = traced_fit(model, x)
    begins = [begin for name, kind, _, begin, _ in events if kind == "start" and ": kernel" in name]
    assert len(begins) == 2
    assert min(begins) > mark.times[-1]
