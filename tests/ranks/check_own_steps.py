# SPDX-License-Identifier: Apache-2.0
"""Losses that a `train_step` or a model of one's own computes: the same as one rank, or refused."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras_cases import assert_close, enough, enough_on, job, on_one_rank, values
from own_step import OwnStep
from regression import BATCH, X, Y, compare, dense, masked_by_hand, rmse

import keras_hpc

SOAK = {"tensorflow": (2,), "jax": (2,)}
BACKEND = keras.backend.backend()
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda y, p: ops.mean(ops.square(y - p)), id="mean"),
        pytest.param(keras.losses.MeanSquaredError(), id="keras mean", marks=enough_on()),
        pytest.param(keras.losses.MeanSquaredError(reduction="sum"), id="keras sum", marks=enough_on()),
    ],
)
def test_a_step_of_ones_own(loss, caplog):
    def make():
        model = OwnStep(loss)
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    with caplog.at_level("INFO", "keras_hpc"):
        model = compare(make)
    assert "right if its loss is a mean" not in caplog.text
    keras_hpc.check_replicas(model)


class Logging(OwnStep):
    """Gives its metrics numbers of a batch, one of which is no mean over samples."""

    def __init__(self, loss):
        super().__init__(loss)
        self.square, self.root = keras.metrics.Mean("square"), keras.metrics.Mean("root")

    def train_step(self, *arguments):
        result = super().train_step(*arguments)
        x, y = arguments[-1]
        if BACKEND != "jax":
            square = ops.stop_gradient(self.own_loss(y, self(x)))
            self.square.update_state(square)
            self.root.update_state(ops.sqrt(square))
            return result
        logs, (trainable, fixed, optimizer, metrics) = result
        square, left, moved = self.own_loss(y, self.stateless_call(trainable, fixed, x)[0]), list(metrics), []
        for metric in self.metrics:
            own = [left.pop(0) for _ in metric.variables]
            number = {id(self.square): square, id(self.root): ops.sqrt(square)}.get(id(metric))
            moved += own if number is None else metric.stateless_update_state(own, number)
        return logs, (trainable, fixed, optimizer, moved)


@enough_on("torch")
def test_a_metric_of_a_step_that_is_no_mean_is_named(caplog):
    def make():
        model = Logging(keras.losses.MeanSquaredError())
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    with caplog.at_level("WARNING", "keras_hpc"):
        compare(make)
    assert ("Received: `root`" in caplog.text) == (job().rank == 0 and job().size > 1)
    assert "`square`" not in caplog.text


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow counts traces")
@enough_on()
def test_trials_are_not_said_to_be_traced_too_often(monkeypatch):
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    said = []
    fresh = polymorphic_function._FrequentTracingDetectorManager()
    monkeypatch.setattr(polymorphic_function, "_frequent_tracing_detector_manager", fresh)
    monkeypatch.setattr(polymorphic_function.logging, "warning", lambda *text: said.append(text))
    for _ in range(2):
        model = OwnStep(lambda y, p: ops.mean(ops.square(y - p)))
        model.compile("sgd")
        model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
    assert not said


class Counting(OwnStep):
    """Counts its steps in what is no variable of Keras."""

    def __init__(self, loss):
        super().__init__(loss)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            self.steps = tf.Variable(0.0)
        else:
            self.steps = ops.zeros((), "bfloat16")

    def train_step(self, data):
        self.steps.assign_add(1.0) if BACKEND == "tensorflow" else self.steps.add_(1.0)
        return super().train_step(data)


@pytest.mark.skipif(BACKEND == "jax", reason="has nothing of its own that could be set")
@enough_on("torch")
def test_a_trial_of_a_step_leaves_tensors_among_its_attributes_alone():
    model = Counting(lambda y, p: ops.mean(ops.square(y - p)))
    model.compile(keras.optimizers.SGD(1e-3))
    steps = model.steps
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert float(steps) == float(model.steps) == -(-len(X) // BATCH)


class WithoutCall(keras.Model):
    """Has networks only, as a GAN, and gets another one each time it is compiled, as one that grows."""

    def __init__(self):
        super().__init__()
        self.first = dense()

    def compile(self, name, **options):
        super().compile(**options)
        setattr(self, name, dense())

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self.first(x)))
        weights = self.first.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others let no such model get layers after its first step")
@enough_on()
def test_a_model_without_call_may_get_layers_after_it_was_trained():
    model = WithoutCall()
    for name in ("second", "third"):
        model.compile(name, optimizer="sgd")
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    keras_hpc.check_replicas(model)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="has variables that Keras does not know")
def test_variables_of_tensorflow_that_ranks_move_apart_are_named_once(caplog):
    class Adapting(Counting):
        def train_step(self, data):
            self.share.assign_add(ops.mean(data[1]))
            return super().train_step(data)

    import tensorflow as tf

    model = Adapting(lambda y, p: ops.mean(ops.square(y - p)))
    model.share = tf.Variable(0.0)
    model.compile(keras.optimizers.SGD(1e-3))
    with caplog.at_level("WARNING", "keras_hpc"):
        model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0)
    named = job().rank == 0 and job().size > 1
    assert caplog.text.count("Received: ") == caplog.text.count("adapting.share") == named
    assert ".steps" not in caplog.text  # which all ranks count alike


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only its tape takes a vector, and has gradients of rows")
def test_a_step_with_a_vector_of_losses_and_an_embedding():
    def make():
        layers = keras.layers
        words = keras.Input((4,), dtype="int32")  # a word comes in several samples
        outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Embedding(7, 3)(words)))
        model = OwnStep(lambda y, p: ops.square(y - p)[:, 0], network=keras.Model(words, outputs))
        model.compile(keras.optimizers.Adam(1e-3))  # takes rows that come twice in another way than a dense gradient
        return model

    compare(make, (np.abs(X) * 5).astype("int32") % 7)


class OwnLoss(keras.Model):
    """A model with a loss of its own and the step of Keras."""

    def __init__(self, loss, network=None):
        network = network or dense()
        inputs = [keras.Input(x.shape[1:]) for x in network.inputs]
        inputs = inputs if len(inputs) > 1 else inputs[0]
        super().__init__(inputs, network(inputs))
        self.own_loss = loss

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.own_loss(y, y_pred)


def replaced(loss):
    """A model whose class does not show that it has a loss of its own."""
    model = dense()
    model.compute_loss = lambda x, y, y_pred, *given, **more: loss(y, y_pred)
    return model


@pytest.mark.parametrize("own", [OwnLoss, *enough([replaced], "torch")])
@pytest.mark.parametrize("kind", ["mean", "sum"])
@enough_on("torch")
def test_a_loss_that_the_model_computes(kind, own):
    def make():
        model = own(lambda y, p: getattr(ops, kind)(ops.square(y - p)))
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    if kind == "mean" or job().size == 1:
        compare(make)
    else:
        with pytest.raises(ValueError, match=r"compute_loss\(\)` are a sum over samples"):
            make().fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("loss", "layers", "what"),
    [
        (lambda y, p: ops.sum(ops.square(y - p)), [], "a sum over samples"),
        (lambda y, p: ops.sum(ops.square(y - p)), [keras.layers.GaussianNoise(0.3)], "a sum over samples"),
        (lambda y, p: ops.log(ops.sum(ops.square(y - p)) + 1), [], "neither a mean nor a sum"),
    ],
    ids=["sum", "noisy sum", "logarithm"],
)
@enough_on("torch")
def test_a_step_whose_gradients_ranks_may_not_average_is_refused(loss, layers, what):
    model = OwnStep(loss, *layers)
    model.compile(keras.optimizers.SGD(1e-3))
    before = values(model)
    if job().size == 1:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        return
    with pytest.raises(ValueError, match=what):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    if BACKEND != "jax":  # where Keras holds the state of a model that trains outside of it
        assert_close(values(model), before, 0)


@pytest.mark.parametrize("noisy", [False, *enough([True], "torch")])
@pytest.mark.parametrize("loss", [rmse, *enough([masked_by_hand])])
@pytest.mark.parametrize("whose", ["step", *enough(["model"], "torch")])
def test_a_step_of_a_whole_batch_is_refused(loss, whose, noisy):
    """Whatever its layers draw, and whether they normalize batches."""
    layers = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization()] if noisy else []
    model = OwnStep(loss, *layers) if whose == "step" else OwnLoss(loss, dense(*layers))
    model.compile(keras.optimizers.SGD(1e-3))
    y = (Y > 0).astype("int32") if loss is masked_by_hand else Y
    with pytest.raises(ValueError, match="not the mean of those of its halves") if job().size > 1 else nullcontext():
        model.fit(X, y, batch_size=BATCH, verbose=0)


class Grows(keras.layers.Layer):
    """Puts outputs beside themselves, with a weight that is zero before training."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        beside = ops.concatenate([x, (self.weight + 0.0) * x], axis=-1)
        self.weight.assign(ops.minimum(1.0, self.weight + 0.1))
        return beside


