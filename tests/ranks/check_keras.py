# SPDX-License-Identifier: Apache-2.0
"""train_on_batch, ranks without samples, what is refused; and Keras left as found."""

import functools
import inspect
import sys

import keras
import numpy as np
import pytest
from keras_cases import (
    BATCH,
    Parts,
    assert_close,
    assert_identical,
    assert_like_one_rank,
    data,
    dense,
    enough,
    enough_on,
    job,
    on_one_rank,
    part,
    values,
)

import keras_hpc
from keras_hpc.job import current

SOAK = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
BACKEND = keras.backend.backend()
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="needs TensorFlow")
torch_only = pytest.mark.skipif(BACKEND != "torch", reason="needs PyTorch")
several_ranks = pytest.mark.usefixtures("_several_ranks")


@pytest.fixture(autouse=True)
def running(request):
    keras_hpc.init(**getattr(request, "param", {"shard": False}))
    yield
    keras_hpc.finalize()


@pytest.fixture
def _several_ranks(running):
    if job().size == 1:
        pytest.skip("needs two ranks")


def sharded(**kwargs):
    return pytest.mark.parametrize("running", [{"batch": "global", **kwargs}], indirect=True, ids=["global"])


# train_on_batch: a GAN in the manner of 3DGAN, three compiled models, one frozen inside another.


def networks():
    keras.utils.set_random_seed(8)
    discriminator = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, activation="sigmoid")],
        name="discriminator",
    )
    discriminator.compile(optimizer=keras.optimizers.SGD(0.1), loss="binary_crossentropy")
    generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)], name="generator")
    discriminator.trainable = False
    inputs = keras.Input((3,))
    combined = keras.Model(inputs, discriminator(generator(inputs)))
    combined.compile(optimizer=keras.optimizers.SGD(0.1), loss="binary_crossentropy")
    discriminator.trainable = True
    return discriminator, generator, combined


def train_gan(models, whole):
    discriminator, generator, combined = models
    x, _ = data()
    noise = np.random.default_rng(1).normal(size=(len(x), 3)).astype("float32")
    for step in range(8):
        real, latent = part(x, step, whole), part(noise, step, whole)
        fake = keras.ops.convert_to_numpy(generator(latent))
        discriminator.train_on_batch(real, np.ones((len(real), 1), "float32"))
        discriminator.train_on_batch(fake, np.zeros((len(fake), 1), "float32"))
        combined.train_on_batch(latent, np.ones((len(latent), 1), "float32"))


@enough_on("torch")
def test_train_on_batch_with_frozen_model():
    def trained(whole):
        models = networks()
        train_gan(models, whole)
        return [values(model) for model in models]

    expected = on_one_rank(lambda: trained(True))
    for ours, alone in zip(trained(False), expected, strict=True):
        assert_identical(ours)
        assert_close(ours, alone)


@enough_on("tensorflow", "torch")
def test_train_on_batch_returns_local_and_evaluate_global():
    x, y = data()
    model = dense()
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    mine = [part(a, 0, False) for a in (x, y)]
    local = model.train_on_batch(*mine, return_dict=True)
    tested = model.test_on_batch(*mine, return_dict=True)
    with keras_hpc.local():
        alone = model.evaluate(*mine, verbose=0, return_dict=True)
    for logs in (tested, alone):
        assert logs.keys() == local.keys()
        assert list(map(float, logs.values())) == pytest.approx(list(map(float, local.values())), rel=1e-5)


# A last batch smaller than the number of ranks.


def normalized():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Softmax()])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@sharded()
@pytest.mark.parametrize("accumulate", [2, *enough([None], "torch")])
@enough_on("jax", "torch")
def test_ranks_without_samples(accumulate, running):
    x, y = data(samples=49)  # a tail of one

    def make():
        model = dense()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=accumulate)
        model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def train(model, whole):
        options = {"shuffle": False, "verbose": 0, "validation_data": (x, y), "validation_batch_size": BATCH}
        history = model.fit(x, y, batch_size=BATCH, epochs=4, **options).history
        return history, model.evaluate(x, y, batch_size=BATCH, verbose=0)

    assert_like_one_rank(make, train)


