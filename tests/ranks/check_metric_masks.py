# SPDX-License-Identifier: Apache-2.0
"""Metrics of the user's own with masks of their own: named where a number of a batch is divided by its mask."""

import keras
import pytest
from keras_cases import everyone, job, on_one_rank
from regression import BATCH, X, Y, compare, dense

SOAK = {"tensorflow": (2,), "jax": (2,)}
RANKS = {"torch": (2,)}
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


class OfMask(keras.metrics.Metric):
    """Counts means over what a mask keeps of each batch, by the samples of the batch."""

    def __init__(self, keeps, name):
        super().__init__(name=name)
        self.keeps = keeps
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        mask = self.keeps(y_true)
        error = ops.where(mask, abs(ops.cast(y_true, y_pred.dtype) - y_pred), 0.0)
        self.add(ops.sum(error), ops.sum(ops.cast(mask, y_pred.dtype)), ops.cast(ops.shape(y_true)[0], y_pred.dtype))

    def add(self, error, kept, samples):
        self.total.assign_add(samples * error / (kept + 1e-6))
        self.count.assign_add(samples)

    def result(self):
        return self.total / self.count


class OfKept(OfMask):
    """Counts what the mask keeps."""

    def add(self, error, kept, samples):
        self.total.assign_add(error)
        self.count.assign_add(kept)


class OfWeights(keras.metrics.MeanSquaredError):
    """A metric of Keras, of large targets alone."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(y_true, y_pred, sample_weight=ops.cast(abs(y_true[:, 0]) > 1.0, "float32"))


class GuardedMean(OfMask):
    """A mean over samples: of numbers exact, and of batches with others 0."""

    def add(self, error, kept, samples):
        self.total.assign_add(ops.where(kept == samples, error, 0.0))
        self.count.assign_add(samples)


MASKS = {
    "positive": lambda y: y > 0,
    "negative": lambda y: y < 0,
    "large": lambda y: abs(y) > 2,
    "minus_1": lambda y: y != -1,
    "minus_999": lambda y: y > -900,
    "numbers": ops.isfinite,
}


def test_numbers_of_batches_divided_by_a_mask_are_named(caplog):
    model = dense()
    metrics = [OfMask(keeps, f"of_{name}") for name, keeps in MASKS.items()]
    model.compile("sgd", "mse", metrics=metrics)
    with caplog.at_level("WARNING", "keras_hpc"):
        model.evaluate(X, Y, verbose=0)
    for metric in metrics:
        said = caplog.text.count(f"The metric OfMask `{metric.name}` does not say of the samples of all ranks")
        assert everyone(said) == [int(rank == 0 and job().size > 1) for rank in range(job().size)], metric.name


def test_integers_are_marked_too(caplog):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[OfMask(MASKS["minus_1"], "of_integers")])
    with caplog.at_level("WARNING", "keras_hpc"):
        model.evaluate(X, Y.astype("int32"), verbose=0)
    assert (job().rank > 0) or ("`of_integers` does not say" in caplog.text) == (job().size > 1)


def test_sums_over_a_mask_are_exact_and_not_named(caplog):
    def make():
        model = dense()
        metrics = [OfKept(keeps, f"sum_of_{name}") for name, keeps in MASKS.items()]
        model.compile("sgd", "mse", metrics=[*metrics, OfWeights(name="w"), GuardedMean(ops.isfinite, "guarded")])
        return model

    with caplog.at_level("WARNING", "keras_hpc"):
        compare(make)
    assert "The metric" not in caplog.text


class Numbers:
    """Metrics that are given numbers of a batch."""

    def keep(self):
        self.mean, self.sums, self.total = (
            keras.metrics.Mean("mean"),
            keras.metrics.Mean("sums"),
            keras.metrics.Sum("n"),
        )
        self.ratio, self.norm = keras.metrics.Mean("ratio"), keras.metrics.Mean("norm")

    def watch(self, x):
        kept = ops.cast(x > 0, "float32")
        self.mean.update_state(ops.mean(x))
        self.sums.update_state(ops.sum(abs(x)))
        self.total.update_state(ops.sum(kept))
        self.ratio.update_state(ops.sum(x * kept) / (ops.sum(kept) + 1e-6))
        self.norm.update_state(ops.sqrt(ops.sum(ops.square(x))))


class Watched(Numbers, keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.keep()

    def call(self, x):
        self.watch(x)
        return x


class Computing(Numbers, keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.watch(y)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def computing():
    network = dense()
    model = Computing(network.inputs, network.outputs)
    model.keep()
    return model


OF_JAX = pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras has no metrics of layers on JAX")


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize("make", [pytest.param(lambda: dense(Watched()), marks=OF_JAX, id="layer"), computing])
def test_what_layers_and_methods_give_to_metrics_is_exact_or_named(make, method, caplog):
    def logs():
        keras.utils.set_random_seed(5)
        model = make()
        model.compile("sgd", "mse")
        if method == "evaluate":
            return model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)
        history = model.fit(X, Y, batch_size=BATCH, verbose=0, shuffle=False, validation_data=(X[:9], Y[:9])).history
        return {name: value for name, (value,) in history.items()}

    alone = on_one_rank(logs)
    with caplog.at_level("WARNING", "keras_hpc"):
        together = logs()
    assert together.keys() == alone.keys()
    for name in alone:
        if "ratio" not in name and "norm" not in name:
            assert together[name] == pytest.approx(alone[name], rel=1e-5), name
    said = [record.getMessage() for record in caplog.records if "gives metrics a number" in record.getMessage()]
    assert everyone(len(said)) == [int(rank == 0 and job().size > 1) for rank in range(job().size)]
    assert all(text.startswith("A layer or method of ") and text.endswith("Received: `ratio`, `norm`") for text in said)
