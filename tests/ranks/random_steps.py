# SPDX-License-Identifier: Apache-2.0
"""Models with steps, losses and metrics of their own, as the guides of Keras write them for each backend."""

import keras
from keras import ops

BACKEND = keras.backend.backend()


@keras.saving.register_keras_serializable("tests")
class Spread(keras.metrics.Metric):
    """A metric whose state is an array: the mean square of each output."""

    def __init__(self, width, name="spread", **kwargs):
        super().__init__(name=name, **kwargs)
        self.width = width
        self.total = self.add_variable((width,), "zeros", name="total")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.cast(ops.sum(ops.square(y_pred), axis=0), self.dtype))
        self.rows.assign_add(ops.cast(ops.shape(y_pred)[0], self.dtype))

    def result(self):
        return ops.sum(ops.sqrt(self.total / ops.maximum(self.rows, 1)))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


@keras.saving.register_keras_serializable("tests")
class OwnLoss(keras.Model):
    """Adds to the loss what it makes of outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * sum(ops.mean(ops.square(out)) for out in keras.tree.flatten(y_pred))


@keras.saving.register_keras_serializable("tests")
class OwnMetrics(keras.Model):
    """Has a metric beside those of `compile`, and steps that update it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = keras.metrics.Mean(name="size")
        self.total = keras.metrics.Sum(name="total")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.size.update_state(ops.mean(ops.abs(keras.tree.flatten(y_pred)[0]), axis=-1))
        self.total.update_state(ops.sum(ops.square(keras.tree.flatten(y_pred)[-1]), axis=-1))
        return super().compute_metrics(x, y, y_pred, sample_weight)


@keras.saving.register_keras_serializable("tests")
class OwnStep(keras.Model):
    """Computes gradients and updates by itself."""

    if BACKEND == "jax":

        def train_step(self, state, data):
            import jax

            trainable, others, optimizer, metrics = state
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

            def loss_of(trainable, others):
                y_pred, others = self.stateless_call(trainable, others, x, training=True)
                loss = self.compute_loss(x, y, y_pred, weight)
                return loss, (y_pred, others)

            gradient = jax.value_and_grad(loss_of, has_aux=True)
            (loss, (y_pred, others)), gradients = gradient(trainable, others)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            logs, metrics = self._measured(metrics, loss, y, y_pred, weight)
            return logs, (trainable, others, optimizer, metrics)

        def test_step(self, state, data):
            trainable, others, metrics = state
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            y_pred, others = self.stateless_call(trainable, others, x, training=False)
            loss = self.compute_loss(x, y, y_pred, weight)
            logs, metrics = self._measured(metrics, loss, y, y_pred, weight)
            return logs, (trainable, others, metrics)

        def _measured(self, metrics, loss, y, y_pred, weight):
            logs, new = {"raw": loss}, []
            for metric in self.metrics:
                mine = metrics[len(new) : len(new) + len(metric.variables)]
                if metric.name == "loss":
                    mine = metric.stateless_update_state(mine, loss)
                else:
                    mine = metric.stateless_update_state(mine, y, y_pred, weight)
                logs |= _logs(metric, metric.stateless_result(mine))
                new += mine
            return logs | {"renamed": logs["loss"]}, new

    else:

        def train_step(self, data):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            if BACKEND == "torch":
                self.zero_grad()
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred, weight)
                loss.backward()
                gradients = [v.value.grad for v in self.trainable_weights]
                import torch

                with torch.no_grad():
                    self.optimizer.apply(gradients, self.trainable_weights)
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(x, y, y_pred, weight)
                gradients = tape.gradient(loss, self.trainable_weights)
                self.optimizer.apply(gradients, self.trainable_weights)
            return self._measured(loss, y, y_pred, weight)

        def test_step(self, data):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = self(x, training=False)
            return self._measured(self.compute_loss(x, y, y_pred, weight), y, y_pred, weight)

        def _measured(self, loss, y, y_pred, weight):
            logs = {"raw": loss}
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred, weight)
                logs |= _logs(metric, metric.result())
            return logs | {"renamed": logs["loss"]}


def _logs(metric, result):
    return result if isinstance(result, dict) else {metric.name: result}


@keras.saving.register_keras_serializable("tests")
def size_of_outputs(y_true, y_pred):
    """A metric that is one number for a batch."""
    return ops.mean(ops.abs(y_pred))


CLASSES = {"own loss": OwnLoss, "own metrics": OwnMetrics, "own step": OwnStep}
