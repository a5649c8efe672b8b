# SPDX-License-Identifier: Apache-2.0
"""Pipelines of TensorFlow that repeat a shuffle: how far a rank reads ahead must not change what is read next."""

import keras
import numpy as np
import pytest
from keras_cases import enough, enough_on, everyone, job

tf = pytest.importorskip("tensorflow")
RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}
SAMPLES = 23
X = np.arange(SAMPLES, dtype="float32")[:, None]
pytestmark = pytest.mark.usefixtures("global_batches")


class Seen(keras.metrics.Metric):
    """Counts how often each sample came."""

    def __init__(self):
        super().__init__(name="seen")
        self.times = self.add_weight(shape=(SAMPLES,), initializer="zeros", name="times")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.times.assign_add(keras.ops.sum(keras.ops.one_hot(keras.ops.cast(y_true[:, 0], "int32"), SAMPLES), 0))

    def result(self):
        return keras.ops.sum(self.times)


class Notes(keras.callbacks.Callback):
    def __init__(self, metric):
        super().__init__()
        self.metric, self.found = metric, []

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(keras.ops.convert_to_numpy(self.metric.times).tolist())


def repeated(batch, ahead):
    times = None if ahead else 20  # endless, or more than anybody reads
    dataset = tf.data.Dataset.from_tensor_slices((X, X)).shuffle(SAMPLES, seed=3).repeat(times).batch(batch)
    return dataset.prefetch(4) if ahead else dataset


def compiled():
    model, seen = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), Seen()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[seen])
    model.train_on_batch(X[:2], X[:2])  # Keras builds metrics from the first batch, which it would read twice
    return model, seen


def validated(batch, ahead):
    model, seen = compiled()
    notes = Notes(seen)
    x = np.zeros((4, 1), "float32")
    model.fit(x, x, validation_data=repeated(batch, ahead), validation_steps=2, epochs=4, verbose=0, callbacks=[notes])
    return notes.found


def trained(batch, ahead):
    model, seen = compiled()
    notes, dataset = Notes(seen), repeated(batch, ahead)
    for epoch in range(4):
        options = {"initial_epoch": epoch, "epochs": epoch + 1} if epoch % 2 else {"epochs": 1}
        model.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0, callbacks=[notes], **options)
    return notes.found


def read(batch, passes):
    """What they are without Keras, where nothing reads ahead: what plain Keras reads ahead moves its own order."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    dataset = repeated(batch, False).take(2).with_options(options)
    orders = [np.concatenate([x[:, 0].numpy() for x, _ in dataset]).astype(int) for _ in range(passes)]
    return [np.bincount(order, minlength=SAMPLES).tolist() for order in orders]


@pytest.mark.parametrize("batch", [12, *enough([7])])  # two of them are less than all samples, or more
@pytest.mark.parametrize(
    ("run", "ahead"),
    [
        (validated, True),
        (trained, False),
        *(pytest.param(*case, marks=enough_on()) for case in ((validated, False), (trained, True))),
    ],
)
def test_new_passes_begin_where_ranks_have_needed_no_more(run, ahead, batch):
    if job().size == 1:
        pytest.skip("plain Keras reads ahead by chance")
    found = run(batch, ahead)
    assert found == read(batch, len(found))


def test_what_may_read_ahead_behind_repeat_is_named(caplog):
    model, _ = compiled()
    with caplog.at_level("WARNING", "keras_hpc"):
        model.evaluate(repeated(7, True), steps=2, verbose=0)
        last = tf.data.Dataset.from_tensors((X, X)).shuffle(2).map(lambda x, y: (x, y)).repeat()
        model.fit(last, steps_per_epoch=2, shuffle=False, verbose=0)
        assert "behind `repeat`" not in caplog.text
        model.evaluate(repeated(7, True).map(lambda x, y: (x, y)), steps=2, verbose=0)
    said = caplog.text.count("may begin another order")
    assert everyone(said) == [int(rank == 0 and job().size > 1) for rank in range(job().size)]
