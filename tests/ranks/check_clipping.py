# SPDX-License-Identifier: Apache-2.0
"""Gradients that a script clips before its optimizer gets them: the same as one rank."""

import logging

import keras
import numpy as np
import pytest
from keras_cases import assert_close, assert_identical, enough, enough_on, job, on_one_rank, values
from regression import X, Y, dense

import keras_hpc
from keras_hpc.job import current

RANKS = {"tensorflow": (2,), "torch": (2,), "jax": (2,)}
SOAK = {"tensorflow": (2, 3), "jax": (2,), "torch": (3,)}  # most of it is compiling
BACKEND = keras.backend.backend()
ops = keras.ops
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(batch="global", teams=2)
    yield
    keras_hpc.finalize()


def loss_of(model, x, y):
    return ops.mean(ops.square(model(x) - y))


def compare(train):
    """Trains on one rank on all samples, and on parts of unequal length, the last of which may have none."""
    lengths = [7, 3, 0][: job().size]
    start, rows, total = sum(lengths[: job().rank]), lengths[job().rank], sum(lengths)
    alone = on_one_rank(lambda: train(X[:total], Y[:total], total))
    together = train(X[start : start + rows], Y[start : start + rows], rows)
    assert_identical(together)
    assert_close(together, alone, 3e-6)


# ---- PyTorch

in_pytorch = pytest.mark.skipif(BACKEND != "torch", reason="functions of PyTorch")


def loop_of_pytorch(clip, make_optimizer):
    import torch

    def train(x, y, samples):
        keras.utils.set_random_seed(3)
        model = dense()
        optimizer = make_optimizer(model)
        norms = []
        for _ in range(STEPS):
            with keras_hpc.step(samples=samples):
                model.zero_grad()
                if samples:
                    loss_of(model, torch.tensor(x), torch.tensor(y)).backward()
                norms.append(clip(model.parameters()))
                if isinstance(optimizer, torch.optim.Optimizer):
                    optimizer.step()
                else:
                    gradients = [v.value.grad for v in model.trainable_variables]
                    optimizer.apply(gradients, model.trainable_variables)
        return [*values(model), *(np.array(norm) for norm in norms if norm is not None)]

    return train


@in_pytorch
@pytest.mark.parametrize("optimizer", ["torch", "keras"])
@pytest.mark.parametrize("by", ["norm", "norm in two calls", "value"])
def test_functions_of_pytorch(by, optimizer):
    import torch

    def clip(parameters):
        if by == "norm":
            return torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        if by == "norm in two calls":
            parameters = list(parameters)
            norm = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
            torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)
            return norm
        return torch.nn.utils.clip_grad_value_(parameters, 0.05)

    def make(model):
        if optimizer == "torch":
            return torch.optim.SGD(model.parameters(), lr=0.1)
        made = keras.optimizers.SGD(0.1)
        made.build(model.trainable_variables)
        keras_hpc.assign_team(made, 1)
        return made

    compare(loop_of_pytorch(clip, make))


@in_pytorch
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_loss_scale_skips_a_step_on_all_ranks(fused):
    import torch

    keras.utils.set_random_seed(3)
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = values(model)
    for number in range(2):
        optimizer.zero_grad()
        x = torch.tensor(X[:4]) * (float("inf") if number == 0 and job().rank == job().size - 1 else 1.0)
        scaler.scale(loss_of(model, x, torch.tensor(Y[:4]))).backward()
        if not fused:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        after = values(model)
        assert_identical(after)
        assert scaler.get_scale() == 4.0
        assert all(np.array_equal(a, b) for a, b in zip(start, after, strict=True)) == (number == 0)


# ---- TensorFlow

in_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="functions of TensorFlow")


def clip_of_tensorflow(by, variables):
    import tensorflow as tf

    sums = [tf.Variable(tf.zeros(variable.shape)) for variable in variables]

    def by_global_norm(gradients):
        return tf.clip_by_global_norm(gradients, 0.5, use_norm=tf.linalg.global_norm(gradients))[0]

    def by_norm_of_sums(gradients):
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(gradient)
        return tf.clip_by_global_norm(sums, 0.5)[0]

    functions = {
        "global norm": by_global_norm,
        "global norm of products": lambda gradients: by_global_norm([2 * gradient for gradient in gradients]),
        "global norm of sums": by_norm_of_sums,
        "norm": lambda gradients: [tf.clip_by_norm(gradient, 0.1) for gradient in gradients],
        "value": lambda gradients: [tf.clip_by_value(gradient, -0.05, 0.05) for gradient in gradients],
    }
    return functions[by]


@in_tensorflow
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("by", ["global norm", "global norm of products", "global norm of sums", "norm", "value"])
def test_functions_of_tensorflow(by, traced):
    import tensorflow as tf

    def train(x, y, samples):
        keras.utils.set_random_seed(3)
        model, optimizer = dense(), keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        clip = clip_of_tensorflow(by, model.trainable_variables)

        def update(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(clip(gradients), model.trainable_variables, strict=True))

        step = tf.function(update) if traced else update
        for _ in range(STEPS):
            with keras_hpc.step(samples=samples):
                step(tf.constant(x), tf.constant(y))
        return values(model)

    compare(train)


