# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 (a fixture)
"""Pipelined schedules against SGD with delayed gradients in NumPy, on any number of ranks."""

import functools
import os

import keras
import numpy as np
import pytest
from keras_cases import enough, enough_on, job, part
from linear_cases import (
    BATCH,
    FEATURES,
    MOMENTUM,
    RATE,
    SCHEDULED,
    STEPS,
    SYNCHRONOUS,
    W,
    data,
    fit_on,
    linear,
    two_teams,
)

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (1, 2)}
SOAK = {"tensorflow": (1, 2, 3), "jax": (2,)}

SAMPLES = 138  # the last step of an epoch has 6
PIPELINED = SCHEDULED
X, Y = data(SAMPLES)
fit = functools.partial(fit_on, X, Y)
pytestmark = pytest.mark.usefixtures("two_teams")


class Delayed:
    """SGD with momentum in float64; pipelined steps apply the gradient of the step before."""

    def __init__(self, clip=None):
        self.w, self.b = W.astype(np.float64), np.zeros(1)
        self.m = [np.zeros_like(self.w), np.zeros(1)]
        self.outstanding = None
        self.updates = 0
        self.clip = clip

    def gradient(self, x, y):
        error = x @ self.w + self.b - y
        return [2 * x.T @ error / len(x), 2 * error.mean(axis=0)]

    def update(self, gradients):
        if self.clip is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            gradients = [g * min(1.0, self.clip / norm) for g in gradients]
        for i, (value, g) in enumerate(zip((self.w, self.b), gradients, strict=True)):
            self.m[i] = MOMENTUM * self.m[i] - RATE * g
            value += self.m[i]
        self.updates += 1

    def step(self, gradients, pipelined):
        self.drain()
        if pipelined:
            self.outstanding = gradients
        else:
            self.update(gradients)

    def drain(self):
        if self.outstanding is not None:
            self.update(self.outstanding)
        self.outstanding = None

    def batch(self, number):
        begin = number % STEPS * BATCH
        return self.gradient(X[begin : begin + BATCH].astype(np.float64), Y[begin : begin + BATCH].astype(np.float64))

    def train(self, steps, first=0, last=0, drain=()):
        for s in range(steps):
            self.step(self.batch(s), first <= s < steps - last)
            if s + 1 in drain:
                self.drain()
        self.drain()
        return self


