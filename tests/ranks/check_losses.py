# SPDX-License-Identifier: Apache-2.0
"""Losses that are sums, vectors or numbers, of a step, a layer or a model: the same as one rank, or refused."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras_cases import assert_close, enough, enough_on, job, on_one_rank, values
from regression import BATCH, X, Y, compare, dense

import keras_hpc

SOAK = {"tensorflow": (2,), "jax": (2,)}
BACKEND = keras.backend.backend()
ops = keras.ops


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(batch="global")
    yield
    keras_hpc.finalize()


def add_to(layer, x):  # which is no part of the class
    layer.add_loss(layer.loss(x))


class Adds(keras.layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        return self.measured(x)

    def measured(self, x):  # which `call` alone does not show
        add_to(self, x)
        return x


@pytest.mark.parametrize(
    "kind", ["sum", "added sum", *enough(["mean", "vector", "added mean", "added vector"], "torch")]
)
def test_losses_that_are_sums_or_vectors(kind):
    losses = {
        "sum": lambda y, p: ops.sum(ops.square(y - p)),
        "mean": lambda y, p: ops.mean(ops.square(y - p)),
        "vector": lambda y, p: ops.square(y - p)[:, 0],
    }
    added = {
        "added sum": lambda x: 0.01 * ops.sum(ops.square(x)),
        "added mean": lambda x: 0.01 * ops.mean(ops.square(x)),
        "added vector": lambda x: 0.01 * ops.sum(ops.square(x), axis=1),
    }

    def make():
        model = dense(*([Adds(added[kind])] if kind in added else []))
        model.compile(keras.optimizers.SGD(1e-3), losses.get(kind, "mse"))
        return model

    compare(make)


def contrastive(y, p):
    """A loss for each sample, whose negatives are all others of the batch."""
    return -ops.log(ops.diagonal(ops.softmax(-ops.square(ops.transpose(y) - p))))


def triplets(y, p):
    """Zero for most samples: the nearest other sample is no nearer than the sample's own target."""
    away = ops.square(ops.transpose(y) - p)
    return ops.maximum(ops.diagonal(away) - ops.mean(away, axis=1) + 0.01, 0.0)


class Given(keras.losses.Loss):
    def __init__(self, function):
        super().__init__()
        self.call = function


@pytest.mark.parametrize("loss", [contrastive, *enough([triplets], "torch")])
def test_a_loss_of_each_sample_that_compares_it_with_others_is_refused(loss):
    again = Given(loss)
    for given in (loss, again, again):  # whoever catches the error and tries again is told again
        model = dense()
        model.compile("sgd", given)
        with pytest.raises(ValueError, match="compares the samples") if job().size > 1 else nullcontext():
            model.fit(X, Y, batch_size=BATCH, verbose=0)


def test_sums_of_a_model_whose_call_knows_no_training():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = dense(Adds(lambda x: 0.01 * ops.sum(ops.square(x))))

        def call(self, x):
            return self.inner(x)

    def make():
        model = Own()
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    compare(make)


@enough_on("torch", "jax")
def test_a_loss_that_is_a_plain_number():
    """What Keras' own tests of ragged data use; it has no gradient beside that of what the layer adds."""

    def make():
        penalty = Adds(lambda x: ops.mean(ops.square(x)))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), penalty])
        model.compile("sgd", loss=lambda y, y_pred: 0.0)
        return model

    compare(make)


class Remembers(keras.losses.Loss):
    """Returns one number for a batch, and counts how often."""

    def __init__(self):
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)
        self.own = ops.zeros(())
        if BACKEND == "tensorflow":
            import tensorflow as tf

            self.own = tf.Variable(0.0)

    def call(self, y, p):
        self.calls.assign_add(1.0)
        self.own.assign_add(1.0) if BACKEND == "tensorflow" else self.own.add_(1.0)
        return ops.mean(ops.square(y - p))


@pytest.mark.skipif(BACKEND == "jax", reason="forgets what a loss keeps")
def test_a_loss_that_keeps_something_is_asked_without_its_knowing():
    def counted():
        loss = Remembers()
        model = dense()
        model.compile("sgd", loss)
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        return [float(loss.calls), float(loss.own)]

    assert counted() == on_one_rank(counted)


class Endpoint(keras.layers.Layer):
    """Computes the loss itself, from targets that are among the inputs, as a sum over samples."""

    def call(self, x, targets):
        self.add_loss(0.01 * ops.sum(ops.square(x - targets)))
        return x


@enough_on("torch")
@pytest.mark.parametrize("named", [True, *enough([False], "torch")])
def test_targets_among_the_inputs(named):
    def make():
        x, y = keras.Input((4,), name="x"), keras.Input((1,), name="y")
        inputs = {"x": x, "y": y} if named else [x, y]
        model = keras.Model(inputs, Endpoint()(keras.layers.Dense(1)(x), y))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    compare(make, x={"x": X, "y": Y} if named else [X, Y], y=None)


