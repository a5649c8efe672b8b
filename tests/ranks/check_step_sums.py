# SPDX-License-Identifier: Apache-2.0
"""Steps of one's own that add gradients up over several batches, outside of what Keras knows: the same as one rank."""

import keras
import pytest
from keras_cases import enough_on
from own_step import OwnStep
from regression import X, Y, compare

RANKS = {"tensorflow": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2, 3), "torch": (2, 3)}
BACKEND = keras.backend.backend()
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")
BATCHES = 2  # whose gradients are added up
SAMPLES = 48  # an epoch has three whole batches: the sums last from one to the next


class Holder:
    """Is no list and no tensor: keeps the sums of a model in an object of the script."""

    def __init__(self, sums):
        self.sums = sums


class AddingUp(OwnStep):
    """Applies the mean of the gradients of some batches."""

    def __init__(self, where):
        super().__init__(lambda y, p: ops.mean(ops.square(y - p)))
        sums = [self.zeros(variable.shape) for variable in self.trainable_variables]
        self.batches = self.zeros(())
        if where == "an object":
            self.holder = Holder(sums)
        else:
            self.sums = {"list": sums, "nested": {"sums": tuple(sums)}}[where]

    def all_sums(self):
        if hasattr(self, "holder"):
            return self.holder.sums
        return self.sums["sums"] if isinstance(self.sums, dict) else self.sums

    def zeros(self, shape):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            return tf.Variable(tf.zeros(shape), trainable=False)
        return ops.zeros(tuple(shape))

    def train_step(self, data):
        return self.step_of_tensorflow(*data) if BACKEND == "tensorflow" else self.step_of_pytorch(*data)

    def step_of_tensorflow(self, x, y):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        for total, gradient in zip(self.all_sums(), tape.gradient(loss, self.trainable_variables), strict=True):
            total.assign_add(gradient / BATCHES)
        self.batches.assign_add(1.0)
        tf.cond(self.batches % BATCHES == 0, self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self):
        self.optimizer.apply_gradients(zip(self.all_sums(), self.trainable_variables, strict=True))
        for total in self.all_sums():
            total.assign(0.0 * total)

    def step_of_pytorch(self, x, y):
        import torch

        self.zero_grad()
        loss = self.own_loss(y, self(x, training=True))
        loss.backward()
        with torch.no_grad():
            for total, variable in zip(self.all_sums(), self.trainable_variables, strict=True):
                total.add_(variable.value.grad / BATCHES)
            self.batches.add_(1.0)
            if self.batches % BATCHES == 0:
                self.optimizer.apply([total.clone() for total in self.all_sums()], self.trainable_variables)
                for total in self.all_sums():
                    total.zero_()
        return {"loss": loss.detach()}


@pytest.mark.skipif(BACKEND == "jax", reason="keeps nothing beside the state of a step")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("where", ["list", "nested", "an object"])
@enough_on("tensorflow", "torch")
def test_a_trial_of_a_step_leaves_sums_of_gradients_alone(where, eager):
    def make():
        model = AddingUp(where)
        model.compile(keras.optimizers.SGD(0.05), run_eagerly=eager)
        return model

    compare(make, X[:SAMPLES], Y[:SAMPLES])


class Annealing:
    """Counts steps in Python, and gives what it adds to a loss a weight by them."""

    def __init__(self):
        self.steps = 0

    def weight(self):
        self.steps += 1
        return 0.01 * self.steps


class Annealed(OwnStep):
    """Keeps such an object in a dictionary."""

    def __init__(self):
        super().__init__(lambda y, p: ops.mean(ops.square(y - p)) + self.helpers["weight"].weight() * ops.mean(p))
        self.helpers = {"weight": Annealing()}


@pytest.mark.skipif(BACKEND == "jax", reason="runs no step eagerly")
@enough_on("torch")
def test_a_trial_of_a_step_leaves_what_an_object_counts_alone():
    def make():
        model = Annealed()
        model.compile(keras.optimizers.SGD(0.05), run_eagerly=True)
        return model

    compare(make, X[:SAMPLES], Y[:SAMPLES])
