# SPDX-License-Identifier: Apache-2.0
"""A model with a `train_step` of its own, on every backend."""

import keras
from keras import ops
from regression import dense

BACKEND = keras.backend.backend()


class OwnStep(keras.Model):
    """A model with a loss and a `train_step` of its own."""

    def __init__(self, loss, *layers, network=None):
        network = network or dense(*layers)
        inputs = keras.Input((4,), dtype=network.inputs[0].dtype)
        super().__init__(inputs, network(inputs))
        self.own_loss = loss

    if BACKEND == "jax":

        def train_step(self, state, data):
            import jax

            trainable, fixed, optimizer, metrics = state
            x, y = data

            def loss_of(trainable, fixed):
                predicted, fixed = self.stateless_call(trainable, fixed, x, training=True)
                return self.own_loss(y, predicted), fixed

            gradients, fixed = jax.grad(loss_of, has_aux=True)(trainable, fixed)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {"loss": ops.zeros(())}, (trainable, fixed, optimizer, metrics)

    else:

        def train_step(self, data):
            x, y = data
            rate = self.optimizer.learning_rate
            rate.assign(0.9 * rate)  # the trial of the step must leave it alone
            if BACKEND == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.own_loss(y, self(x, training=True))
                self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            else:
                self.zero_grad()
                self.own_loss(y, self(x, training=True)).backward()
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return {"loss": ops.zeros(())}