class Taught(keras.Model):
    """Has a teacher, whose weights follow its own in each step."""

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        self.teacher = keras.models.clone_model(self.student)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def train_step(self, *args, **kwargs):
        logs = super().train_step(*args, **kwargs)
        for teachers, mine in zip(self.teacher.weights, self.student.weights, strict=True):
            teachers.assign(0.7 * teachers + 0.3 * mine)
        return logs


def spectral():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.SpectralNormalization(keras.layers.Dense(8)), keras.layers.Dense(3)]
    )


@sharded()
@pytest.mark.parametrize("network", [spectral, Taught])
@enough_on("torch")
def test_state_that_no_sample_decides_goes_on_without_samples(network, running):
    if network is Taught and keras.backend.backend() == "jax":
        pytest.skip("its trainer hands states on")
    x, y = data(samples=49)  # a tail of one

    def make():
        keras.utils.set_random_seed(4)
        model = network()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def train(model, whole):
        return model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0).history

    assert_like_one_rank(make, train)


@sharded()
@enough_on("torch")
def test_losses_of_several_outputs(running):
    x, y = data(samples=49)

    def make():
        keras.utils.set_random_seed(4)
        inputs = keras.Input((6,))
        outputs = [
            keras.layers.Dense(3, activation="softmax", name="kind")(inputs),
            keras.layers.Dense(1, name="size")(inputs),
        ]
        model = keras.Model(inputs, outputs)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=["sparse_categorical_crossentropy", "mse"])
        return model

    def train(model, whole):
        targets = [y, x[:, :1]]
        options = {"shuffle": False, "verbose": 0, "validation_data": (x, targets), "validation_batch_size": 10}
        history = model.fit(x, targets, batch_size=BATCH, epochs=2, **options).history
        return history, model.evaluate(x, targets, batch_size=BATCH, verbose=0)

    assert_like_one_rank(make, train)


@sharded()
@several_ranks
@enough_on("torch")
def test_state_of_a_rank_without_samples_is_untouched(running):
    x, y = data(samples=49)
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            seen.append(np.array(self.model.layers[1].moving_variance))

    model = normalized()
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[Watch()])
    has_last = (seen[-1] != seen[-2]).any()
    assert has_last == (job().rank == 0)
    keras_hpc.check_replicas(model)


# What is refused, and what is mentioned.


@tensorflow_only
@several_ranks
def test_xla_is_turned_off(caplog):
    model = dense()
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", jit_compile=True)
    model.fit(Parts(*data()), epochs=1, verbose=0)
    assert model.jit_compile is False
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    assert model.jit_compile is False


@enough_on("torch")
def test_local_training_is_alone():
    x, y = data()
    model = dense()
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    with keras_hpc.local():
        model.fit(x[: 10 * (1 + job().rank)], y[: 10 * (1 + job().rank)], verbose=0, batch_size=2)  # other step counts
    model.fit(Parts(x, y), epochs=1, verbose=0)  # and the same model together
    assert_identical(values(model))
    with keras_hpc.local():
        model.fit(x[: 10 * (1 + job().rank)], y[: 10 * (1 + job().rank)], verbose=0, batch_size=2)


# Keras is left as it was found.


def attributes():
    """The identity of all attributes of all Keras classes and modules that could have been changed."""
    import sys

    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("keras.src") and module is not None:
            for key, value in vars(module).items():
                found[name, key] = id(value)
                if inspect.isclass(value) and value.__module__.startswith("keras.src"):
                    found.update({(name, key, item): id(member) for item, member in vars(value).items()})
    return {key: value for key, value in found.items() if not str(key[-1]).startswith(("_abc", "__warningregistry"))}


