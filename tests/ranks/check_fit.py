# SPDX-License-Identifier: Apache-2.0
"""`fit` and `evaluate` on several ranks compute what one rank computes on the same global batches."""

import keras
import numpy as np
import pytest
from keras_cases import (
    BATCH,
    Parts,
    assert_identical,
    assert_like_one_rank,
    data,
    dense,
    enough,
    enough_on,
    job,
    on_one_rank,
    values,
)

import keras_hpc
from keras_hpc.job import current

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(shard=False)
    yield
    keras_hpc.finalize()


def compiled(optimizer=None, model=dense, metrics=None, loss="sparse_categorical_crossentropy", **kwargs):
    def make():
        made = model()
        made.compile(
            optimizer=optimizer() if optimizer else keras.optimizers.SGD(0.1, momentum=0.9),
            loss=loss,
            metrics=metrics() if callable(metrics) else metrics,
            **kwargs,
        )
        return made

    return make


def fit(arrays, epochs=3, validate=False):
    def train(model, whole):
        history = model.fit(
            Parts(*arrays, whole=whole),
            epochs=epochs,
            shuffle=False,
            verbose=0,
            validation_data=Parts(*arrays, batch=50, whole=whole) if validate else None,
        )
        return history.history

    return train


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "clipnorm": lambda: keras.optimizers.SGD(0.2, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.2, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.2, clipvalue=0.01),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5),
    "decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
    "accumulation_clipped": lambda: keras.optimizers.SGD(0.2, clipnorm=0.05, gradient_accumulation_steps=2),
    "loss_scale_factor": lambda: keras.optimizers.SGD(0.1, loss_scale_factor=128.0),
    "dynamic_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=7),
    "dynamic_scale_accumulation": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=3), dynamic_growth_steps=7
    ),
}
if hasattr(keras.optimizers, "MultiOptimizer"):

    def _multi(**kwargs):
        optimizers = keras.optimizers
        chosen = optimizers.OptimizerMap(optimizers.SGD(0.1, momentum=0.9), {".*bias": optimizers.SGD(0.3, **kwargs)})
        return optimizers.MultiOptimizer(chosen)

    OPTIMIZERS["multi"] = _multi
    OPTIMIZERS["multi_accumulation"] = lambda: _multi(gradient_accumulation_steps=2)


# What the others do, these do, too.
EVERYWHERE = ["dynamic_scale_accumulation"]
CONTAINED = {"sgd", "multi", "accumulation", "dynamic_scale", "loss_scale_factor"} & set(OPTIMIZERS)  # in others
ONCE = [name for name in OPTIMIZERS if name not in (*EVERYWHERE, *CONTAINED)]


@pytest.mark.parametrize("name", [*EVERYWHERE, *enough(ONCE, "torch"), *enough(sorted(CONTAINED))])
def test_optimizers(name):
    assert_like_one_rank(compiled(OPTIMIZERS[name], metrics=["accuracy"]), fit(data()))


class NeverReset(keras.metrics.SparseCategoricalAccuracy):
    """Counts on through epochs."""

    def reset_state(self):
        pass


@enough_on("tensorflow", "torch")
def test_history_validation_and_evaluate():
    arrays = data()

    def train(model, whole):
        history = fit(arrays, epochs=2, validate=True)(model, whole)
        return history, model.evaluate(Parts(*arrays, batch=40, whole=whole), verbose=0, return_dict=True)

    def metrics():
        return ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2), NeverReset(name="never_reset")]

    assert_like_one_rank(compiled(metrics=metrics), train)


@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", *enough(["sum", "sum_over_batch_size"], "torch")])
@enough_on("torch")
def test_loss_reductions_with_sample_weight(reduction):
    x, y = data()
    weight = np.linspace(0, 2, len(x)).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    make = compiled(lambda: keras.optimizers.SGD(0.003), loss=loss, weighted_metrics=["accuracy"])
    assert_like_one_rank(make, fit((x, y, weight)), tolerance=1e-5)


@enough_on("torch")
def test_masked_loss():
    random = np.random.default_rng(0)
    x = random.integers(1, 9, size=(61, 7)).astype("int32")
    x[np.arange(7)[None] >= random.integers(1, 8, size=(61, 1))] = 0
    y = (x % 3).astype("int32")

    def model():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((7,), dtype="int32")
        hidden = keras.layers.Embedding(9, 4, mask_zero=True)(inputs)
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))

    assert_like_one_rank(compiled(model=model), fit((x, y)), tolerance=1e-5)


