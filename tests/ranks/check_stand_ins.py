# SPDX-License-Identifier: Apache-2.0
"""What stands for the samples of a rank that has none in a step, where not every model takes one sample of zeros."""

import keras
import numpy as np
import pytest
from keras import ops
from keras_cases import assert_close, assert_identical, job, values
from regression import BATCH, X, Y, compare

import keras_hpc

SOAK = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
ROWS = 4


@pytest.fixture(autouse=True)
def _job(request):
    keras_hpc.init(batch=request.param)
    yield
    keras_hpc.finalize()


@pytest.mark.parametrize("_job", ["global"], indirect=True)
@pytest.mark.parametrize("tail", [1, 2])
def test_samples_of_zeros_that_are_no_numbers(tail):
    """PyTorch's cross-entropy, among others, raises for them."""

    class Shares(keras.layers.Layer):
        def call(self, x):
            return x / ops.sum(x, axis=-1, keepdims=True)

    def make():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(Shares()(inputs)))
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["mae"])
        return model

    x, y = np.abs(X[: BATCH + tail]) + 0.1, (Y[: BATCH + tail] > 0).astype("float32")
    compare(make, x, y, validation_data=(x, y), validation_batch_size=BATCH)


class Batches(keras.utils.PyDataset):
    """One more than ranks can share out evenly; pairs of samples, or as many samples as the script says."""

    def __init__(self, of_pairs):
        super().__init__()
        self.of_pairs = of_pairs

    def __len__(self):
        return 2 * job().size + 1

    def __getitem__(self, index):
        x, y = X[index * ROWS : (index + 1) * ROWS], Y[index * ROWS : (index + 1) * ROWS]
        return (np.stack([x, x + y]), np.stack([y, y])) if self.of_pairs else (x, y)


class Sizes(keras.Model):
    """Knows the number of rows, as scripts do that have `BATCH_SIZE`, or whose rows are pairs of lists of samples."""

    def __init__(self, knows, of_pairs):
        super().__init__()
        self.dense, self.knows, self.of_pairs = keras.layers.Dense(1), knows, of_pairs

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if not self.knows:
            return ops.mean(ops.square(y - y_pred))
        if self.of_pairs:
            return (ops.mean(ops.square(y[0] - y_pred[0])) + ops.mean(ops.square(y[1] - y_pred[1]))) / 2
        return ops.mean(ops.square(y - y_pred) * ops.ones((ROWS, 1)) + 0 * ops.reshape(y_pred, (ROWS, 1)))


@pytest.mark.parametrize("_job", ["local"], indirect=True)
@pytest.mark.parametrize("of_pairs", [False, True])
def test_steps_that_know_how_many_rows_a_batch_has(of_pairs):
    def trained(knows):
        keras.utils.set_random_seed(5)
        model = Sizes(knows, of_pairs)
        model.compile(keras.optimizers.SGD(0.05))
        history = model.fit(Batches(of_pairs), epochs=2, shuffle=False, verbose=0).history
        return values(model), history["loss"]

    (weights, losses), (others, other_losses) = trained(True), trained(False)
    assert_identical(weights)
    assert_close(weights, others, 1e-6)
    np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
