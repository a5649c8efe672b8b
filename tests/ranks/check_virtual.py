# SPDX-License-Identifier: Apache-2.0
"""`init(virtual_ranks=)`: 1, 2 and 3 ranks end with the same bits, in one job: three ranks, then two beside one."""

import os
import shutil
import tempfile

import keras
import numpy as np
import pytest
from checkpoint_cases import Stop, StopError
from keras_cases import Parts, assert_close, enough_on
from virtual_cases import VIRTUAL, assert_alike, digest, jobs, same_bits, world

import keras_hpc
from keras_hpc.job import current

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (3,)}
SOAK = {"tensorflow": (3, 4), "jax": (3, 4), "torch": (4,)}

random = np.random.default_rng(7)
X = random.normal(size=(53, 6, 6, 1)).astype("float32")
Y = np.argmax(X[:, 0, :3, 0] + 0.1 * random.normal(size=(53, 3)), axis=1).astype("int32")
# 24 samples in a step: of the last 5 samples three of eight parts have none.
FIT = {"batch_size": 3, "epochs": 2, "verbose": 0}
SOAKS = bool(os.environ.get("TESTS_SOAK"))
TENSORFLOW = keras.backend.backend() == "tensorflow"


class Unseeded(keras.layers.Layer):
    """Draws from the generator that Keras has for all."""

    def call(self, x, training=False):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x)) if training else x


def network(optimizer=None, loss="sparse_categorical_crossentropy"):
    """Layers that draw random numbers, and that take statistics from data."""
    augment = keras.layers.RandomFlip() if TENSORFLOW else keras.layers.GaussianNoise(0.1)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            augment,
            *([] if keras.backend.backend() == "jax" else [Unseeded()]),
            keras.layers.Conv2D(2, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(optimizer or keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


@enough_on("torch")
def test_arrays_with_a_tail_and_validation():
    def train():
        model = network()
        history = model.fit(X, Y, **FIT, validation_data=(X[:20], Y[:20])).history
        assert history["loss"][1] < history["loss"][0]
        return digest(model), history, model.evaluate(X, Y, batch_size=3, verbose=0)

    same_bits(train)


@enough_on("jax", "torch")
def test_one_part_a_rank():
    """Where a plan adds gradients up while others are computed. In the last step some parts have no samples."""
    tokens = np.random.default_rng(1).integers(0, 50, (50, 6)).astype("int32")

    def train():
        layers = [
            keras.layers.Embedding(50, 4),
            keras.layers.Conv1D(8, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3, activation="softmax"),
        ]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2, global_clipnorm=1.0)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        history = model.fit(tokens, Y[:50], **FIT).history
        summed = current.job().teams[0].report()["steps"]
        is_early = keras_hpc.size() == world().size and current.job().teams[0].adds_in_tree
        assert summed == (2 * -(-50 // (3 * world().size)) if is_early else 0)
        return history, digest(model)

    same_bits(train, virtual=world().size)


@enough_on("torch")
def test_parts_compute_what_ranks_do():
    results = []
    for arguments in jobs():
        size = arguments["comm"].size
        for options in ({"virtual_ranks": world().size}, {} if size == world().size else None):
            if options is None:
                continue
            keras_hpc.init(**arguments, **options)
            keras.utils.clear_session()
            keras.utils.set_random_seed(3)
            model = network(keras.optimizers.SGD(0.05, momentum=0.9))
            history = model.fit(X, Y, **FIT).history
            results.append((model.get_weights(), history))
            keras_hpc.finalize()
    for weights, history in results[1:]:
        assert_close(weights, results[0][0], 1e-4)
        np.testing.assert_allclose(history["loss"], results[0][1]["loss"], rtol=1e-4)
        np.testing.assert_allclose(history["accuracy"], results[0][1]["accuracy"], rtol=1e-6)


def resumed():
    """Trains at once on some ranks; and in pieces, each on another number of ranks."""
    folder = world().bcast(tempfile.mkdtemp() if world().rank == 0 else "")
    try:
        results = []
        for pieces in ((None, None), (4, None)):
            for piece, arguments in zip(pieces, jobs(), strict=True):
                first = arguments["comm"].size == world().size
                last = world().rank == world().size - 1
                # Of the second, the two jobs go on from the same, each with a copy.
                name = os.path.join(folder, "pieces" if piece or not first else "whole")
                if pieces[0] and not first:
                    own = f"{name}-{int(last)}"
                    if arguments["comm"].rank == 0:
                        shutil.copytree(name, own)
                    name = own
                keras_hpc.init(**arguments, virtual_ranks=VIRTUAL)
                model = network()
                given = [keras_hpc.callbacks.Checkpoint(name, every_steps=2)] if pieces[0] else []
                given += [Stop(piece)] if piece else []
                try:
                    history = model.fit(X, Y, **FIT, callbacks=given)
                except StopError:
                    continue
                results.append((digest(model), history.history))
        assert_alike(results)
    finally:
        world().Barrier()
        if world().rank == 0:
            shutil.rmtree(folder)


@enough_on("torch")
def test_goes_on_with_the_same_bits_on_another_number_of_ranks():
    resumed()


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras says of every generator
@enough_on()
def test_batches_of_a_data_set():
    """Ready-made batches, dealt to parts and cut among them, with two of eight parts of the last step left over."""

    def train():
        model = network(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2, clipnorm=1.0))
        data = []
        if not TENSORFLOW or SOAKS:  # which makes its programs anew for each
            data = [Parts(X, Y, batch=4, whole=True), ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 52, 4))]
            data.append(keras_hpc.data.Dataset(file, batch_size=4, fields=("x", "y"), seed=2))
        if TENSORFLOW:
            import tensorflow as tf

            data.append(tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(30, seed=4).batch(4))
        if keras.backend.backend() == "torch":
            import torch

            rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
            data.append(torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True))
        return [(model.fit(one, verbose=0).history, digest(model)) for one in data]

    folder = tempfile.mkdtemp()
    file = os.path.join(folder, "data.npz")
    np.savez(file, x=X, y=Y)
    try:
        same_bits(train)
        if not TENSORFLOW or SOAKS:
            same_bits(train, batch="global")
    finally:
        shutil.rmtree(folder)


