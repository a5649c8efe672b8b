# SPDX-License-Identifier: Apache-2.0
"""Replicas are equal: at the start, after restores, at epoch ends."""

import functools
import json
from pathlib import Path

import keras
import numpy as np
import pytest
from keras_cases import (
    Parts,
    assert_close,
    assert_identical,
    data,
    dense,
    enough_on,
    everyone,
    job,
    on_one_rank,
    values,
)

import keras_hpc
from keras_hpc.job import current

SOAK = {"tensorflow": (2,), "jax": (2,)}  # for what is enough on PyTorch


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(shard=False)
    yield
    keras_hpc.finalize()


@pytest.fixture
def folder(tmp_path):
    return current.job().teams[0].allgather_object(str(tmp_path))[0]


def differently(model):
    """Gives every rank but 0 other weights."""
    if job().rank > 0:
        model.set_weights([v + job().rank for v in model.get_weights()])
    return model


def compiled(model, **kwargs):
    kwargs.setdefault("optimizer", keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(loss="sparse_categorical_crossentropy", **kwargs)
    return model


def train(model, epochs=1, **kwargs):
    return model.fit(Parts(*data()), epochs=epochs, shuffle=False, verbose=0, **kwargs)


def normalized():
    keras.utils.set_random_seed(6)
    layers = [keras.layers.Dense(5), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
    return compiled(keras.Sequential([keras.Input((6,)), *layers, keras.layers.Softmax()]))


class Watch(keras.callbacks.Callback):
    """Records the moving mean, before the epoch ends and after."""

    def __init__(self):
        super().__init__()
        self.before, self.after = [], []

    def on_train_batch_end(self, batch, logs=None):
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        self.before = np.array(self.model.layers[1].moving_mean).tolist()

    def on_epoch_end(self, epoch, logs=None):
        self.after = np.array(self.model.layers[1].moving_mean).tolist()


def test_statistics_of_a_single_step_are_averaged():
    model = normalized()
    x, y = (array[job().rank :: job().size][:8] for array in data())
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert_identical([np.array(model.layers[1].moving_mean)], "moving means")


@enough_on("torch")
def test_batch_normalization_is_averaged_at_epoch_end():
    model, watch = normalized(), Watch()
    train(model, epochs=2, callbacks=[watch], validation_data=Parts(*data()))
    before, after = everyone(watch.before), everyone(watch.after)
    assert job().size == 1 or before[0] != before[1]
    np.testing.assert_allclose(after[0], np.mean(before, axis=0), rtol=1e-6)
    assert all(a == after[0] for a in after)
    keras_hpc.check_replicas(model)
    assert_identical(values(model))


@enough_on("torch")
def test_rank_0_saves_alone(folder):
    model = normalized()
    train(model)
    path = f"{folder}/alone.keras"
    if job().rank == 0:
        model.save(path)  # must not wait for the others
    x, y = data()
    model.train_on_batch(x[:8], y[:8])
    if job().rank == 0:
        model.save(path)
    keras_hpc.barrier()
    loaded = keras.models.load_model(path)
    assert_close(values(loaded), values(model), 0)
    assert type(loaded.optimizer).__name__ == "SGD"


def test_fit_starts_from_root():
    model = differently(compiled(dense(), optimizer=keras.optimizers.SGD(0.0)))
    root = everyone([v.tolist() for v in values(model)])[0]
    train(model)
    assert_close(values(model), [np.array(v, "float32") for v in root], 0)


@enough_on("torch")
def test_second_fit_starts_from_root_again():
    model = compiled(dense(), optimizer=keras.optimizers.SGD(0.0))
    train(model)
    differently(model)
    train(model)
    assert_identical(values(model))


@enough_on("torch")
def test_train_on_batch_starts_from_root_after_compile_and_load(folder):
    x, y = data()
    model = differently(compiled(dense(), optimizer=keras.optimizers.SGD(0.1, momentum=0.9)))
    model.train_on_batch(x[:8], y[:8])
    assert_identical(values(model))
    with keras_hpc.local():
        other = compiled(dense(seed=20 + job().rank))
        other.train_on_batch(x[:8], y[:8])
        other.save_weights(f"{folder}/{job().rank}.weights.h5")
    for load in (model.load_weights, functools.partial(keras.saving.load_weights, model)):
        load(f"{folder}/{job().rank}.weights.h5")
        model.train_on_batch(x[:8], y[:8])
        assert_identical(values(model))


@enough_on("torch")
def test_load_model_on_rank_0_is_enough(folder):
    path = f"{folder}/model.keras"
    if job().rank == 0:
        with keras_hpc.local():
            trained = compiled(dense(seed=77))
            train_alone = trained.fit(Parts(*data(), whole=True), epochs=1, verbose=0)
            assert train_alone.epoch
            trained.save(path)
    keras_hpc.barrier()
    model = compiled(dense(seed=1)) if job().rank else keras.models.load_model(path)
    train(model)
    assert_identical(values(model))


@enough_on("torch")
def test_restored_epoch_and_weights_reach_all(folder):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def backup():
        return keras.callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False)

    model = compiled(dense())
    with pytest.raises(KeyboardInterrupt):
        train(model, epochs=4, callbacks=[backup(), Interrupt()])
    stopped = values(model)
    again = differently(compiled(dense(seed=99), optimizer=keras.optimizers.SGD(0.0, momentum=0.9)))
    history = train(again, epochs=4, callbacks=[backup()])
    assert history.epoch == [2, 3]
    assert_identical(values(again))
    assert_identical([np.array(v) for v in again.optimizer.variables])
    assert len(stopped) == len(values(again))


@enough_on("torch")
def test_files_are_written_by_rank_0_only(folder):
    made = []
    best = Path(f"{folder}/best{job().rank}.keras")
    csv = Path(f"{folder}/log{job().rank}.csv")

    class Checkpoint(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            made.append(epoch)
            super().on_epoch_end(epoch, logs)
            self.model.optimizer.learning_rate = 0.01

    class Log(keras.callbacks.CSVLogger):
        pass

    model = compiled(dense())
    train(model, epochs=2, callbacks=[Checkpoint(str(best), monitor="loss"), Log(str(csv))])
    assert made == [0, 1], "what the user has made of it runs everywhere"
    assert best.exists() == csv.exists() == (job().rank == 0)
    keras_hpc.check_replicas(model)


@enough_on("torch")
def test_reporters_run_on_rank_0_only():
    seen = []

    class Reporter(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(type(self).__module__)

    kinds = [type("TqdmCallback", (Reporter,), {"__module__": f"{package}.keras"}) for package in ("tqdm", "wandb")]
    own = type("Own", (Reporter,), {"__module__": "script"})
    only = keras_hpc.callbacks.RootOnly(type("Plot", (Reporter,), {"__module__": "plot"})())
    train(compiled(dense()), callbacks=[*(kind() for kind in kinds), own(), only])
    assert seen == (["tqdm.keras", "wandb.keras", "script", "plot"] if job().rank == 0 else ["script"])


@enough_on("torch")
def test_a_model_that_all_ranks_save_is_whole_and_there(folder):
    model = compiled(dense())
    train(model)
    for _ in range(5):
        model.save(f"{folder}/all.keras")
        assert_close(values(keras.models.load_model(f"{folder}/all.keras")), values(model), 0)
        model.save_weights(f"{folder}/all.weights.h5")
        model.load_weights(f"{folder}/all.weights.h5")
        keras.saving.save_model(model, f"{folder}/other.keras")
        keras.models.load_model(f"{folder}/other.keras")
    for _ in range(2):  # the first tells each rank that all have come, the second that all know
        keras_hpc.barrier()
    written = {path.name for path in Path(folder).iterdir()}
    assert written == {"all.keras", "all.weights.h5", "other.keras"}, "nothing half-written is left, and no mark"


@enough_on("torch")
def test_a_model_that_cannot_be_saved_is_an_error_on_all_ranks(folder):
    model = compiled(dense())
    model.build((None, 6))
    with pytest.raises(OSError, match="No such file"):
        model.save(f"{folder}/no-such-folder/model.keras")


@enough_on("torch")
def test_checkpoint_within_an_epoch_does_not_hang(folder):
    checkpoint = keras.callbacks.ModelCheckpoint(f"{folder}/step.weights.h5", save_weights_only=True, save_freq=3)
    train(normalized(), callbacks=[checkpoint])


@enough_on("torch")
def test_progress_is_shown_by_rank_0_only(capsys):
    model = compiled(dense())
    model.fit(Parts(*data()), epochs=1, verbose=2)
    model.evaluate(Parts(*data()), verbose=2)
    shown = "loss" in capsys.readouterr().out
    assert shown == (job().rank == 0)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "on_train_batch_end"])
@enough_on("torch")
def test_one_rank_stops_all(hook):
    class Stop(keras.callbacks.Callback):
        pass

    def stop(self, index, logs=None):
        if index == 2:
            self.model.stop_training = True

    setattr(Stop, hook, stop)
    model = compiled(dense())
    last = job().rank == job().size - 1
    history = train(model, epochs=5, callbacks=[Stop()] if last else [])
    assert history.epoch == ([0] if hook == "on_train_batch_end" else [0, 1, 2])
    steps = {"on_epoch_begin": 17, "on_epoch_end": 24, "on_train_batch_end": 3}[hook]
    assert int(model.optimizer.iterations) == steps
    assert_identical(values(model))


@enough_on("torch")
def test_early_stopping_and_plateau_agree():
    model = compiled(dense())
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.5),
    ]
    history = train(model, epochs=12, validation_data=Parts(*data()), callbacks=callbacks)
    results = everyone([len(history.epoch), float(model.optimizer.learning_rate), history.history])
    assert all(json.dumps(result) == json.dumps(results[0]) for result in results)
    assert_identical(values(model))