def check(model, reference):
    w, b = model.get_weights()
    np.testing.assert_allclose(w, reference.w, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(b, reference.b, rtol=1e-6, atol=1e-6)
    assert int(model.optimizer.iterations) == reference.updates
    keras_hpc.check_replicas(model)


@pytest.mark.parametrize(
    ("first", "last", "reference"),
    [
        (7, 4, (7, 4)),
        *(pytest.param(*case, marks=enough_on("torch")) for case in ((0.25, 0.5, (6, 12)), (20, 20, (20, 4)))),
        *(
            pytest.param(*case, marks=enough_on())
            for case in ((0, 0, (0, 0)), (5, 0, (5, 0)), (0, 3, (0, 3)), (100, 0, (24, 0)))
        ),
    ],
)
def test_fit_equals_delayed_sgd(first, last, reference):
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", synchronous_steps=first, cooldown_steps=last)
    model = linear()
    fit(model)
    check(model, Delayed().train(2 * STEPS, *reference))
    # Another fit begins anew.
    model.set_weights([W, np.zeros(1, "float32")])
    model.optimizer.iterations.assign(0)
    for momentum in model.optimizer._momentums if hasattr(model.optimizer, "_momentums") else model.optimizer.momentums:
        momentum.assign(np.zeros(momentum.shape, "float32"))
    fit(model)
    check(model, Delayed().train(2 * STEPS, *reference))


@pytest.mark.parametrize("compiled", [{"steps_per_execution": 4}, {"run_eagerly": True}], ids=str)
@enough_on("tensorflow", "torch")
def test_ways_to_run_a_step(compiled):
    if "run_eagerly" in compiled and keras.backend.backend() == "jax" and job().size > 2:
        return
    if "steps_per_execution" in compiled and keras.backend.backend() == "torch":
        pytest.skip("Keras refuses several steps per execution on PyTorch")
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", synchronous_steps=3, cooldown_steps=5)
    model = linear(**compiled)
    fit(model)
    check(model, Delayed().train(2 * STEPS, 3, 5))


@enough_on("torch")
def test_all_steps_synchronous_is_synchronous_to_the_last_bit():
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", synchronous_steps=1.0)
    models = [linear(PIPELINED), linear(SYNCHRONOUS)]
    for model in models:
        fit(model)
    for a, b in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        assert a.tobytes() == b.tobytes()


@enough_on("torch")
def test_two_models_each_as_its_own_reference():
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", synchronous_steps=2, cooldown_steps=3, max_steps=STEPS)
    pipelined, synchronous = linear(PIPELINED), linear(SYNCHRONOUS)
    for s in range(STEPS):
        batch = part(X, s, False, BATCH), part(Y, s, False, BATCH)
        pipelined.train_on_batch(*batch)
        synchronous.train_on_batch(*batch)
    check(pipelined, Delayed().train(STEPS, 2, 3))
    check(synchronous, Delayed().train(STEPS, STEPS))


@enough_on("torch")
def test_drained_before_evaluate_and_predict():
    keras_hpc.configure_team(PIPELINED, schedule="pipelined")
    model, reference = linear(), Delayed()
    for s in range(5):
        model.train_on_batch(part(X, s, False, BATCH), part(Y, s, False, BATCH))
        reference.step(reference.batch(s), True)
        if s == 2:
            reference.drain()
            loss = model.evaluate(X, Y, verbose=0)
            error = X @ reference.w + reference.b - Y
            np.testing.assert_allclose(loss, (error**2).mean(), rtol=1e-5)
            check(model, reference)
    reference.drain()
    keras_hpc.drain(model)
    check(model, reference)
    keras_hpc.drain(model)  # nothing is left
    np.testing.assert_allclose(model.predict(X, verbose=0), X @ reference.w + reference.b, rtol=1e-4, atol=1e-5)
    check(model, reference)


@enough_on("torch")
def test_drained_before_validation_and_checkpoints(tmp_path):
    keras_hpc.configure_team(PIPELINED, schedule="pipelined")
    model = linear()
    history = fit(model, validation_data=(X, Y))
    reference = Delayed().train(2 * STEPS, drain=(STEPS,))
    check(model, reference)
    error = X @ reference.w + reference.b - Y
    np.testing.assert_allclose(history.history["val_loss"][-1], (error**2).mean(), rtol=1e-5)

    model = linear()
    path = os.path.join(tmp_path, "{epoch}.keras")
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    check(model, Delayed().train(2 * STEPS, drain=(STEPS,)))
    if keras_hpc.rank() == 0:
        with keras_hpc.local():
            saved = keras.saving.load_model(path.format(epoch=1))
        check_weights(saved, Delayed().train(STEPS))


def check_weights(model, reference):
    w, b = model.get_weights()
    np.testing.assert_allclose(w, reference.w, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(b, reference.b, rtol=1e-6, atol=1e-6)


@enough_on("torch")
def test_the_root_alone_saves_what_draining_would_leave(tmp_path):
    keras_hpc.configure_team(PIPELINED, schedule="pipelined")
    model, reference = linear(), Delayed()
    for s in range(7):
        model.train_on_batch(part(X, s, False, BATCH), part(Y, s, False, BATCH))
        reference.step(reference.batch(s), True)
        if s == 4 and keras_hpc.rank() == 0:
            path = os.path.join(tmp_path, "model.keras")
            model.save(path)
            with keras_hpc.local():
                saved = keras.saving.load_model(path)
            check_weights(saved, Delayed().train(5))
            assert int(saved.optimizer.iterations) == 5
    assert int(model.optimizer.iterations) == 6, "saving changed the training"
    model.evaluate(X, Y, verbose=0)
    reference.drain()
    check(model, reference)


@enough_on("torch")
def test_loss_scaling():
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", cooldown_steps=4)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(RATE, momentum=MOMENTUM), initial_scale=8.0, dynamic_growth_steps=3
    )
    model = linear(optimizer=optimizer)
    fit(model)
    assert float(optimizer.dynamic_scale) > 8.0, "the scale did not change during the training"
    check(model, Delayed().train(2 * STEPS, 0, 4))


@enough_on("torch")
def test_clipping():
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", synchronous_steps=2)
    model = linear(optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM, global_clipnorm=0.5))
    fit(model)
    check(model, Delayed(clip=0.5).train(2 * STEPS, 2))