@enough_on()
def test_sparse_gradients_and_sums():
    """Rows of an embedding, a loss that is a sum, one that layers add, and a metric that merges itself."""
    tokens = np.random.default_rng(1).integers(0, 50, (53, 5)).astype("int32")

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

        def merge_state(self, metrics):
            for metric in metrics:
                self.value.assign(keras.ops.maximum(self.value, metric.value))

        def result(self):
            return keras.ops.convert_to_tensor(self.value)

    def train():
        inputs = keras.Input((5,), dtype="int32")
        hidden = keras.layers.Embedding(50, 4)(inputs)
        hidden = keras.layers.ActivityRegularization(0.01)(keras.layers.Flatten()(hidden))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError(reduction="sum"), metrics=[Largest()])
        history = model.fit(tokens, Y.astype("float32"), sample_weight=np.linspace(0, 1, 53), **FIT).history
        return history, digest(model)

    same_bits(train)


class Keeping(keras.layers.Layer):
    """Computes with what it keeps from step to step, and with what a callback assigns."""

    def build(self, shape):
        def kept(name, shape=(), start="zeros", **options):
            setattr(self, name, self.add_weight(shape=shape, initializer=start, trainable=False, name=name, **options))

        kept("calls")
        kept("ticks", dtype="int32")
        kept("mean")
        kept("seen", aggregation="sum")
        kept("beta")
        kept("mask", shape[-1:], "ones")

    def call(self, x, training=False):
        y = x * self.mask * (1 + self.beta + 0.01 * self.calls) + self.mean
        if training:
            self.calls.assign_add(1)
            self.ticks.assign(self.ticks - 2)
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x))
            self.seen.assign(self.seen + keras.ops.cast(keras.ops.shape(x)[0], "float32"))
        return y


class Fading(keras.layers.Dense):
    """Makes its kernel smaller, from the third step on."""

    def build(self, shape):
        super().build(shape)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x, training=False):
        if training:
            self.kernel.assign(keras.ops.where(self.steps < 2, 1.0, 0.8) * self.kernel)
            self.steps.assign_add(1)
        return super().call(x)


class Assigning(keras.callbacks.Callback):
    """Assigns to variables before each step, and lets the learning rate follow the loss."""

    def __init__(self):
        super().__init__()
        self.steps, self.losses = 0, []

    def on_train_batch_begin(self, batch, logs=None):
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        self.steps += 1
        self.model.layers[0].beta.assign(0.1 * self.steps)
        self.model.layers[0].mask.assign([1] * 36 if self.steps % 2 else [1, 0] * 18)

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.model.optimizer.learning_rate = 0.02 * logs["loss"]