def with_a_term(function):
    return lambda y, p: ops.mean(ops.square(y - p[:, :1])) + function(ops.square(p[:, 1:]))


@pytest.mark.parametrize("term", ["mean", *enough(["root"], "torch"), *enough(["sum"])])
@enough_on("torch")
def test_a_term_of_the_loss_whose_weight_is_zero_before_training(term):
    function = getattr(ops, term, lambda x: ops.sqrt(ops.mean(x) + 1e-3))

    def make():
        inputs = keras.Input((4,))
        model = OwnStep(with_a_term(function), network=keras.Model(inputs, Grows()(dense()(inputs))))
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    if term == "mean" or job().size == 1:
        compare(make)
    else:
        with pytest.raises(ValueError, match=r"once what is zero now has grown: .*grows"):
            make().fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.skipif(BACKEND == "jax", reason="a step there sees only the state that it is given")
@pytest.mark.parametrize("where", ["iterations", *enough(["a tensor"], "torch")])
def test_a_term_of_the_loss_whose_weight_follows_the_steps_is_refused(where):
    def loss(y, p):
        steps = model.optimizer.iterations if where == "iterations" else model.steps
        share = ops.minimum(1.0, ops.cast(steps, p.dtype) / 10)
        return ops.mean(ops.square(y - p)) + share * rmse(y, p)

    model = (OwnStep if where == "iterations" else Counting)(loss)
    model.compile(keras.optimizers.SGD(1e-3))
    with pytest.raises(ValueError, match="not the mean of those of its halves") if job().size > 1 else nullcontext():
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    if job().size > 1:
        assert int(model.optimizer.iterations) == 0
        assert where == "iterations" or float(model.steps) == 0