@in_tensorflow
@pytest.mark.parametrize("by", ["global norm", *enough(["norm"])])
@pytest.mark.parametrize("traced", [*enough([False]), True])
@pytest.mark.parametrize("rule", [keras.optimizers.Adam, *enough([keras.optimizers.SGD])])
def test_gradients_of_an_embedding(rule, traced, by):
    """They are rows, of which a traced step does not know the number, and Adam takes a row that comes twice as two."""
    import tensorflow as tf

    def train(x, y, samples):
        keras.utils.set_random_seed(3)
        words = tf.constant((np.abs(x[:, :3]) * 5).astype("int32") % 7)
        embedding, other = keras.layers.Embedding(7, 4), keras.layers.Dense(Y.shape[1])
        model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding, keras.layers.Flatten(), other])
        optimizer = rule(0.05)
        optimizer.build(model.trainable_variables)
        clip = clip_of_tensorflow(by, model.trainable_variables)

        def update(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y)
            gradients = clip(tape.gradient(loss, model.trainable_variables))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        any_number = [tf.TensorSpec((None, 3), tf.int32), tf.TensorSpec((None, Y.shape[1]))]
        step = tf.function(update, input_signature=any_number) if traced else update
        for _ in range(STEPS):
            with keras_hpc.step(samples=samples):
                step(words, tf.constant(y))
        return values(model)

    compare(train)


# ---- a train_step


def step_of(change):
    """A `train_step` whose gradients are changed: a list of them, or on PyTorch what parameters have."""
    if BACKEND == "torch":
        import torch

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                change([v.value for v in self.trainable_variables])
                self.optimizer.apply([v.value.grad for v in self.trainable_variables], self.trainable_variables)
            return {"loss": loss.detach()}
    elif BACKEND == "jax":
        import jax

        def train_step(self, state, data):
            trainable, others, optimizer, metrics = state
            x, y = data

            def loss_of(trainable):
                return ops.mean(ops.square(self.stateless_call(trainable, others, x, training=True)[0] - y))

            loss, gradients = jax.value_and_grad(loss_of)(trainable)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, change(gradients), trainable)
            return {"loss": loss}, (trainable, others, optimizer, metrics)
    else:
        import tensorflow as tf

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = change(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    return train_step


def fit(change, optimizer=None, samples=31):
    keras.utils.set_random_seed(3)
    model_class = type("Own", (keras.Sequential,), {"train_step": step_of(change)})
    model = model_class([keras.Input((X.shape[1],)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(Y.shape[1])])
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    model.fit(X[:samples], Y[:samples], batch_size=12, epochs=2, shuffle=False, verbose=0)
    return values(model)


def by_a_function():
    if BACKEND == "torch":
        import torch

        return lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, max_norm=0.5)
    if BACKEND == "jax":  # there is none
        mean = (lambda gradients: gradients) if current.is_local() else keras_hpc.allreduce
        return lambda gradients: [ops.clip(gradient, -0.05, 0.05) for gradient in mean(gradients)]
    return clip_of_tensorflow("global norm", ())


def by_hand():
    """What no one but the step itself knows of."""
    if BACKEND == "torch":
        return lambda parameters: [p.grad.clamp_(-0.05, 0.05) for p in parameters]
    return lambda gradients: [g * ops.minimum(1.0, 0.1 / ops.norm(g)) for g in gradients]


def linearly():
    if BACKEND == "torch":
        return lambda parameters: [p.grad.mul_(0.5).add_(p, alpha=1e-4) for p in parameters]
    return lambda gradients: [0.5 * gradient + 1e-4 for gradient in gradients]


@pytest.fixture
def warnings(caplog, monkeypatch):
    """A function that returns what was said about limits."""
    monkeypatch.setattr(logging.getLogger("keras_hpc"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if "limits gradients" in record.getMessage()]


@enough_on("torch")
def test_a_train_step_that_clips(warnings):
    samples = 24 if BACKEND == "jax" else 31  # the mean by hand counts ranks alike
    alone = on_one_rank(lambda: fit(by_a_function(), samples=samples))
    together = fit(by_a_function(), samples=samples)
    assert_identical(together)
    assert_close(together, alone, 3e-6)
    assert not warnings()


@pytest.mark.parametrize("change", [by_hand, linearly])
@enough_on("torch")
def test_what_a_train_step_does_to_gradients_by_hand_is_said(change, warnings):
    fit(change())
    assert len(warnings()) == (change is by_hand and job().size > 1 and job().rank == 0)


class ClipsSamples(keras.Sequential):
    """Limits the gradients of each sample, as for differential privacy, before it takes their mean (JAX)."""

    def train_step(self, state, data):
        import jax

        trainable, others, optimizer, metrics = state

        def loss_of(trainable, x, y):
            return ops.mean(ops.square(self.stateless_call(trainable, others, x[None], training=True)[0] - y[None]))

        found = jax.vmap(jax.grad(loss_of), (None, 0, 0))(trainable, *data)
        sizes = ops.sqrt(sum(ops.sum(ops.square(ops.reshape(g, (len(g), -1))), axis=1) for g in found))
        limited = [ops.mean(jax.vmap(ops.multiply)(g, ops.minimum(1.0, 0.1 / sizes)), axis=0) for g in found]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, limited, trainable)
        return {"loss": ops.zeros(())}, (trainable, others, optimizer, metrics)


@pytest.mark.skipif(BACKEND != "jax", reason="has no gradients of each sample in one call")
def test_limits_of_each_sample_are_those_of_one_rank(warnings):
    def train():
        keras.utils.set_random_seed(3)
        model = ClipsSamples([keras.Input((X.shape[1],)), keras.layers.Dense(Y.shape[1])])
        model.compile(keras.optimizers.SGD(0.1))
        model.fit(X[:31], Y[:31], batch_size=12, shuffle=False, verbose=0)
        return values(model)

    alone = on_one_rank(train)
    assert_close(train(), alone, 3e-6)
    assert not warnings()


@enough_on("torch")
def test_limits_of_an_optimizer_are_nothing_to_be_said(warnings):
    fit(linearly(), keras.optimizers.SGD(0.1, global_clipnorm=0.1))
    assert not warnings()
