# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""A run that stops and goes on from its checkpoint ends with the bits of one that does not."""

import os

import keras
import numpy as np
import pytest
from checkpoint_cases import (
    BATCH,
    EPOCHS,
    Stop,
    StopError,
    X,
    Y,
    _job,
    assert_same,
    compiled,
    folder,
    network,
    only_on,
    outcome,
    resumed_equals_uninterrupted,
    start,
    trained,
)
from keras_cases import Parts, assert_close, assert_identical, enough_on, job

import keras_hpc
from keras_hpc.keras_hooks.checkpoint import snapshot

RANKS = {"jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}  # for what is enough on one of them

VALIDATION = (X[:40], Y[:40])


@enough_on("jax", "torch")
def test_arrays_with_validation_and_plateau(folder):
    def callbacks():
        plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=1.0, patience=1)
        return [keras_hpc.callbacks.LearningRateWarmup(1.5), plateau]

    # From the middle of an epoch, and from its last step, without another checkpoint in between. Where models take long
    # to compile, from the middle.
    stops = (7, 12) if keras.backend.backend() == "torch" else (7,)
    fit = {"callbacks": callbacks, "batch_size": BATCH, "validation_data": VALIDATION}
    model = resumed_equals_uninterrupted(folder, network, stops, lambda: (X, Y), **fit)
    assert_identical(model.get_weights())
    names = sorted(os.listdir(os.path.join(folder, "pieces")))
    assert names == ["step-000000020", "step-000000024"]


@enough_on()
def test_a_model_in_parts(folder):
    def make():
        keras.utils.set_random_seed(5)
        layers = [
            keras.layers.Conv2D(3, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
        ]
        model = keras.Sequential([keras.Input((13, 6, 2)), *layers, keras.layers.Conv2D(2, 3)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
        assert keras_hpc.partition(model).is_split
        return model

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(22, *shape)).astype("float32") for shape in ((13, 6, 2), (11, 4, 2)))
    in_parts = {"spatial": job().size}
    model = resumed_equals_uninterrupted(folder, make, (7,), lambda: (x, y), init=in_parts, batch_size=3)
    assert_identical(model.get_weights())
    # Without parts it goes on, too, but not bit for bit.
    start()
    alone = keras.models.clone_model(model)
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    given = [keras_hpc.callbacks.Checkpoint(os.path.join(folder, "pieces"))]
    history = alone.fit(x, y, 3, epochs=EPOCHS + 1, verbose=0, callbacks=given).history
    assert len(history["loss"]) == EPOCHS + 1
    assert history["loss"][-1] < history["loss"][0]


@only_on("jax", "torch")
@enough_on()
def test_a_pipelined_team(folder):
    def before():
        keras_hpc.configure_team(0, schedule="pipelined", synchronous_steps=3, cooldown_steps=4)

    def make():
        return network(keras.optimizers.SGD(0.05, momentum=0.9))

    # An average is outstanding where it goes on, and the cool-down comes as if nothing had been.
    resumed_equals_uninterrupted(folder, make, (11,), lambda: (X, Y), before=before, batch_size=BATCH)


@only_on("torch")
@enough_on("tensorflow")
def test_a_dataset_with_accumulated_gradients(folder):
    def make():
        return network(keras.optimizers.Adam(0.02, gradient_accumulation_steps=3))

    # In the middle of micro-batches. Each rank draws its own dropout from PyTorch's generator.
    dataset = lambda: (Parts(X, Y, batch=8, whole=True),)  # noqa: E731
    resumed_equals_uninterrupted(folder, make, (10,), dataset, every=4)


@only_on("torch")
@enough_on()
def test_steps_per_epoch(folder):
    # A pass of 8 steps goes on through epochs of 2.
    fit = {"batch_size": BATCH, "steps_per_epoch": 2}
    resumed_equals_uninterrupted(folder, network, (3, 3), lambda: (X, Y), every=2, **fit)


@only_on("torch")
@enough_on()
def test_modules_of_pytorch_with_buffers(folder, monkeypatch):
    import torch

    def make():
        keras.utils.set_random_seed(5)
        norm = keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(6))
        model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(3, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    # From the middle of an epoch, where each rank has statistics of its own.
    resumed_equals_uninterrupted(folder, make, (7,), lambda: (X, Y), batch_size=BATCH)
    # Checkpoints from before they were saved go on, too.
    with monkeypatch.context() as older:
        older.setattr(snapshot.variables, "buffers", lambda *models: [])
        trained(os.path.join(folder, "older"), make)
    assert trained(os.path.join(folder, "older"), make).epoch == [0]


@only_on("torch")
@enough_on("torch")
def test_a_data_loader(folder):
    import torch

    def loader():
        rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
        return (torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True),)

    resumed_equals_uninterrupted(folder, network, (12,), loader)


@only_on("tensorflow")
@enough_on("torch")
def test_a_pipeline_that_shuffles_by_itself(folder):
    import tensorflow as tf

    def pipeline():
        return (tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=4).batch(BATCH),)

    resumed_equals_uninterrupted(folder, network, (12,), pipeline)


@only_on("torch")
@enough_on("torch")
def test_a_run_that_early_stopping_ended_does_not_train_again(folder):
    results = []
    for _ in range(2):  # the second finds the end of the first
        start()
        normal = keras.layers.Normalization()  # one of its weights, a count, has no axes
        normal.adapt(X)
        model = compiled(keras.Sequential([keras.Input((6,)), normal, network()]))
        stopping = keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=1, restore_best_weights=True)
        given = [stopping, keras_hpc.callbacks.Checkpoint(folder)]
        results.append(outcome(model, model.fit(X, Y, BATCH, epochs=EPOCHS, verbose=0, callbacks=given)))
    assert results[0][2] == [0, 1]
    assert_same(results[1], results[0])


@only_on("tensorflow")  # where the first rank alone has an optimizer with variables then
@enough_on("torch")
def test_backup_and_restore_of_keras_goes_on_at_its_epoch(folder):
    path = os.path.join(folder, "backup")

    class Weights(keras.callbacks.Callback):
        """Notes weights before and after the first step."""

        def on_epoch_begin(self, epoch, logs=None):
            self.before = [keras.ops.convert_to_numpy(v) for v in self.model.trainable_weights]

        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                self.after = [keras.ops.convert_to_numpy(v) for v in self.model.trainable_weights]

    for stop in (Stop(13), None):
        start()
        model = network()
        weights = Weights()
        given = [keras.callbacks.BackupAndRestore(path, save_freq=4), weights] + ([stop] if stop else [])
        try:
            history = model.fit(X, Y, BATCH, epochs=2, verbose=0, callbacks=given)
        except StopError:
            interrupted = [v + 0 for v in weights.after]
    assert history.epoch == [1]
    assert_identical(weights.after, "restored weights")  # which the first rank alone has read
    if job().rank == 0:
        assert_close(weights.after, weights.before, 0.05)
        assert np.abs(interrupted[0] - weights.before[0]).max() > 0
    assert_identical(model.get_weights())
    assert not os.path.exists(path)


@enough_on()
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # as JAX says of each
def test_variables_of_64_bits(folder):
    """Of JAX they have values of 32 bits."""

    def make():
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(9, dtype="float64"), keras.layers.Dense(3, "softmax", dtype="float64")]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy")
        return model

    init = {"shard_optimizer": True}
    resumed_equals_uninterrupted(folder, make, (5,), lambda: (X, Y), batch_size=BATCH, init=init)