@enough_on("torch")
def test_a_step_that_compares_means_of_two_inputs_is_refused():
    """Which is 0 where made-up samples are alike."""
    keras.utils.set_random_seed(5)
    one, other = keras.Input((4,)), keras.Input((4,))
    network = dense()

    def apart(y, p):
        return ops.mean(ops.square(p[:, :1])) + 10 * ops.sum(ops.square(ops.mean(p[:, :1] - p[:, 1:], axis=0)))

    model = OwnLoss(apart, keras.Model([one, other], ops.concatenate([network(one), network(other)], axis=1)))
    model.compile(keras.optimizers.SGD(1e-3))
    with pytest.raises(ValueError, match="not the mean of those of its halves") if job().size > 1 else nullcontext():
        model.fit([X, 0.5 * X], Y, batch_size=BATCH, verbose=0)


@enough_on("torch")
def test_a_step_of_words_that_divides_by_its_mask_is_refused():
    words = keras.Input((4,), dtype="int32")
    outputs = keras.layers.Dense(3)(keras.layers.Embedding(3, 2)(words))

    def masked(y, p):
        mask = ops.cast(ops.not_equal(y, 0), p.dtype)
        losses = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
        return ops.sum(losses * mask) / ops.sum(mask)

    model = OwnStep(masked, network=keras.Model(words, outputs))
    model.compile("sgd")
    x = (np.abs(X) * 5).astype("int32") % 3
    with pytest.raises(ValueError, match="not the mean of those of its halves") if job().size > 1 else nullcontext():
        model.fit(x, x, batch_size=BATCH, verbose=0)


class Unweighted(OwnStep):
    def train_step(self, *given):
        return super().train_step(*given[:-1], given[-1][:2])


@enough_on("torch")
def test_a_sum_in_a_step_that_gets_weights_of_samples_is_refused():
    model = Unweighted(lambda y, p: ops.sum(ops.square(y - p)))
    model.compile("sgd")
    with pytest.raises(ValueError, match="a sum over samples") if job().size > 1 else nullcontext():
        model.fit(X, Y, batch_size=BATCH, verbose=0, sample_weight=np.ones(len(X), "float32"))


@pytest.mark.skipif(BACKEND != "torch", reason="cannot look at numbers in a step")
def test_why_a_step_could_not_be_tried_is_said(caplog):
    def picky(y, p):
        if float(y.min()) < 2:
            raise ValueError("targets begin at 2")
        return ops.mean(ops.square(y - p))

    model = OwnStep(picky)
    model.compile("sgd")
    with caplog.at_level("INFO", "keras_hpc"):
        model.fit(X, np.full_like(Y, 2), batch_size=BATCH, verbose=0)
    assert (job().rank > 0 or job().size == 1) == ("ValueError: targets begin at 2" not in caplog.text)


@enough_on("torch")
def test_a_step_that_asks_all_ranks_itself_is_exact():
    def rmse_of_all(y, p):
        total = keras_hpc.allreduce(ops.sum(ops.square(y - p)), op="sum")
        return ops.sqrt(total / (ops.cast(ops.shape(y)[0], total.dtype) * job().size))

    def trained(loss):
        keras.utils.set_random_seed(5)
        model = OwnStep(loss)
        model.compile(keras.optimizers.SGD(0.05))
        model.fit(X[:48], Y[:48], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return values(model)

    assert_close(trained(rmse_of_all), on_one_rank(lambda: trained(rmse)), 3e-6)


@enough_on("torch", "jax")
def test_a_step_with_the_batch_size_written_into_it_is_told_that_ranks_have_parts():
    model = OwnStep(lambda y, p: ops.mean(ops.square(y - p + ops.zeros((BATCH, 1)))))
    model.compile("sgd")
    if job().size == 1:
        model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
        return
    with pytest.raises(Exception, match=r"\d") as failed:
        model.fit(X[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
    assert f"each of the {job().size} ranks has its part of a batch" in "".join(failed.value.__notes__)
