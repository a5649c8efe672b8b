# SPDX-License-Identifier: Apache-2.0
"""Losses that are sums, vectors or numbers, and those that layers add: the same as one rank, or refused."""

import itertools
from contextlib import nullcontext

import keras
import pytest
from keras_cases import assert_close, enough, enough_on, job, on_one_rank, values
from regression import BATCH, X, Y, compare, dense, masked_by_hand, rmse

import keras_hpc

SOAK = {"tensorflow": (2,), "jax": (2,)}
BACKEND = keras.backend.backend()
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


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
    "kind",
    ["sum", "added sum", *enough(["vector", "added mean"], "torch"), *enough(["mean", "outputs", "added vector"])],
)
@enough_on("tensorflow", "torch")
def test_losses_that_are_sums_or_vectors(kind):
    losses = {
        "sum": lambda y, p: ops.sum(ops.square(y - p)),
        "mean": lambda y, p: ops.mean(ops.square(y - p)),
        "vector": lambda y, p: ops.square(y - p)[:, 0],
        "outputs": lambda y, p: ops.sum(ops.square(y - p), axis=0),  # a sum over samples for each
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


def hardest(y, p):
    """Of samples whose loss is above the mean, as of hard examples."""
    each = ops.mean(ops.square(y - p), axis=-1)
    return each * ops.cast(each >= ops.mean(each), each.dtype)


def mostly_squares(y, p):
    """Compares samples by a term of little weight."""
    return ops.mean(ops.square(y - p), axis=-1) + 1e-3 * contrastive(y, p)


class Given(keras.losses.Loss):
    def __init__(self, function):
        super().__init__()
        self.call = function


@pytest.mark.parametrize("loss", [contrastive, triplets, hardest, mostly_squares])
@enough_on("torch")
def test_a_loss_of_each_sample_that_compares_it_with_others_is_refused(loss):
    again = Given(loss)
    for given in (loss, again, again):  # whoever catches the error and tries again is told again
        model = dense()
        model.compile("sgd", given)
        with pytest.raises(ValueError, match="compares the samples") if job().size > 1 else nullcontext():
            model.fit(X, Y, batch_size=BATCH, verbose=0)


@enough_on("torch")
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


@enough_on("torch")
def test_a_loss_that_is_a_plain_number():
    """What Keras' own tests of ragged data use; it has no gradient beside that of what the layer adds."""

    def make():
        penalty = Adds(lambda x: ops.mean(ops.square(x)))
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), penalty])
        model.compile("sgd", loss=lambda y, y_pred: 0.0)
        return model

    compare(make)