@enough_on("torch")
def test_warmup():
    class Rates(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rates = []

        def on_train_batch_end(self, batch, logs=None):
            if hasattr(self.model, "jax_state_sync"):
                self.model.jax_state_sync()
            self.rates.append(float(self.model.optimizer.learning_rate))

    rates = Rates()
    model = compiled(dense(), optimizer=keras.optimizers.SGD(0.02))
    train(model, epochs=3, callbacks=[keras_hpc.callbacks.LearningRateWarmup(epochs=2, scale=5), rates])
    expected = 0.02 * (1 + 4 * np.minimum(1, np.arange(1, 25) / 16))
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-5)
    assert_identical(values(model))
    scheduled = compiled(dense(), optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)))
    warmup = keras_hpc.callbacks.LearningRateWarmup(1)
    with pytest.raises(ValueError, match="schedule"):
        train(scheduled, callbacks=[warmup])
    for arguments in ((float("nan"),), (1, float("inf"))):
        with pytest.raises(ValueError, match=r"Received: .*=(nan|inf)"):
            keras_hpc.callbacks.LearningRateWarmup(*arguments)


@enough_on("torch")
def test_accumulated_gradients_survive_a_second_fit():
    def make():
        return compiled(dense(), optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))

    def alone():
        model = make()
        for _ in range(2):
            model.fit(Parts(*data(), whole=True), epochs=1, shuffle=False, verbose=0)
        return values(model)

    expected = on_one_rank(alone)
    model = make()
    for _ in range(2):
        train(model)  # 8 steps: each ends between two updates
    assert_close(values(model), expected, 3e-6)
    keras_hpc.check_replicas(model)


@enough_on("torch")
def test_different_models_are_refused():
    if job().size == 1:
        pytest.skip("needs two ranks")
    keras.utils.set_random_seed(1)
    width = 5 if job().rank == 0 else 6
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(width), keras.layers.Dense(3)])
    with pytest.raises(keras_hpc.PlanMismatchError, match=r"kernel.*5"):
        train(compiled(model))


@enough_on("torch")
def test_other_names_are_not_other_models():
    if job().rank == 0:
        dense()  # so that Keras numbers the layers of rank 0 differently
    layers = [keras.layers.Dense(4), keras.layers.Dense(3)]
    train(compiled(keras.Sequential([keras.Input((6,)), *layers])))
