# SPDX-License-Identifier: Apache-2.0
"""Models and metrics that count in Python how often they are called: only steps count, and not what comes before."""

import keras
import pytest
from keras_cases import assert_close, job
from regression import BATCH, X, Y, compare, dense

RANKS = {"tensorflow": (2,), "torch": (2,)}
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


class Annealed(keras.Model):
    """Weighs a term of its loss by the calls so far, and keeps what it has seen first."""

    def __init__(self):
        network = dense()
        super().__init__(network.inputs, network.outputs)
        self.calls, self.first = 0, None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.calls += 1
        self.first = ops.max(x) if self.first is None else self.first
        return ops.mean(ops.square(y - y_pred)) + 0.02 * self.calls * ops.mean(ops.abs(y_pred))


def test_a_loss_that_counts_in_python():
    def make():
        model = Annealed()
        model.compile(keras.optimizers.Adam(1e-2), run_eagerly=True)
        return model

    model = compare(make)
    assert float(model.first) > 1  # of real samples


class Distance(keras.metrics.Metric):
    """Keeps what it counts in a tensor and a number."""

    def __init__(self):
        super().__init__(name="distance")
        self.total, self.samples = ops.zeros(()), 0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total = self.total + ops.stop_gradient(ops.sum(ops.abs(y_true - y_pred)))
        self.samples += len(y_true)

    def result(self):
        return self.total / max(self.samples, 1)

    def reset_state(self):
        self.total, self.samples = ops.zeros(()), 0


def test_a_metric_that_counts_in_tensors():
    model = dense()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Distance(), "mae"], run_eagerly=True)
    n = BATCH * job().size
    history = model.fit(X[:n], Y[:n], batch_size=BATCH, epochs=2, verbose=0, shuffle=False).history
    assert_close(history["distance"], history["mae"], 1e-5)


class Wide(keras.layers.Layer):
    """Learns how wide its input is where it is built."""

    def __init__(self):
        super().__init__()
        self.width = 0

    def build(self, shape):
        self.width = int(shape[-1])

    def call(self, x):
        return x / self.width


def test_a_number_that_a_layer_learns_where_it_is_built_stays():
    def make():
        model = keras.Sequential([Wide(), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(1e-2), "mse", run_eagerly=True)
        return model

    model = compare(make)
    assert model.layers[0].width == X.shape[1]
