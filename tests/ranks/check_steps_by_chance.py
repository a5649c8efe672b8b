# SPDX-License-Identifier: Apache-2.0
"""Steps that draw random numbers: accepted or refused for what their loss is, and not by what they draw."""

from contextlib import nullcontext

import keras
import pytest
from keras import ops
from keras_cases import enough, enough_on, job
from own_step import BACKEND, OwnStep
from regression import BATCH, X, Y, rmse

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}
pytestmark = pytest.mark.usefixtures("global_batches")


def draws_of_keras(p, random):
    numbers = random.uniform(ops.shape(p), -1, 1) + random.normal(ops.shape(p)) * random.gamma(ops.shape(p), 2.0)
    numbers += random.truncated_normal(ops.shape(p)) * random.beta(ops.shape(p), 2.0, 3.0)
    classes = random.categorical(ops.concatenate([p, 1 - p], axis=1), 1)
    steps = random.randint(ops.shape(p), 0, 100)
    whole = ops.cast(classes, p.dtype) + ops.cast(steps, p.dtype) / 100
    return random.dropout(numbers + whole, 0.5) + random.shuffle(ops.stop_gradient(p))


def draws_of_tensorflow(p):
    import tensorflow as tf

    shape = tf.shape(p)
    numbers = tf.random.normal(shape, stddev=0.5) + tf.random.uniform(shape) + tf.random.truncated_normal(shape, 1.0)
    steps = tf.random.uniform(shape, maxval=100, dtype=tf.int32)
    return tf.nn.dropout(numbers + tf.cast(steps, p.dtype) / 100, 0.5) + tf.random.shuffle(tf.stop_gradient(p))


def draws_of_torch(p):
    import torch

    numbers = torch.rand(p.shape) + torch.rand_like(p) * torch.randn(*p.shape) + torch.randn_like(p)
    steps = torch.randint(0, 100, p.shape) + torch.randint(high=5, size=p.shape) + torch.bernoulli(0.5 * torch.ones(3))
    return torch.nn.functional.dropout(input=numbers + steps / 100) + p.detach()[torch.randperm(len(p))]


class Adding(keras.layers.Layer):
    """Adds what is drawn."""

    def compute_output_shape(self, shape):
        return shape


class DrawsOfJax(Adding):
    def __init__(self):
        super().__init__()
        self.keys = keras.random.SeedGenerator(3)

    def call(self, p):
        import jax

        def key():
            return jax.random.wrap_key_data(ops.cast(self.keys.next(), "uint32"))

        random = jax.random
        numbers = random.normal(key(), p.shape) * random.uniform(key(), p.shape, minval=-1.0)
        steps = random.randint(key(), p.shape, 0, 100) + random.bernoulli(key(), 0.5, p.shape)
        order = random.permutation(key(), p.shape[0])
        mixed = random.permutation(key(), ops.stop_gradient(p))[order]
        classes = random.categorical(key(), ops.concatenate([p, 1 - p], axis=1))
        return p + 0.1 * (numbers + steps / 100 + mixed + classes[:, None])


class Drawing(Adding):
    """Adds what Keras draws, from a generator with a state."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, p):
        class Seeded:
            def __getattr__(_, name):
                return lambda *given, **more: getattr(keras.random, name)(*given, seed=self.seed, **more)

        return p + 0.1 * draws_of_keras(p, Seeded())


class OfBackend(Adding):
    def call(self, p):
        return p + 0.1 * (draws_of_torch if BACKEND == "torch" else draws_of_tensorflow)(p)


class SameEachTime(Adding):
    """Has noise of a number as its seed: the same in each step, and another for twice as many samples."""

    def call(self, p):
        return p + 0.3 * keras.random.normal(ops.shape(p), seed=42)


class Unknown(Adding):
    """Draws by what no trial knows."""

    def __init__(self):
        super().__init__()
        self.keys = keras.random.SeedGenerator(3)

    def call(self, p):
        if BACKEND == "torch":
            import torch

            return p + torch.empty(p.shape).normal_(0, 3.0)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            return p + 3.0 * tf.raw_ops.RandomStandardNormal(shape=tf.shape(p), dtype=p.dtype)
        import jax

        return p + 3.0 * jax.random.laplace(jax.random.wrap_key_data(ops.cast(self.keys.next(), "uint32")), p.shape)


class TorchNorm(Adding):
    def __init__(self):
        super().__init__()
        import torch

        self.norm = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(3))

    def call(self, p):
        return self.norm(p)


LAYERS = {
    "keras": Drawing,
    "backend": DrawsOfJax if BACKEND == "jax" else OfBackend,
    "same": SameEachTime,
    **({"norm": TorchNorm} if BACKEND == "torch" else {}),
}


def mean(y, p):
    return ops.mean(ops.square(y - p))


def total(y, p):
    return ops.sum(ops.square(y - p))


@pytest.mark.parametrize(
    "layer", ["backend", *enough(["keras"], "torch"), *enough(sorted({*LAYERS} - {"backend", "keras"}))]
)
@pytest.mark.parametrize(
    ("loss", "refusal"),
    [
        (mean, None),
        pytest.param(total, "are a sum over samples", marks=enough_on("torch")),
        pytest.param(rmse, "not the mean of those of its halves", marks=enough_on("torch")),
    ],
)
def test_what_a_step_draws_does_not_hide_what_its_loss_is(layer, loss, refusal, caplog):
    keras.utils.set_random_seed(5)
    model = OwnStep(loss, LAYERS[layer]())
    model.compile(keras.optimizers.SGD(1e-3))
    refused = refusal is not None and job().size > 1
    with caplog.at_level("INFO", "keras_hpc"):
        with pytest.raises(ValueError, match=refusal) if refused else nullcontext():
            model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert "right if its loss is a mean" not in caplog.text


SEEDS = {"mean": 2, "sum": 13} if BACKEND == "torch" else {"mean": 1, "sum": 1}


@pytest.mark.parametrize("kind", [*enough(["mean"], "torch"), *enough(["sum"], "jax")])
@enough_on()
def test_chance_does_not_decide_about_a_noisy_step(kind):
    """With these seeds the first 16 draws of the noise say the opposite on PyTorch, and of the mean on TensorFlow."""
    keras.utils.set_random_seed(SEEDS[kind])
    model = OwnStep({"mean": mean, "sum": total}[kind], Unknown())
    model.compile(keras.optimizers.SGD(1e-3))
    wrong = kind == "sum" and job().size > 1
    with pytest.raises(ValueError, match="a sum over samples") if wrong else nullcontext():
        model.fit(X, Y, batch_size=BATCH, verbose=0)