class Called(keras.losses.Loss):
    """Says itself how it is called, as the contrastive loss of Keras' examples does."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def __call__(self, y_true, y_pred, sample_weight=None):
        assert keras.backend.standardize_dtype(y_true.dtype) == "int32"  # as in a call of Keras
        targets = ops.cast(y_true, y_pred.dtype)
        if self.kind == "contrastive":
            return ops.mean(contrastive(targets, y_pred))
        errors = ops.square(targets - y_pred) * (1.0 if sample_weight is None else sample_weight[:, None])
        return ops.mean(errors) if self.kind == "mean" else ops.sum(errors)


@pytest.mark.parametrize("weighs", [False, *enough([True], "torch")])
@pytest.mark.parametrize("kind", [*enough(["contrastive"], "torch", "tensorflow"), *enough(["mean", "sum"], "torch")])
def test_a_loss_with_a_call_of_its_own(kind, weighs):
    def make():
        model = dense()
        model.compile(keras.optimizers.SGD(1e-3), Called(kind))
        return model

    refused = kind == "contrastive" and job().size > 1
    with pytest.raises(ValueError, match="neither a mean nor a sum") if refused else nullcontext():
        compare(make, y=(3 * Y).astype("int32"), sample_weight=abs(X[:, 0]) if weighs else None)


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


class Restoring(keras.Model):
    """Without targets: what `call` compares with its own input is no array of NumPy."""

    def __init__(self):
        super().__init__()
        self.restored = keras.layers.Dense(4)

    def call(self, x):
        restored = self.restored(x)
        self.add_loss(ops.mean(ops.square(restored - x)))
        return restored


@enough_on("torch")
def test_a_model_that_compares_its_output_with_its_input():
    def make():
        model = Restoring()
        model.compile(keras.optimizers.SGD(0.05))
        return model

    compare(make, y=None)


@enough_on("tensorflow", "torch")
def test_a_loss_that_is_neither_is_refused():
    model = dense(Adds(lambda x: ops.logsumexp(x)))
    model.compile("sgd", "mse")
    if job().size > 1:
        with pytest.raises(ValueError, match="neither a mean nor a sum"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)


def balance(x):
    """Even use of experts: a product of means over the batch."""
    odds = ops.softmax(x)
    best = ops.one_hot(ops.argmax(odds, axis=-1), odds.shape[-1], dtype=odds.dtype)
    return ops.sum(ops.mean(odds, axis=0) * ops.mean(best, axis=0))


@pytest.mark.parametrize(
    "loss",
    [
        rmse,
        *enough([masked_by_hand, keras.losses.Dice(), keras.losses.Tversky(), keras.losses.Circle()], "torch"),
        # Of each output.
        *enough([keras.losses.Dice(axis=(0,)), keras.losses.Dice(axis=(-2,)), lambda y, p: ops.std(y - p, 0)], "torch"),
    ],
)
def test_a_number_of_a_whole_batch_is_refused(loss):
    for _ in range(2):
        model = dense()
        model.compile("sgd", loss)
        wrong = pytest.raises(ValueError, match=r"neither a mean nor a sum over samples|compares the samples")
        with wrong if job().size > 1 else nullcontext():
            y = (Y > 0).astype("int32" if isinstance(loss, keras.losses.Circle) else "float32")
            model.fit(X, y, batch_size=BATCH, verbose=0)


def focal_of_mean(y, p):
    """A focal loss as many write it, of the mean over a batch."""
    mean = ops.mean(keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True))
    return mean * (1 - ops.exp(-mean)) ** 2


@enough_on("torch")
def test_a_product_of_means_of_small_logits_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", focal_of_mean)
    wrong = pytest.raises(ValueError, match="neither a mean nor a sum over samples")
    with wrong if job().size > 1 else nullcontext():
        model.fit(X, (X.sum(axis=1) > 0).astype("int32"), batch_size=BATCH, verbose=0)


@enough_on("torch")
def test_dice_of_each_sample_is_exact():
    def make():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.Dice(axis=(1,)))
        return model

    compare(make, y=(X > 0).astype("float32"))


def pairs(x):
    return ops.sum(ops.square(ops.tensordot(x, x, axes=(1, 1))))


@pytest.mark.parametrize(
    "layer",
    [lambda: Adds(balance), *enough([lambda: keras.layers.Dense(4, activity_regularizer=pairs)], "torch")],
    ids=["product", "regularizer of pairs"],
)
@enough_on("torch")
def test_a_product_of_means_that_a_layer_adds_is_refused(layer):
    model = dense(layer())
    model.compile("sgd", "mse")
    with (
        pytest.raises(ValueError, match=r"add_loss\(\) is neither a mean nor a sum")
        if job().size > 1
        else nullcontext()
    ):
        model.fit(X, Y, batch_size=BATCH, verbose=0)


class Around(keras.Model):
    """Trains a model with a layer that adds a loss, and has no `call` itself, as the VQ-VAE of Keras' examples."""

    def __init__(self, reduce):
        super().__init__()
        self.inner = dense(Adds(lambda x: reduce(ops.square(x))))

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self.inner(x, training=True))) + sum(self.inner.losses)
        weights = self.inner.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others train no model without call")
@enough_on()
@pytest.mark.parametrize("kind", ["mean", *enough(["sum"])])
def test_a_model_without_call_around_one_whose_layers_add_losses(kind):
    def make():
        model = Around(getattr(ops, kind))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    refused = kind == "sum" and job().size > 1
    with pytest.raises(ValueError, match="are a sum over samples") if refused else nullcontext():
        compare(make)


class Less(keras.layers.Layer):
    """Takes something off: what its function makes of a batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return x - self.function(x)


def mean_of_samples(x):
    return ops.mean(x, axis=0, keepdims=True)


@pytest.mark.parametrize("kind", ["of the batch", "of the sample", *enough(["of all ranks"], "torch")])
@enough_on("jax", "torch")
def test_a_layer_that_mixes_the_samples_of_a_batch_is_named(kind, caplog):
    function = {
        "of the batch": mean_of_samples,
        "of the sample": lambda x: ops.mean(x, axis=1, keepdims=True),
        "of all ranks": lambda x: keras_hpc.allreduce(mean_of_samples(x)),
    }[kind]
    model = dense(Less(function))
    model.compile("sgd", "mse")
    stream = itertools.repeat((X, Y))
    given = (stream,) if kind == "of the batch" else (X, Y)  # of a generator nobody has a batch before
    with caplog.at_level("WARNING", "keras_hpc"):
        model.fit(*given, steps_per_epoch=1, verbose=0)
    named = kind == "of the batch" and job().rank == 0 and job().size > 1
    assert ("depends on the other samples" in caplog.text) == named


@pytest.mark.skipif(BACKEND != "tensorflow", reason="has no tensors of texts")
@enough_on()
def test_a_model_of_texts_with_a_layer_of_ones_own_trains():
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(([["a"], ["b"]] * 4, [[1.0]] * 8)).batch(4)

    def train():
        keras.utils.set_random_seed(5)
        texts = keras.Input((1,), dtype="string")
        known = keras.layers.Embedding(3, 2)(keras.layers.StringLookup(vocabulary=["a", "b"])(texts))
        model = keras.Model(texts, keras.layers.Dense(1)(Less(ops.zeros_like)(keras.layers.Flatten()(known))))
        model.compile("sgd", "mse")
        model.fit(batches, shuffle=False, verbose=0)
        return values(model)

    alone = on_one_rank(train)
    assert_close(train(), alone, 3e-6)