@enough_on("torch")
def test_class_weight():
    x, y = data()

    def train(model, whole):
        return model.fit(
            Parts(x, y, whole=whole), epochs=1, shuffle=False, verbose=0, class_weight={0: 1.0, 1: 2.0, 2: 0.5}
        ).history

    assert_like_one_rank(compiled(), train)


@enough_on("torch")
def test_several_inputs_and_outputs():
    x, y = data()

    def model():
        keras.utils.set_random_seed(11)
        a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
        hidden = keras.layers.Concatenate()([keras.layers.Dense(4, activation="tanh")(a), b])
        return keras.Model(
            {"a": a, "b": b},
            {
                "kind": keras.layers.Dense(3, activation="softmax", name="kind")(hidden),
                "size": keras.layers.Dense(1, name="size")(hidden),
            },
        )

    make = compiled(
        model=model,
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    assert_like_one_rank(make, fit(({"a": x, "b": x[::-1]}, {"kind": y, "size": x.sum(1, keepdims=True)})))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@enough_on("torch")
def test_frozen_and_unused_variables():
    x, y = data()

    def model():
        keras.utils.set_random_seed(6)
        inputs = keras.Input((6,))
        frozen = keras.layers.Dense(5, activation="tanh", trainable=False)
        hidden = keras.layers.Dense(5, activation="tanh")(frozen(inputs))
        outputs = [keras.layers.Dense(3, activation="softmax")(hidden), keras.layers.Dense(2)(hidden)]
        return keras.Model(inputs, outputs)

    make = compiled(model=model, loss=["sparse_categorical_crossentropy", None])
    assert_like_one_rank(make, fit((x, (y, x[:, :2]))))


class Subclassed(keras.Model):
    """Not built before its first step."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        return self.out(self.hidden(x))


@enough_on("tensorflow", "torch")
def test_subclassed_and_unbuilt():
    def model():
        keras.utils.set_random_seed(1 if current.is_local() or job().rank == 0 else 2)
        return Subclassed()

    x, y = data()

    def make():
        made = model()
        made.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy")
        return made

    def alone():
        model = make()
        return fit((x, y))(model, True), values(model)

    expected, weights = on_one_rank(alone)
    ours = make()
    received = fit((x, y))(ours, False)
    assert_identical(values(ours))
    for a, b in zip(values(ours), weights, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6)
    np.testing.assert_allclose(received["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"steps_per_execution": 3}, id="steps"),
        pytest.param({"run_eagerly": True}, id="eager", marks=enough_on("tensorflow", "torch")),
    ],
)
@enough_on("jax", "torch")
def test_compile_options(options):
    if "steps_per_execution" in options and keras.backend.backend() == "torch":
        pytest.skip("Keras refuses several steps per execution on PyTorch")

    def train(model, whole):
        return fit(data(), epochs=1)(model, whole) and None  # steps_per_execution changes what Keras logs

    assert_like_one_rank(compiled(**options), train)


@enough_on("tensorflow", "torch")
def test_sparse_embedding_with_adam():
    random = np.random.default_rng(3)
    x = random.integers(0, 5, size=(61, 4)).astype("int32")  # few rows, so that each is hit many times in a batch
    y = (x.sum(1) % 3).astype("int32")

    class Positions(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.of = keras.layers.Embedding(4, 4)

        def call(self, x):  # looked up once for all samples, so one rank has one row of each
            return x + self.of(keras.ops.arange(4))

    def model():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Flatten()(Positions()(keras.layers.Embedding(6, 4)(inputs)))
        return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(hidden))

    assert_like_one_rank(compiled(lambda: keras.optimizers.Adam(0.01), model=model), fit((x, y)), tolerance=1e-5)


@enough_on("torch")
def test_mixed_float16():
    """Ranks differ from one rank by no more than one rank does from itself when it computes the batch in parts."""
    x, y = data(samples=7 * BATCH)

    def model():
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return dense(dtype="float32")
        finally:
            keras.config.set_dtype_policy(policy)

    def alone(parts):
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=parts if parts > 1 else None)
        made = compiled(lambda: optimizer, model=model)()
        made.fit(x, y, batch_size=BATCH // parts, epochs=3, shuffle=False, verbose=0)
        return values(made)

    whole, *others = on_one_rank(lambda: [alone(parts) for parts in (1, 2, 4)])
    differences = [max(np.abs(a - b).max() for a, b in zip(whole, other, strict=True)) for other in others]
    assert 0 < max(differences) < 0.01

    def train(model, whole):
        fit((x, y))(model, whole)

    made = assert_like_one_rank(compiled(model=model), train, tolerance=2 * max(differences))
    assert isinstance(made.optimizer, keras.optimizers.LossScaleOptimizer)


class Convolution(keras.layers.Layer):
    """By the function, and not by a layer of Keras."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, shape[-1], 1))
        self.back = self.add_weight(shape=(3, 3, 2, 1))

    def call(self, x):
        x = keras.ops.conv(x, self.kernel, padding="same")
        return keras.ops.conv_transpose(x, self.back, 1, padding="same")


@pytest.mark.skipif(keras.backend.backend() == "tensorflow", reason="has no such convolutions of no samples either")
@enough_on("torch")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tail", [1, 2])
def test_ranks_with_a_single_sample(transposed, tail):
    """PyTorch alone does not differentiate such convolutions for one, nor for the zeros of a rank that has none."""
    x = np.random.default_rng(0).normal(size=(BATCH + tail, 12, 9, 1)).astype("float32")

    def model():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Conv2D(1 if transposed else 4, 3, padding="same")]
        layers += [keras.layers.Conv2DTranspose(4, 3, padding="same"), Convolution()] if transposed else []
        return keras.Sequential([keras.Input((12, 9, 1)), *layers, keras.layers.Conv2D(1, 3, padding="same")])

    assert_like_one_rank(compiled(model=model, loss="mse"), fit((x, x)), tolerance=1e-5)


