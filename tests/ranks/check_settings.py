"""What scripts make in each process, and ranks cannot make equal: it is refused or named."""

import logging

import keras
import numpy as np
import pytest
from keras_cases import enough_on, job

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,)}
SOAK = {"torch": (2,)}
pytestmark = pytest.mark.usefixtures("global_batches")


@pytest.fixture
def warnings(caplog, monkeypatch):
    """A function that returns what rank 0 has been warned of."""
    monkeypatch.setattr(logging.getLogger("keras_hpc"), "propagate", True)
    return lambda: [
        record.getMessage() for record in caplog.records if (record.name, record.levelname) == ("keras_hpc", "WARNING")
    ]


def compiled(*layers, dtype="float32"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,), dtype=dtype), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    return model


def samples(count=16):
    x = np.random.default_rng(0).normal(size=(count, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def of_rank(items):
    """Returns what a set of Python may give: the same items, in another order on each rank."""
    return np.roll(items, job().rank).tolist()


# A model of JAX has no lookups: they cannot be compiled.
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras looks nothing up in models on JAX")
def test_another_vocabulary_is_refused():
    numbers = np.arange(64).reshape(16, 4) % 5
    layers = [keras.layers.Embedding(8, 2), keras.layers.Flatten()]
    known = keras.layers.IntegerLookup(vocabulary=[0, 1, 2, 3, 4])
    compiled(known, *layers, dtype="int64").fit(numbers, numbers[:, :1], verbose=0)
    known = keras.layers.IntegerLookup(vocabulary=of_rank([0, 1, 2, 3, 4]), name="words")
    with pytest.raises(ValueError, match=r"sort it.*layer `words` with 6 words.*'0'.* on rank 0.*'4'.* on rank 1"):
        compiled(known, *layers, dtype="int64").fit(numbers, numbers[:, :1], verbose=0)


@enough_on("jax")
def test_other_arguments_of_a_layer_are_named(warnings):
    # Names and seeds may be counted and drawn by each process.
    mine = job().rank
    alike = keras.layers.Dense(3, name=f"a{mine}", kernel_initializer=keras.initializers.GlorotUniform(seed=mine))
    compiled(alike, keras.layers.Dropout(0.5, seed=mine)).fit(*samples(), verbose=0)
    assert not warnings()
    compiled(keras.layers.LeakyReLU(0.1 + 0.1 * mine, name="leaky")).fit(*samples(), verbose=0)
    (text,) = warnings() if mine == 0 else ["layer `leaky` was made with other arguments"]
    assert "layer `leaky` was made with other arguments" in text


@enough_on("jax")
def test_other_arguments_of_compile_are_named(warnings):
    x, y = samples()
    mine = job().rank
    loss = keras.losses.Huber(1.0, name=f"huber{mine}")
    for what, rate, used in (
        ("", 0.01, loss),
        ("", 0.01, lambda true, predicted: keras.ops.mean((true - predicted) ** 2)),
        ("optimizer", 0.01 + 0.01 * mine, loss),  # as a search suggests to each rank
        ("loss", 0.01, "mse" if mine else "mae"),
    ):
        model = compiled()
        model.compile(keras.optimizers.Adam(rate, name=f"adam{mine}"), used)
        told = len(warnings())
        model.fit(x, y, verbose=0)
        assert [f"`{what}` of compile()" in text for text in warnings()[told:]] == [True] * bool(what and mine == 0)


def test_the_size_of_a_first_batch_is_no_other_argument(warnings):
    """Keras makes an input layer of it, and ranks have other sizes where a batch cannot be shared out evenly."""
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(*samples(3), batch_size=3, verbose=0)
    assert not warnings()


@enough_on("tensorflow")
def test_a_pipeline_that_gives_other_words(warnings):
    tf = pytest.importorskip("tensorflow")
    numbers = np.arange(64, dtype="int32").reshape(16, 4) % 5
    layers = [keras.layers.Embedding(5, 2), keras.layers.Flatten()]

    def pipeline(table):
        held = tf.constant(table, tf.int32)
        return (
            tf.data.Dataset.from_tensor_slices((numbers, samples()[1]))
            .batch(4)
            .map(lambda x, y: (tf.gather(held, x), y))
        )

    model = compiled(*layers, dtype="int32")
    model.fit(pipeline([0, 1, 2, 3, 4]), epochs=2, verbose=0)
    assert not warnings()
    model.fit(pipeline(of_rank([0, 1, 2, 3, 4])), epochs=2, verbose=0)
    assert [("in its first batch" in text) for text in warnings()] == [True] * (job().rank == 0)


@enough_on()
def test_augmented_images_are_no_other_data(warnings):
    tf = pytest.importorskip("tensorflow")
    mine = float(job().rank)
    augmented = tf.data.Dataset.from_tensor_slices(samples()).batch(4).map(lambda x, y: (x + mine, y))
    compiled().fit(augmented, verbose=0)
    assert not warnings()


def test_weights_that_batches_move_apart_are_named(warnings):
    model = compiled()
    x, y = keras_hpc.shard(samples())
    for step in range(5):
        if step == 2 and job().rank == 1:  # as it may decide by the loss of its own samples
            model.optimizer.learning_rate = 0.001
        model.train_on_batch(x, y)
        assert bool(warnings()) == (step >= 3 and job().rank == 0), step
    assert all("after 4 steps of train_on_batch: variable" in text for text in warnings())


def test_weights_that_a_loop_moves_apart_are_named_when_they_become_equal(warnings):
    model = compiled()
    model.train_on_batch(*samples())
    if job().rank == 0:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    model.evaluate(*samples(), verbose=0)
    model.evaluate(*samples(), verbose=0)
    keras_hpc.check_replicas(model)
    assert len(warnings()) == (job().rank == 0)
    assert all("become those of rank 0" in text for text in warnings())


FURTHER = [pytest.param(*case, marks=enough_on()) for case in (("embeddings", 0.1), ("kernel", 1e-6), ("rate", 1e-6))]


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="others give dense gradients of embeddings")
@pytest.mark.parametrize(("moved", "off"), [("embeddings", 1e-6), *FURTHER])
def test_embeddings_that_gpus_round_otherwise_become_those_of_the_root(moved, off, warnings, monkeypatch):
    """A GPU adds up rows in no fixed order. Here rank 1 only says that it has one, and rounds otherwise."""
    if job().rank == 1:
        monkeypatch.setattr(job(), "device", object())
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Embedding(9, 3), keras.layers.Flatten()])
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse")
    kernel, rate = model.layers[-1].kernel, model.optimizer._learning_rate
    variable = {"embeddings": model.layers[0].embeddings, "kernel": kernel, "rate": rate}[moved]

    class Moves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if job().rank == 1:
                variable.assign(variable.value * (1 + off))

    words = np.random.default_rng(0).integers(0, 9, (16, 4))
    model.fit(words, samples()[1], batch_size=8, epochs=2, verbose=0, callbacks=[Moves()])
    if (moved, off) == ("embeddings", 1e-6):
        assert not warnings()
        keras_hpc.check_replicas(model)
        return
    # Of a rate that is another one, only what differs is said, if anything does after two epochs.
    assert moved == "rate" or len([text for text in warnings() if moved in text]) == (job().rank == 0)
    with pytest.raises(keras_hpc.ReplicaMismatchError, match="rate|kernel|bias" if moved == "rate" else moved):
        keras_hpc.check_replicas(model)
