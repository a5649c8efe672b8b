# SPDX-License-Identifier: Apache-2.0
"""Steps and losses that leave out samples by a mask of their own: a ratio of sums, which is no mean over samples."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras_cases import assert_close, enough, enough_on, job, on_one_rank
from own_step import OwnStep
from regression import BATCH, X, Y, compare, dense

RANKS = {"torch": (2,), "jax": (2,)}
SOAK = {"tensorflow": (2,)}
BACKEND = keras.backend.backend()
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


MASKS = {
    "positive": lambda y: y > 0,
    "negative": lambda y: y < 0,
    "large": lambda y: y > 9.0,
    "not 0": lambda y: ops.not_equal(y, 0.0),
    "not -1": lambda y: ops.not_equal(y, -1.0),
    "not -999": lambda y: ops.not_equal(y, -999.0),
    "more than -9000": lambda y: y > -9000.0,
    "a number": lambda y: ops.logical_not(ops.isnan(y)),
}


def masked(mask):
    def loss(y, p):
        kept = ops.cast(mask(y), "float32")
        squares = ops.square(ops.where(kept > 0, y, 0.0) - p)
        return ops.sum(kept * squares) / (ops.sum(kept) + 1e-6)

    return loss


@pytest.mark.parametrize(
    "name", ["positive", *enough(["large", "a number"], "torch"), *enough(["negative", "not 0", "not -1", "not -999"])]
)
def test_a_step_with_a_mask_of_its_own_is_refused(name):
    model = OwnStep(masked(MASKS[name]))
    model.compile(keras.optimizers.SGD(1e-3))
    with pytest.raises(ValueError, match="not the mean of those of its halves") if job().size > 1 else nullcontext():
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("name", MASKS)
@enough_on("torch")
def test_a_loss_with_a_mask_of_its_own_is_refused(name):
    model = dense()
    model.compile("sgd", masked(MASKS[name]))
    with pytest.raises(ValueError, match="neither a mean nor a sum over samples") if job().size > 1 else nullcontext():
        model.fit(X, Y, batch_size=BATCH, verbose=0)


WORDS = np.random.default_rng(0).integers(0, 3, (len(X), 5))


def of_words(mark):
    """The mean loss of the words of a batch that are not marked."""

    def loss(y, p):
        kept = ops.not_equal(y, mark)
        losses = keras.losses.sparse_categorical_crossentropy(ops.where(kept, y, 0), p, from_logits=True)
        return ops.sum(losses * ops.cast(kept, losses.dtype)) / (ops.sum(ops.cast(kept, losses.dtype)) + 1e-6)

    return loss


class OfWords(keras.Model):
    """Computes its loss of its targets, or of its input."""

    def __init__(self, mark, of_input=False):
        super().__init__()
        self.loss_of, self.of_input = of_words(mark), of_input
        self.layer = keras.Sequential([keras.layers.Embedding(7, 4), keras.layers.Dense(3)])

    def call(self, x):
        return self.layer(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss_of(x if self.of_input else y, y_pred)


@pytest.mark.parametrize("mark", enough([-100, -1, 255], "torch"))
@pytest.mark.parametrize("own", ["loss", *enough(["compute_loss"], "torch")])
def test_classes_without_a_value_are_seen(own, mark):
    if own == "loss":
        model = keras.Sequential([keras.layers.Embedding(7, 4), keras.layers.Dense(3)])
        model.compile("sgd", of_words(mark))
    else:
        model = OfWords(mark)
        model.compile("sgd")
    with pytest.raises(ValueError, match=r"neither a mean nor a sum") if job().size > 1 else nullcontext():
        model.fit(WORDS, np.where(WORDS == 0, mark, WORDS).astype("int32"), batch_size=BATCH, verbose=0)


@enough_on("torch")
def test_a_mask_of_words_that_are_the_targets_too_is_seen():
    model = OfWords(0, of_input=True)
    model.compile("sgd")
    with pytest.raises(ValueError, match=r"neither a mean nor a sum") if job().size > 1 else nullcontext():
        model.fit(WORDS.astype("int32"), WORDS, batch_size=BATCH, verbose=0)


@enough_on("torch")
def test_a_step_that_takes_positive_numbers_only_is_exact():
    def loss(y, p):
        if BACKEND == "torch":
            assert bool((y > 0).all()), "targets are energies"
        return ops.mean(ops.square(ops.log(y) - p))

    def make():
        model = OwnStep(loss)
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    compare(make, y=np.exp(Y))


def guarded(y, p):
    loss = ops.mean(ops.square(y - p))
    return ops.where(ops.isfinite(loss), loss, ops.zeros_like(loss))


@enough_on("torch")
@pytest.mark.skipif(BACKEND != "torch", reason="uses hooks of PyTorch")
def test_a_step_that_leaves_out_gradients_that_are_no_numbers_is_exact():
    def loss(y, p):
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient if gradient.isfinite().all() else 0 * gradient.nan_to_num())
        return ops.mean(ops.square(y - p))

    def make():
        model = OwnStep(loss)
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    compare(make)


@enough_on("torch")
def test_a_step_of_finite_differences_of_its_network_is_taken_though_they_round():
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])

    class Residual(OwnStep):
        def call(self, x, training=False):
            step = np.float32([[0.01, 0, 0, 0]])
            return network(x), (network(x + step) - 2 * network(x) + network(x - step)) / 0.01**2

    model = Residual(lambda y, p: ops.mean(ops.square(p[1] - y)) + ops.mean(ops.square(p[0] - y)), network=network)
    model.compile(keras.optimizers.SGD(1e-9))
    model.fit(X, Y, batch_size=BATCH, verbose=0)


class Skipping(OwnStep):
    """Updates nothing where its loss is no number, as a script may guard itself."""

    def train_step(self, data):
        x, y = data
        if not ops.isfinite(ops.mean(ops.square(y - self(x)))):
            return {"loss": ops.zeros(())}
        return super().train_step(data)


@enough_on("torch")
@pytest.mark.skipif(BACKEND != "torch", reason="cannot look at numbers in a step")
def test_a_step_that_skips_a_batch_without_a_number_is_asked_all_the_same(caplog):
    for loss, is_mean in ((lambda y, p: ops.mean(ops.square(y - p)), True), (masked(MASKS["positive"]), False)):
        model = Skipping(loss)
        model.compile(keras.optimizers.SGD(1e-3))
        refused = not is_mean and job().size > 1
        with pytest.raises(ValueError, match="not the mean of those of its halves") if refused else nullcontext():
            with caplog.at_level("INFO", "keras_hpc"):
                model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert "right if its loss is a mean" not in caplog.text


@enough_on("torch")
def test_a_loss_that_leaves_out_numbers_that_are_none_is_exact():
    def make():
        model = dense()
        model.compile(keras.optimizers.SGD(1e-3), guarded, metrics=[guarded])
        return model

    compare(make)


class Ratio(keras.Model):
    """Gives a metric a ratio of sums in its `test_step`, and another one the samples and their weights."""

    def __init__(self):
        network = dense()
        super().__init__(network.inputs, network.outputs)
        self.ratio, self.weighted = keras.metrics.Mean("ratio"), keras.metrics.Mean("weighted")

    @property
    def metrics(self):
        return [self.ratio, self.weighted]

    def test_step(self, *arguments):
        *state, (x, y) = arguments
        values = state[0][2] if state else [v.value for v in self.metrics_variables]
        p = self.stateless_call(*state[0][:2], x)[0] if state else self(x)
        positive = ops.cast(y > 0, "float32")
        ratio = self.ratio.stateless_update_state(values[:2], masked(MASKS["positive"])(y, p))
        weighted = self.weighted.stateless_update_state(values[2:], ops.square(y - p), sample_weight=positive)
        logs = {"ratio": self.ratio.stateless_result(ratio), "weighted": self.weighted.stateless_result(weighted)}
        if state:
            return logs, (*state[0][:2], [*ratio, *weighted])
        for variable, value in zip(self.metrics_variables, [*ratio, *weighted], strict=True):
            variable.assign(value)
        return logs


@enough_on("torch", "jax")
def test_a_metric_of_a_test_step_with_a_mask_is_named(caplog):
    def evaluated():
        keras.utils.set_random_seed(5)
        model = Ratio()
        model.compile("sgd", "mse")
        return model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)

    alone = on_one_rank(evaluated)
    with caplog.at_level("WARNING", "keras_hpc"):
        together = evaluated()
    assert_close([together["weighted"]], [alone["weighted"]], 1e-5)
    named = [record.getMessage() for record in caplog.records if "neither a mean" in record.getMessage()]
    assert [text.split("Received: ")[1] for text in named] == ["`ratio`"] * (job().rank == 0 and job().size > 1)