@enough_on("torch")
def test_what_layers_keep_and_what_callbacks_assign_and_read():
    """As on one rank, which computes each global batch at once; of the last one three parts have nothing."""

    def train(batch):
        keras.utils.set_random_seed(3)
        dense = keras.layers.SpectralNormalization(keras.layers.Dense(4))
        layers = [Keeping(), dense, Fading(4, activation="tanh"), keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential([keras.Input((36,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
        ours = Assigning()
        given = FIT | {"batch_size": batch, "callbacks": [ours], "shuffle": False}
        history = model.fit(X.reshape(53, 36), Y, **given).history
        kept = {v.name: np.array(v).tolist() for v in model.layers[0].variables}
        return digest(model), history, ours.losses, kept, [np.array(w).tolist() for w in model.get_weights()]

    keras_hpc.finalize()
    *_, history, losses, kept, weights = train(24)
    found = same_bits(lambda: train(3))
    assert (found[3]["calls"], found[3]["ticks"], found[3]["seen"]) == (6, -12, 106)
    assert kept["beta"] == found[3]["beta"] == pytest.approx(0.6)
    np.testing.assert_allclose(found[2], losses, rtol=1e-4)
    np.testing.assert_allclose(found[1]["loss"], history["loss"], rtol=1e-4)
    for ours, theirs in zip(found[4], weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", ["unseen", *(["counted"] if keras.backend.backend() == "torch" else [])])
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras forgets what a layer assigns to weights")
def test_a_weight_that_is_changed_in_place_later_is_named(way):
    """Of its value before, which the next part needs, nobody has a copy."""

    class Limited(Fading):
        def call(self, x, training=False):
            if training and TENSORFLOW:
                kernel = self.kernel.value
                kernel.assign(keras.ops.where(self.steps < 2, kernel, 0.01 * kernel))
            elif training and way == "unseen" and self.steps >= 2:
                self.kernel.value.data.clamp_(-0.01, 0.01)
            elif training and way == "counted" and self.steps == 2:  # of which each part has its own
                self.kernel.value.detach().clamp_(-0.01, 0.01)
            self.steps.assign_add(1)
            return keras.layers.Dense.call(self, x)

    keras_hpc.finalize()
    keras_hpc.init(virtual_ranks=8)
    model = keras.Sequential([keras.Input((36,)), Limited(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(RuntimeError, match=rf"place of `.*kernel`, seen in step {3 if way == 'counted' else 4}"):
        model.fit(X.reshape(53, 36), Y, **FIT)
    keras_hpc.finalize()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 2}, "at least the number of ranks"),
        ({"virtual_ranks": 8, "shard": False}, "shard=False"),
        ({"virtual_ranks": 8, "teams": 2}, "teams=2"),
        ({"virtual_ranks": 8, "wire_dtype": "bfloat16"}, "wire_dtype='bfloat16'"),
    ],
)
@enough_on("torch")
def test_what_init_refuses(options, message):
    keras_hpc.finalize()
    with pytest.raises(ValueError, match=message):
        keras_hpc.init(**options)


@enough_on("torch")
def test_what_training_refuses():
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    keras_hpc.finalize()
    keras_hpc.init(virtual_ranks=8)
    x, y = X.reshape(53, -1), Y
    for make, call, message in (
        (keras.Sequential, lambda model: model.train_on_batch(x, y), "train_on_batch"),
        (Own, lambda model: model.fit(x, y, **FIT), "train_step"),
        (keras.Sequential, lambda model: keras_hpc.step(1).__enter__(), "keras_hpc.step"),
        (keras.Sequential, lambda model: keras_hpc.configure_team(schedule="pipelined"), "pipelined"),
        (keras.Sequential, lambda model: keras_hpc.keep_local(model.layers[0]), "without virtual_ranks"),
    ):
        model = make([keras.Input((36,)), keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        with pytest.raises(ValueError, match=message):
            call(model)
    if keras.backend.backend() == "torch":
        import torch

        module = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(36), output_shape=(None, 36))
        keeping = keras.Sequential([keras.Input((36,)), module, keras.layers.Dense(3, activation="softmax")])
        keeping.compile("sgd", "sparse_categorical_crossentropy")
        with pytest.raises(ValueError, match="running_mean"):
            keeping.fit(x, y, **FIT)
    weighted = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
    model.compile("sgd", weighted)
    with pytest.raises(ValueError, match="mean_with_sample_weight"):
        model.fit(x, y, sample_weight=np.ones(53), **FIT)
    keras_hpc.finalize()