def test_a_loss_that_is_neither_is_refused():
    model = dense(Adds(lambda x: ops.logsumexp(x)))
    model.compile("sgd", "mse")
    if job().size > 1:
        with pytest.raises(ValueError, match="neither a mean nor a sum"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)


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


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda y, p: ops.mean(ops.square(y - p)), id="mean"),
        pytest.param(keras.losses.MeanSquaredError(), id="keras mean", marks=enough_on("torch")),
        pytest.param(keras.losses.MeanSquaredError(reduction="sum"), id="keras sum"),
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
def test_a_trial_of_a_step_leaves_tensors_among_its_attributes_alone():
    model = Counting(lambda y, p: ops.mean(ops.square(y - p)))
    model.compile(keras.optimizers.SGD(1e-3))
    steps = model.steps
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert float(steps) == float(model.steps) == -(-len(X) // BATCH)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only its tape takes a vector, and has gradients of rows")
def test_a_step_with_a_vector_of_losses_and_an_embedding():
    def make():
        layers = keras.layers
        words = keras.Input((4,), dtype="int32")  # a word comes in several samples
        outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(layers.Embedding(7, 3)(words)))
        model = OwnStep(lambda y, p: ops.square(y - p)[:, 0], network=keras.Model(words, outputs))
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    compare(make, (np.abs(X) * 5).astype("int32") % 7)


class OwnLoss(keras.Model):
    """A model with a loss of its own and the step of Keras."""

    def __init__(self, loss):
        inputs = keras.Input((4,))
        super().__init__(inputs, dense()(inputs))
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


def rmse(y, p):
    return ops.sqrt(ops.mean(ops.square(y - p)))


def masked_by_hand(y, p):
    known = ops.cast(y != 0, p.dtype)
    return ops.sum(known * ops.square(y - p)) / ops.maximum(ops.sum(known), 1)


def balance(x):
    """Even use of experts: a product of means over the batch."""
    odds = ops.softmax(x)
    best = ops.one_hot(ops.argmax(odds, axis=-1), odds.shape[-1], dtype=odds.dtype)
    return ops.sum(ops.mean(odds, axis=0) * ops.mean(best, axis=0))


@pytest.mark.parametrize(
    "loss",
    [rmse, *enough([masked_by_hand, keras.losses.Dice(), keras.losses.Tversky(), keras.losses.Circle()], "torch")],
)
def test_a_number_of_a_whole_batch_is_refused(loss):
    for _ in range(2):
        model = dense()
        model.compile("sgd", loss)
        wrong = pytest.raises(ValueError, match=r"neither a mean nor a sum over samples|compares the samples")
        with wrong if job().size > 1 else nullcontext():
            y = (Y > 0).astype("int32" if isinstance(loss, keras.losses.Circle) else "float32")
            model.fit(X, y, batch_size=BATCH, verbose=0)


@enough_on("torch")
def test_dice_of_each_sample_is_exact():
    def make():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.Dice(axis=(1,)))
        return model

    compare(make, y=(X > 0).astype("float32"))


def test_a_product_of_means_that_a_layer_adds_is_refused():
    model = dense(Adds(balance))
    model.compile("sgd", "mse")
    with (
        pytest.raises(ValueError, match=r"add_loss\(\) is neither a mean nor a sum")
        if job().size > 1
        else nullcontext()
    ):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("whose", ["step", *enough(["model"], "torch")])
@pytest.mark.parametrize("loss", [rmse, *enough([masked_by_hand], "torch")])
def test_a_step_of_a_whole_batch_is_refused(loss, whose):
    model = OwnStep(loss) if whose == "step" else OwnLoss(loss)
    model.compile(keras.optimizers.SGD(1e-3))
    y = (Y > 0).astype("int32") if loss is masked_by_hand else Y
    with pytest.raises(ValueError, match="not the mean of those of its halves") if job().size > 1 else nullcontext():
        model.fit(X, y, batch_size=BATCH, verbose=0)


@enough_on("torch")
def test_a_step_that_asks_all_ranks_itself_is_exact():
    def rmse_of_all(y, p):
        total = keras_hpc.allreduce(ops.sum(ops.square(y - p)), op="sum")
        return ops.sqrt(total / (len(y) * job().size))

    def trained(loss):
        keras.utils.set_random_seed(5)
        model = OwnStep(loss)
        model.compile(keras.optimizers.SGD(0.05))
        model.fit(X[:48], Y[:48], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return values(model)

    assert_close(trained(rmse_of_all), on_one_rank(lambda: trained(rmse)), 3e-6)


SEEDS = {"mean": 11, "sum": 7} if BACKEND == "torch" else {"mean": 51, "sum": 51}


@pytest.mark.parametrize("kind", ["mean", *enough(["sum"], "tensorflow", "jax")])
def test_chance_does_not_decide_about_a_noisy_step(kind):
    """With these seeds the first 16 draws of the noise say the opposite on PyTorch and TensorFlow."""
    keras.utils.set_random_seed(SEEDS[kind])
    model = OwnStep(lambda y, p: getattr(ops, kind)(ops.square(y - p)), keras.layers.GaussianNoise(0.3))
    model.compile(keras.optimizers.SGD(1e-3))
    wrong = kind == "sum" and job().size > 1
    with pytest.raises(ValueError, match="a sum over samples") if wrong else nullcontext():
        model.fit(X, Y, batch_size=BATCH, verbose=0)
