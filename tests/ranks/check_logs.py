# SPDX-License-Identifier: Apache-2.0
"""Logs of steps whose samples the ranks cannot share out evenly are those of one rank."""

from pathlib import Path

import keras
import pytest
from keras import ops
from keras_cases import enough, enough_on, job, on_one_rank
from random_steps import OwnStep, size_of_outputs
from regression import X, Y, compare, dense

import keras_hpc
from keras_hpc.keras_hooks import batch_logs

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2, 3), "jax": (3,), "torch": (3,)}
pytestmark = pytest.mark.usefixtures("global_batches")


def trained(samples, model=keras.Model, middle=None, metrics=(), **options):
    if model is Counting and keras.__version__.startswith("3.10.") and keras.backend.backend() == "torch":
        pytest.skip("what Keras 3.10 logs of a Sum changes with it, when the next epoch or an evaluation begins")

    def make():
        inputs = keras.Input((4,))
        x = keras.layers.Dense(3, activation="tanh")(inputs if middle is None else middle()(inputs))
        made = model(inputs, keras.layers.Dense(1)(x))
        made.compile("sgd", "mse", metrics=list(metrics))
        return made

    held = X[:5], Y[:5]
    return compare(make, X[:samples], Y[:samples], validation_data=held, validation_batch_size=3, **options)


@pytest.mark.parametrize(
    "samples", [41, *enough([33], "torch")]
)  # of the last batch, of 16, ranks have 5 and 4, or 1 and none
@enough_on("torch")
def test_a_step_that_gives_its_loss_to_a_mean_and_logs_it_as_it_is(samples):
    trained(samples, OwnStep)


def sum_of_outputs(y_true, y_pred):
    return ops.sum(ops.abs(y_pred))


def root_of_mean(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def sum_of_each_output(y_true, y_pred):
    return ops.sum(ops.abs(y_pred), axis=0)


def root_of_each_output(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred), axis=0))


@pytest.mark.parametrize(
    "function", [sum_of_outputs, *enough([size_of_outputs], "torch", "jax"), *enough([sum_of_each_output], "torch")]
)
@enough_on("torch")
def test_a_metric_that_is_one_number_for_a_batch(function):
    trained(41, metrics=[function])


@enough_on("torch")
def test_a_metric_that_is_neither_a_mean_nor_a_sum_is_named(caplog):
    model = dense()
    model.compile("sgd", "mse", metrics=[root_of_mean, root_of_each_output, size_of_outputs, sum_of_outputs, "mae"])
    with caplog.at_level("WARNING", "keras_hpc"):
        model.fit(X, Y, verbose=0)
    named = [text for text in caplog.messages if "one number for a whole batch" in text]
    expected = ["`root_of_mean`", "`root_of_each_output`"] if job().rank == 0 and job().size > 1 else []
    assert len(named) == len(expected)
    assert all(name in text for name, text in zip(expected, named, strict=True))


def distance_from_others(y_true, y_pred):
    return ops.abs(y_pred - ops.mean(y_pred))[:, 0]


@enough_on("torch")
def test_a_metric_that_compares_the_samples_of_a_batch_is_named(caplog):
    model = dense()
    model.compile("sgd", "mse", metrics=[distance_from_others, lambda y, p: ops.abs(y - p)[:, 0], "mae"])
    with caplog.at_level("WARNING", "keras_hpc"):
        model.fit(X, Y, epochs=2, verbose=0)
    named = [text for text in caplog.messages if "beside other samples" in text]
    assert [text.split("`")[1] for text in named] == ["distance_from_others"] * (job().rank == 0 and job().size > 1)