@pytest.mark.parametrize("scaled", [True, *enough([False], "torch")])
def test_accumulation(scaled):
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", synchronous_steps=2, cooldown_steps=3)
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM, gradient_accumulation_steps=2)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=16.0)
    model = linear(optimizer=optimizer)
    fit(model)
    reference = Delayed()
    for u in range(STEPS):  # two epochs of half as many updates
        pairs = zip(reference.batch(2 * u), reference.batch(2 * u + 1), strict=True)
        reference.step([(a + b) / 2 for a, b in pairs], 2 <= u < STEPS - 3)
    reference.drain()
    check_weights(model, reference)
    assert int(model.optimizer.iterations) == STEPS
    keras_hpc.check_replicas(model)


def test_a_loop_of_the_users_own():
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", synchronous_steps=1, cooldown_steps=3, max_steps=STEPS)
    keras.utils.set_random_seed(1)
    model = linear()
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)
    keras_hpc.assign_team(optimizer, PIPELINED)
    loops = {"tensorflow": own_loop_tensorflow, "jax": own_loop_jax, "torch": own_loop_torch}
    loops[keras.backend.backend()](model, optimizer)
    # Loops of the user's own give every rank the same weight; so parts must be of equal size.
    check_weights(model, Delayed().train(STEPS - 1, 1, 2))
    assert int(optimizer.iterations) == STEPS - 1


def own_batches():
    for s in range(STEPS - 1):  # without the last one, which is smaller
        yield part(X, s, False, BATCH), part(Y, s, False, BATCH)


def own_loop_tensorflow(model, optimizer):
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    for x, y in own_batches():
        step(x, y)


def own_loop_jax(model, optimizer):
    import jax

    def loss_of(trainable, x, y):
        predicted, _ = model.stateless_call(trainable, [], x)
        return ((predicted - y) ** 2).mean()

    @jax.jit
    def step(trainable, state, x, y):
        gradients = jax.grad(loss_of)(trainable, x, y)
        return optimizer.stateless_apply(state, gradients, trainable)

    trainable, state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    for x, y in own_batches():
        trainable, state = step(trainable, state, x, y)
    for variable, value in zip([*model.trainable_variables, *optimizer.variables], [*trainable, *state], strict=True):
        variable.assign(value)


def own_loop_torch(model, optimizer):
    for x, y in own_batches():
        model.zero_grad()
        loss = keras.ops.mean((model(x, training=True) - keras.ops.convert_to_tensor(y)) ** 2)
        loss.backward()
        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)


@enough_on("torch")
def test_what_is_never_applied_is_said(caplog):
    keras_hpc.configure_team(PIPELINED, schedule="pipelined")
    model = linear()
    model.train_on_batch(part(X, 0, False, BATCH), part(Y, 0, False, BATCH))
    rank = keras_hpc.rank()
    with caplog.at_level("INFO", "keras_hpc"):
        keras_hpc.finalize()
    told = any("1 average of pipelined teams not applied" in record.getMessage() for record in caplog.records)
    assert told == (rank == 0)


@enough_on("torch")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"schedule": "async"}, "Received: schedule='async'"),
        ({"synchronous_steps": -1}, "Received: synchronous_steps=-1"),
        ({"cooldown_steps": 1.5}, "Received: cooldown_steps=1.5"),
        ({"max_steps": 0}, "Received: 0"),
        ({"bucket_bytes": 1 << 31}, "Received: 2147483648"),
        ({"wire_dtype": "int8"}, "Received: wire_dtype='int8'"),
        ({"team": 2}, "Received: team=2"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        keras_hpc.configure_team(**{"schedule": "pipelined", **arguments})


@enough_on("torch")
def test_too_late_and_too_little():
    model = linear(SYNCHRONOUS)
    fit(model, epochs=1)
    if job().size > 1:  # one rank alone reduces none
        with pytest.raises(RuntimeError, match="reduced gradients already"):
            keras_hpc.configure_team(SYNCHRONOUS, schedule="pipelined")
    keras_hpc.configure_team(PIPELINED, schedule="pipelined", cooldown_steps=0.5)
    model = linear(PIPELINED)
    with pytest.raises(ValueError, match="max_steps"):
        model.train_on_batch(part(X, 0, False, BATCH), part(Y, 0, False, BATCH))
