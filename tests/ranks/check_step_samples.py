# SPDX-License-Identifier: Apache-2.0
"""Steps of the user's own around a compiled function, which is traced once for other numbers of samples."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, assert_identical, enough, job, on_one_rank, values
from regression import X, Y, dense

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,)}
SOAK = {"tensorflow": (3,), "jax": (3,)}
BACKEND = keras.backend.backend()
ops = keras.ops
PLACES, STEPS = 4, 5  # of a rank's batch, most of which are empty


def samples_of(rank, step):
    return (step + 2 * rank) % PLACES


def batches(whole):
    """Yields this rank's samples of each step, or all, filled up to one shape, and which of them are samples."""
    begin = 0
    for step in range(STEPS):
        numbers = [samples_of(rank, step) for rank in range(job().size)]
        before, number, places = sum(numbers[: job().rank]), numbers[job().rank], PLACES
        if whole:
            before, number, places = 0, sum(numbers), PLACES * job().size
        rows = slice(begin + before, begin + before + number)
        fill = [(0, places - number), (0, 0)]
        yield np.pad(X[rows], fill), np.pad(Y[rows], fill), np.float32(np.arange(places) < number)
        begin += sum(numbers)


def loss_of(predicted, y, known):
    return ops.sum(ops.square(predicted - y)[:, 0] * known) / ops.maximum(ops.sum(known), 1)


def step_of_tensorflow(model, optimizer):
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]), tf.TensorSpec([None])])
    def step(x, y, known):
        with tf.GradientTape() as tape:
            loss = loss_of(model(x), y, known)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    return step


def step_of_jax(model, optimizer):
    import jax

    @jax.jit
    def update(weights, state, *batch):
        def loss(weights):
            return loss_of(model.stateless_call(weights, [], batch[0])[0], *batch[1:])

        return optimizer.stateless_apply(state, jax.grad(loss)(weights), weights)

    def step(*batch):
        weights, state = model.trainable_variables, optimizer.variables
        new = update([v.value for v in weights], [v.value for v in state], *batch)
        for variable, value in zip([*weights, *state], [*new[0], *new[1]], strict=True):
            variable.assign(value)

    return step


def train(whole, samples=int):
    keras.utils.set_random_seed(3)
    model, optimizer = dense(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    step = (step_of_jax if BACKEND == "jax" else step_of_tensorflow)(model, optimizer)
    for batch in batches(whole):
        with keras_hpc.step(samples=samples(batch[2].sum())):
            step(*map(ops.convert_to_tensor, batch))
    return values(model)


@pytest.mark.usefixtures("global_batches")
@pytest.mark.parametrize("samples", [int, *enough([ops.convert_to_tensor])])
def test_a_compiled_function_counts_the_samples_of_each_step(samples):
    alone = on_one_rank(lambda: train(True))
    together = train(False, samples)
    assert_identical(together)
    assert_close(together, alone, 3e-6)


@pytest.mark.usefixtures("global_batches")
def test_train_on_batch_is_compiled_once_for_all_steps():
    traced = []

    class Model(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            traced.append(None)
            return super().compute_loss(*args, **kwargs)

    keras.utils.set_random_seed(3)
    model = Model([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for samples in range(1, 5):  # as words of a batch, of which it has as many samples each time
        with keras_hpc.step(samples=samples):
            model.train_on_batch(X[:4], Y[:4])
        if samples == 1:
            first = len(traced)
    assert len(traced) == first
