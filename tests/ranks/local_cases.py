# SPDX-License-Identifier: Apache-2.0
"""What the checks of local steps share: local SGD and DiLoCo's outer step in NumPy, a model, and loops of one's own."""

import contextlib
import functools

import keras
import numpy as np
from keras_cases import job, part
from linear_cases import BATCH, FEATURES, MOMENTUM, RATE, SCHEDULED, STEPS, W, data, fit_on

import keras_hpc

SAMPLES = 133  # the last step of an epoch has 1, so other ranks have none
LOCAL = SCHEDULED
X, Y = data(SAMPLES)
fit = functools.partial(fit_on, X, Y)


class LocalSGD:
    """SGD with momentum in float64 on every rank, whose weights are averaged after periods of steps."""

    def __init__(self, every=None, outer=None, average_optimizer=False, overlap=0):
        self.size = job().size
        self.every, self.outer, self.average_optimizer, self.overlap = every, outer, average_optimizer, overlap
        zero = [np.zeros((FEATURES, 1)), np.zeros(1)]
        self.w = [[W.astype(np.float64), np.zeros(1)] for _ in range(self.size)]
        self.m = [[z.copy() for z in zero] for _ in range(self.size)]
        self.v = [z.copy() for z in zero]  # the outer velocity
        self.anchor = None
        self.samples = np.zeros(self.size)
        self.since = 0
        self.sent = None
        self.iterations = 0
        self.apart = False  # momenta

    def gradient(self, r, x, y):
        error = x @ self.w[r][0] + self.w[r][1] - y
        return [2 * x.T @ error / len(x), 2 * error.mean(axis=0)]

    def update(self, r, gradients):
        for i, g in enumerate(gradients):
            self.m[r][i] = MOMENTUM * self.m[r][i] - RATE * g
            self.w[r][i] = self.w[r][i] + self.m[r][i]

    def parts(self, number):
        rows = np.arange(SAMPLES)[number % STEPS * BATCH :][:BATCH]
        return [(X[i].astype(np.float64), Y[i].astype(np.float64)) for i in np.array_split(rows, self.size)]

    def local(self, number, last=False):
        if self.anchor is None:
            self.anchor = [v.copy() for v in self.w[0]]
        for r, (x, y) in enumerate(self.parts(number)):
            self.samples[r] += len(x)
            if len(x):
                self.update(r, self.gradient(r, x, y))
        self.since, self.apart = self.since + 1, True
        self.iterations += 1
        ends = last or self.since == self.every
        if self.sent is not None and (ends or self.since == self.overlap):
            self.land()
        if ends and self.overlap and not last:
            self.sent = [[v.copy() for v in w] for w in self.w], self.mean()
            self.since, self.samples = 0, np.zeros(self.size)
        elif ends:
            self.exchange()

    def synchronous(self, number):
        parts = self.parts(number)
        weights = np.array([len(x) for x, _ in parts])
        found = [self.gradient(r, x, y) for r, (x, y) in enumerate(parts) if len(x)]
        means = [np.average([g[i] for g in found], axis=0, weights=weights[weights > 0]) for i in range(2)]
        for r in range(self.size):
            self.update(r, means)
        self.iterations += 1

    def mean(self):
        return [np.average([w[i] for w in self.w], axis=0, weights=self.samples) for i in range(2)]

    def after_outer(self, mean):
        if self.outer is None:
            return mean
        rate, momentum = self.outer
        found = []
        for i in range(2):
            moved = self.anchor[i] - mean[i]
            self.v[i] = momentum * self.v[i] + moved
            found.append(self.anchor[i] - rate * (moved + momentum * self.v[i]))
        self.anchor = found
        return found

    def land(self):
        sent, mean = self.sent
        target = self.after_outer(mean)
        self.w = [[w[i] + target[i] - s[i] for i in range(2)] for w, s in zip(self.w, sent, strict=True)]
        self.sent = None

    def exchange(self):
        mean = self.after_outer(self.mean())
        self.w = [[v.copy() for v in mean] for _ in range(self.size)]
        if self.average_optimizer:
            self.m = [[np.average([m[i] for m in self.m], axis=0, weights=self.samples) for i in range(2)]] * self.size
            self.m = [[v.copy() for v in m] for m in self.m]
        self.since, self.samples, self.anchor = 0, np.zeros(self.size), None

    def settle(self):
        if self.sent is not None:
            self.land()
        if self.since:
            self.exchange()
        if self.apart:
            self.average_momenta()
        return self

    def average_momenta(self):
        mean = [np.mean([m[i] for m in self.m], axis=0) for i in range(2)]
        self.m = [[v.copy() for v in mean] for _ in range(self.size)]

    def train(self, steps, first=0, last=0, settle=()):
        for s in range(steps):
            if first <= s < steps - last:
                self.local(s, last=last > 0 and s + 1 == steps - last)
                if last > 0 and s + 1 == steps - last:
                    self.average_momenta()
            else:
                self.synchronous(s)
            if s + 1 in settle:
                self.settle()
        return self.settle()


def check_weights(model, reference):
    w, b = model.get_weights()
    rank = job().rank
    np.testing.assert_allclose(w, reference.w[rank][0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(b, reference.w[rank][1], rtol=2e-6, atol=2e-6)


def check(model, reference):
    check_weights(model, reference)
    assert int(model.optimizer.iterations) == reference.iterations
    keras_hpc.check_replicas(model)


def momenta(optimizer):
    return [np.array(m) for m in (optimizer._momentums if hasattr(optimizer, "_momentums") else optimizer.momentums)]


def executions():
    """How often each plan of gradients or weights was carried out, on this rank."""
    return job().teams[LOCAL].report()["steps"]


def own_batches(steps):
    for s in range(steps):
        x, y = part(X, s, False, BATCH), part(Y, s, False, BATCH)
        with keras_hpc.step(samples=len(x)) if steps == STEPS else contextlib.nullcontext():
            yield x, y


def own_loop_tensorflow(model, optimizer, steps):
    import tensorflow as tf

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    for x, y in own_batches(steps):
        step(x, y)


def own_loop_jax(model, optimizer, steps):
    import jax

    def loss_of(trainable, x, y):
        predicted, _ = model.stateless_call(trainable, [], x)
        return ((predicted - y) ** 2).mean()

    @jax.jit
    def step(trainable, state, x, y):
        gradients = jax.grad(loss_of)(trainable, x, y)
        return optimizer.stateless_apply(state, gradients, trainable)

    trainable, state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    for x, y in own_batches(steps):
        trainable, state = step(trainable, state, x, y)
    for variable, value in zip([*model.trainable_variables, *optimizer.variables], [*trainable, *state], strict=True):
        variable.assign(value)


def own_loop_torch(model, optimizer, steps):
    for x, y in own_batches(steps):
        model.zero_grad()
        loss = keras.ops.mean((model(x, training=True) - keras.ops.convert_to_tensor(y)) ** 2)
        loss.backward()
        optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)


def own_loop(model, optimizer, steps=STEPS - 1):
    """Train in a loop as one writes it for this backend; with all of an epoch's steps, samples are told."""
    loops = {"tensorflow": own_loop_tensorflow, "jax": own_loop_jax, "torch": own_loop_torch}
    loops[keras.backend.backend()](model, optimizer, steps)