class TotalOfMeans(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(size_of_outputs(y_true, y_pred))


class TotalOfSums(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(sum_of_outputs(y_true, y_pred))


class MeanOfSums(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(sum_of_outputs(y_true, y_pred))


class Counting(OwnStep):
    """Gives single numbers of each kind to its metrics."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.measures = [TotalOfMeans("means"), TotalOfSums("sums"), MeanOfSums("mean_of_sums")]


@enough_on("torch")
def test_numbers_that_a_step_gives_to_a_sum_or_a_mean():
    trained(41, Counting)


class FromLogs(keras.callbacks.Callback):
    """Lets the learning rate of the next step depend on the loss so far."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([logs["loss"], logs["sums"], float(self.model.optimizer.learning_rate)])
        self.model.optimizer.learning_rate = 0.01 * logs["loss"]


@enough_on("torch", "jax")
def test_a_callback_that_looks_at_logs_after_a_batch_sees_those_of_all_ranks():
    ours = FromLogs()
    trained(41, Counting, callbacks=[ours])
    steps = len(ours.seen) // (2 if job().rank == 0 else 1)  # rank 0 has trained alone first
    for first, second in zip(keras_hpc.broadcast_object(ours.seen[:steps]), ours.seen[-steps:], strict=True):
        assert second == pytest.approx(first, rel=1e-5)


class OfTests(keras.callbacks.Callback):
    """Remembers logs after batches of validation and of `evaluate`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append([logs["loss"], logs["mae"]])


@enough_on("torch", "tensorflow")
def test_a_callback_that_looks_at_logs_after_a_batch_of_tests_sees_those_of_all_ranks():
    def seen():
        keras.utils.set_random_seed(5)
        model = dense()
        model.compile("sgd", "mse", metrics=["mae"])
        ours = OfTests()
        held = X[:21], Y[:21]
        model.fit(X, Y, 16, epochs=2, shuffle=False, verbose=0, validation_data=held, callbacks=[ours])
        final = model.evaluate(*held, batch_size=4, verbose=0, callbacks=[ours])
        return [*ours.seen, final]  # 21 samples are 5 batches of 4, and one sample

    for first, second in zip(on_one_rank(seen), seen(), strict=True):
        assert second == pytest.approx(first, rel=1e-5)


@enough_on("torch")
def test_what_is_best_amid_an_epoch_is_so_by_the_logs_of_all_ranks_and_all_know_it(tmp_path):
    def found():
        keras.utils.set_random_seed(5)
        model = dense()
        model.compile("sgd", "mse")
        path = tmp_path / "best.weights.h5"
        saver = keras.callbacks.ModelCheckpoint(path, "loss", 0, True, True, mode="min", save_freq=3)
        model.fit(X, Y, 16, epochs=2, shuffle=False, verbose=0, callbacks=[saver])
        return saver.best

    assert found() == pytest.approx(on_one_rank(found), rel=1e-5)


@pytest.mark.parametrize(("name", "looks"), [("{epoch:02d}-{batch}", False), ("{epoch:02d}-{loss:.4f}", True)])
@enough_on("torch")
def test_files_that_are_named_by_logs_amid_an_epoch_have_the_names_of_one_rank(name, looks, tmp_path):
    def names(path):
        keras.utils.set_random_seed(5)
        model = dense()
        model.compile("sgd", "mse")
        saver = keras.callbacks.ModelCheckpoint(path / f"{name}.keras", save_freq=3)
        model.fit(X, Y, 16, epochs=2, shuffle=False, verbose=0, callbacks=[saver])
        assert batch_logs.anyone_looks([saver]) == looks
        return sorted(file.name for file in path.glob("[0-9]*.keras"))

    folders = [tmp_path / "alone", Path(keras_hpc.broadcast_object(str(tmp_path / "all")))]
    alone, together = on_one_rank(lambda: names(folders[0])), names(folders[1])
    assert together == alone


@pytest.mark.parametrize(
    ("hook", "looks"),
    [(lambda batch, logs: logs["loss"], True), (lambda batch, logs: batch, False), (lambda *given: None, True)],
)
@enough_on("torch")
def test_who_looks_at_logs(hook, looks):
    assert batch_logs.anyone_looks([keras.callbacks.LambdaCallback(on_train_batch_end=hook)]) == looks
    assert not batch_logs.anyone_looks([keras.callbacks.TerminateOnNaN(), keras.callbacks.Callback()])


class Share(keras.layers.Layer):
    """Divides by a sum, which zeros do not have."""

    def call(self, x):
        return x / ops.sum(ops.abs(x), axis=-1, keepdims=True)


@enough_on("torch")
def test_zeros_that_stand_for_no_samples_do_not_end_a_training():
    trained(33, middle=Share, callbacks=[keras.callbacks.TerminateOnNaN()])


@enough_on("tensorflow")
def test_zeros_that_stand_for_no_samples_count_in_no_metric_of_a_loaded_model(tmp_path):
    path = keras_hpc.broadcast_object(str(tmp_path / "model.keras"))
    model = dense()
    model.compile("sgd", "mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    model.fit(X[:4], Y[:4], verbose=0)
    model.save(path)

    def measured():
        loaded = keras.saving.load_model(path)
        return loaded.fit(X[:3], Y[:3], batch_size=1, shuffle=False, verbose=0).history["rmse"]

    assert measured() == pytest.approx(on_one_rank(measured), rel=1e-5)