@enough_on("jax")
def test_averages_of_weights_outlive_an_evaluation():
    """Weights are given them after `fit`, and `evaluate` deletes the arrays that weights had before it."""
    x, y = data()

    def train(model, whole):
        history = fit((x, y))(model, whole)
        scores = model.evaluate(Parts(x, y, whole=whole), verbose=0)
        return history, scores, fit((x, y))(model, whole)

    assert_like_one_rank(compiled(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)), train)


@enough_on("torch")
def test_gradients_that_wait_since_train_on_batch():
    """The first update of `fit` takes what all ranks have gathered before it, not what one has."""
    x, y = data()

    def train(model, whole):
        batch = np.arange(BATCH) if whole else np.arange(job().rank, BATCH, job().size)
        model.train_on_batch(x[batch], y[batch])
        fit((x[BATCH : 4 * BATCH], y[BATCH : 4 * BATCH]), epochs=1)(model, whole)

    assert_like_one_rank(
        compiled(lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)), train
    )


@pytest.mark.parametrize("accumulate", [None, 2])
@enough_on("jax", "torch")
def test_nan_on_one_rank_makes_all_skip(accumulate):
    x, y = data(samples=BATCH * 4)
    poisoned = x.copy()
    poisoned[BATCH] = np.nan  # a sample of rank 0 in the second batch
    make = compiled(
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate), initial_scale=64.0
        )
    )
    model = make()
    start = values(model)
    fit((poisoned, y), epochs=1)(model, False)
    assert_identical(values(model))
    # Also the gradients that wait for another micro-batch, as one batch was skipped.
    assert_identical([np.array(v) for v in model.optimizer.variables], "optimizer variables")
    assert np.isfinite(np.concatenate([v.ravel() for v in values(model)])).all()
    assert any((a != b).any() for a, b in zip(start, values(model), strict=True))
    assert float(model.optimizer.dynamic_scale) == 32.0


@enough_on("tensorflow", "torch")
def test_overridden_apply_sees_reduced_gradients():
    class Signed(keras.optimizers.SGD):
        """Nonlinear in the gradients, before Keras' own `apply`: only right on the mean over ranks."""

        def apply(self, grads, trainable_variables=None):
            super().apply([keras.ops.sign(g) for g in grads], trainable_variables)

    def train(model, whole):
        fit(data(), epochs=1)(model, whole)

    assert_like_one_rank(compiled(lambda: Signed(0.01)), train)