@enough_on("torch")
def test_finalize_restores_keras():
    x, y = data()
    model = dense()
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(Parts(x, y), epochs=1, verbose=0)  # imports what Keras imports late
    rank = job().rank
    keras_hpc.finalize()
    before = attributes()
    keras_hpc.init(shard=False)
    during = attributes()
    changed = {key for key in before if before[key] != during.get(key)}
    assert any("fit" in key for key in changed)
    assert any("apply" in key for key in changed)
    model.fit(Parts(x, y), epochs=1, verbose=0)

    class Late(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    own = vars(Late)["apply"]
    Late()
    assert vars(Late)["apply"] is not own
    keras_hpc.finalize()
    after = attributes()
    assert {key for key in before if before[key] != after.get(key)} == set()
    assert set(after) == set(before)
    assert vars(Late)["apply"] is own
    model.fit(x[: 8 * (rank + 1)], y[: 8 * (rank + 1)], batch_size=4, epochs=1, verbose=0)  # alone, with the old model
    keras_hpc.init(shard=False)


@pytest.mark.skipif(BACKEND == "torch", reason="runs eagerly")
def test_a_step_that_was_traced_before_init(caplog, monkeypatch):
    rank, size = job().rank, job().size
    keras_hpc.finalize()
    optimizer, variable = keras.optimizers.SGD(1.0), keras.Variable(np.zeros(3, "float32"))
    optimizer.build([variable])
    if BACKEND == "jax":
        import jax

        @jax.jit
        def step(gradient, value, state):
            return optimizer.stateless_apply(state, [gradient], [value])[0][0]

        def take(gradient):
            return step(gradient, variable.value, [v.value for v in optimizer.variables])

    else:
        import tensorflow as tf

        step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))

        def take(gradient):
            step(tf.constant(gradient))
            return variable.numpy()

    gradient = np.full(3, rank + 1, "float32")
    np.testing.assert_allclose(take(gradient), -gradient)
    monkeypatch.setattr(current, "_had_job", False)
    with caplog.at_level("WARNING", "keras_hpc"):
        keras_hpc.init(shard=False)
    if BACKEND == "jax":
        np.testing.assert_allclose(take(gradient), np.full(3, -(size + 1) / 2))
    assert ("steps before keras_hpc.init()" in caplog.text) == (BACKEND == "tensorflow" and rank == 0 and size > 1)


OTHERS = {
    "keras.distribution": ("keras.distribution.distribution", lambda: "DataParallel"),
    "tf.distribute": ("tensorflow.distribute.has_strategy", lambda: True),
    "jax.distributed": ("jax.distributed.is_initialized", lambda: True),
    "torch.distributed": ("torch.distributed.is_initialized", lambda: True),
}


@pytest.mark.parametrize("other", [*OTHERS, "moved"])
def test_init_refuses(other, monkeypatch):
    from keras_hpc.keras_hooks import keras_private

    if other != "moved":
        name, answer = OTHERS[other]
        module = name.partition(".")[0]
        if sys.modules.get(module) is None:
            pytest.skip(f"{module} is not loaded")
        monkeypatch.setattr(name, answer, raising=False)  # jax 0.5.0 has no such function
        if other == "torch.distributed":
            monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
            monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
        error, text = RuntimeError, other
    else:
        monkeypatch.setattr(keras_private, "REQUIRED", ["keras.src.trainers.trainer:Trainer._gone"])
        error, text = ImportError, rf"Trainer._gone.*{keras.__version__}"
    with pytest.raises(error, match=text):
        keras_private.check()


# The last one: PyTorch's compiler leaves programs of its own in Keras' modules.


@torch_only
@enough_on()
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's compiler looks at it
def test_torch_compile(monkeypatch):
    import torch

    # What is captured runs as it is: only how steps are taken apart matters here, and compiling them takes a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))

    def make():
        model = dense()
        loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")  # which needs an exchange of its own
        compiles = not current.is_local()
        model.compile(keras.optimizers.SGD(0.003), loss, metrics=["accuracy"], jit_compile=compiles)
        return model

    def train(model, whole):
        return model.fit(Parts(*data(samples=3 * BATCH), whole=whole), shuffle=False, verbose=0).history

    model = assert_like_one_rank(make, train, tolerance=1e-5)
    assert model.jit_compile
