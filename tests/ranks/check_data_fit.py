# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""`fit`, validation, `evaluate` and `predict` on data that keras_hpc shares out; what is said and what is refused."""

import logging
import random

import keras
import numpy as np
import pytest
from checkpoint_cases import only_on
from data_cases import Batches, _job, mode, opened
from keras_cases import BATCH, SAMPLES, assert_like_one_rank, data, dense, enough, everyone, job, values

import keras_hpc

# JAX reads data in a way of its own, so does PyTorch; check_data.py has the batches of TensorFlow.
RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}

TIMEOUT = 400


@pytest.fixture
def notices(caplog, monkeypatch):
    """What rank 0 says to the user."""
    monkeypatch.setattr(logging.getLogger("keras_hpc"), "propagate", True)
    caplog.set_level(logging.INFO, "keras_hpc")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "keras_hpc"]


def compiled(model=dense, **kwargs):
    def make():
        made = model()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        made.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], **kwargs)
        return made

    return make


def in_order(epochs=2, **kwargs):
    """Trains on arrays as they are; on one rank alone with the batch of all ranks."""
    x, y = data()

    def train(model, whole):
        scale = job().size if whole and job().batch == "local" else 1
        options = {"batch_size": BATCH * scale, "shuffle": False, "verbose": 0, "epochs": epochs, **kwargs}
        history = model.fit(x, y, **options).history
        return history, model.evaluate(x, y, batch_size=31, verbose=0, return_dict=True)

    return train


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validation_split": 0.2},
        {"validation_data": data(samples=41), "validation_batch_size": 7},
        {"sample_weight": np.linspace(0, 2, SAMPLES)},
        *enough([{"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}, {"batch_size": 3, "epochs": 1}]),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_fit_and_evaluate_of_arrays_are_those_of_one_rank(options, mode):
    if mode == "local" and options and "validation_split" not in options:
        pytest.skip("the same in both modes, or about the global batch")
    assert_like_one_rank(compiled(), in_order(**options))


def test_steps_per_epoch_continue_through_the_data(monkeypatch):
    monkeypatch.setattr(job(), "batch", "global")
    assert_like_one_rank(compiled(), in_order(epochs=3, steps_per_epoch=4))


class Noting(keras.layers.Layer):
    """Notes the first number of each sample that is trained on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x, training=False):
        if training and hasattr(x, "tolist"):
            self.seen += x[:, 0].tolist()
        return x


@only_on("torch")  # where layers see values
def test_a_pass_over_files_keeps_its_order(monkeypatch, tmp_path):
    """Over several epochs, and while somebody else reads the same."""
    monkeypatch.setattr(job(), "batch", "global")
    path = keras_hpc.broadcast_object(str(tmp_path / "data.npz"))
    if keras_hpc.rank() == 0:
        np.savez(path, x=np.arange(180, dtype="float32")[:, None], y=np.zeros((180, 1), "float32"))
    keras_hpc.barrier()
    files = keras_hpc.data.Dataset(path, 5, fields=("x", "y"), block=4)
    noting = Noting()
    model = keras.Sequential([keras.Input((1,)), noting, keras.layers.Dense(1)])
    model.compile("sgd", "mae")

    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                self.model.evaluate(files, verbose=0)

    model.fit(files, epochs=4, steps_per_epoch=18, verbose=0, callbacks=[Evaluate()])
    seen = sorted(number for part in everyone(noting.seen) for number in part)
    assert seen == sorted([*range(180), *range(180)])


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras refuses several steps per execution on PyTorch")
def test_steps_per_execution(monkeypatch):
    monkeypatch.setattr(job(), "batch", "global")

    def train(model, whole):
        in_order()(model, whole)  # Keras logs less often then

    assert_like_one_rank(compiled(steps_per_execution=3), train)


class Watching(keras.callbacks.Callback):
    """Counts steps."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(batch)


@pytest.mark.parametrize("kind", ["tf.data", "PyDataset", "DataLoader"])
def test_other_sources_train_like_one_rank(kind, monkeypatch):
    monkeypatch.setattr(job(), "batch", "global")
    x, y = data()

    def source():
        if kind == "tf.data":
            tf = pytest.importorskip("tensorflow")
            return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        if kind == "DataLoader":
            torch = pytest.importorskip("torch")
            tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
            return torch.utils.data.DataLoader(tensors, batch_size=BATCH)
        from keras_cases import Parts

        return Parts(x, y, whole=True)

    def train(model, whole):
        history = model.fit(source(), shuffle=False, verbose=0, epochs=2, validation_data=source()).history
        return history, model.evaluate(source(), verbose=0, return_dict=True)

    assert_like_one_rank(compiled(), train)


def test_tails_of_dealt_batches_are_weighted():
    """Seven batches on ranks that take one each: in the last step some have none."""
    x, y = data(samples=7 * 8)
    p = job().size

    class Source(keras.utils.PyDataset):
        def __init__(self, rows):
            super().__init__()
            self.rows = rows

        def __len__(self):
            return -(-len(x) // self.rows)

        def __getitem__(self, index):
            part = slice(index * self.rows, (index + 1) * self.rows)
            return x[part], y[part]

    def train(model, whole):
        return model.fit(Source(8 * p if whole else 8), shuffle=False, verbose=0, epochs=2).history

    assert_like_one_rank(compiled(), train)


def test_shuffled_epochs_are_reproducible_and_all_ranks_step_together(mode):
    def run():
        keras.utils.set_random_seed(9)
        model, watching = compiled()(), Watching()
        x, y = data()
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[watching])
        return watching.steps, [v.tobytes() for v in values(model)]

    first = run()
    assert first == run()
    assert all(other == first for other in everyone(first))


def test_decisions_are_said_once_per_fit(mode, notices):
    x, y = data()
    model = compiled()()
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y))
    model.evaluate(x, y, verbose=0)
    said = [text for text in notices() if "samples" in text]
    p = job().size
    if job().rank == 0 and p > 1:
        batch = 16 * p if mode == "local" else 16
        assert len(said) == 1
        assert f"185 samples, about {-(-185 // p)} per rank, global batch {batch}" in said[0]
        assert f"{-(-185 // batch)} steps an epoch; {p} ranks" in said[0]
    else:
        assert not said


def two_headed():
    keras.utils.set_random_seed(4)
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    hidden = keras.layers.Concatenate()([a, b])
    return keras.Model(
        {"a": a, "b": b}, {"one": keras.layers.Dense(2)(hidden), "more": [keras.layers.Dense(3)(hidden)]}
    )


@pytest.mark.parametrize("samples", [37, 1])
@pytest.mark.parametrize("options", [{}, {"batch_size": 7}, {"steps": 2}, {"batch_size": 7, "steps": 2}], ids=str)
def test_predict_returns_everything_everywhere(samples, options):
    if samples == 1 and "steps" in options:
        pytest.skip("Keras warns that data ran out")
    x, _ = data(samples=samples)
    x = {"a": x, "b": x[::-1]}
    model = two_headed()
    model.compile(steps_per_execution=3 if len(options) == 2 and keras.backend.backend() != "torch" else 1)
    ours = model.predict(x, verbose=0, **options)
    with keras_hpc.local():
        expected = model.predict(x, verbose=0, **options)
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), ours, expected)
    bits = [leaf.tobytes() for leaf in keras.tree.flatten(ours)]
    assert all(other == bits for other in everyone(bits))


def test_predict_of_batches_is_computed_everywhere():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with keras_hpc.local():
        expected = model.predict(Batches(), verbose=0)
    np.testing.assert_array_equal(model.predict(Batches(), verbose=0), expected)


def test_predict_of_a_model_whose_outputs_are_not_rows():
    class Total(keras.Model):
        def call(self, x):
            return keras.ops.sum(x, axis=0, keepdims=True)

    x, _ = data(samples=64)
    model = Total()
    np.testing.assert_allclose(model.predict(x, batch_size=16, verbose=0).shape, (4, 6))


def test_inside_local_data_are_whole():
    x, y = data()
    seen = []
    watching = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    with keras_hpc.local():
        compiled()().fit(x, y, batch_size=37, epochs=1, verbose=0, callbacks=[watching])
    assert seen == [0, 1, 2, 3, 4]


def test_ranks_with_different_data_are_named():
    x, y = data(samples=20 + job().rank)
    if job().size == 1:
        return
    others = ", ".join(map(str, range(1, job().size)))
    with pytest.raises(ValueError, match=rf"not on rank\(s\) {others}.*shard=False"):
        compiled()().fit(x, y, verbose=0)


def test_a_refusal_on_one_rank_reaches_all():
    x, y = data(samples=20)
    last = job().rank == job().size - 1
    message = "cardinality is ambiguous" if last else f"refused on rank {job().size - 1}: Data cardinality"
    with pytest.raises(ValueError, match=message):
        compiled()().fit(x, y[:-1] if last else y, verbose=0)


def test_empty_data_are_refused():
    with pytest.raises(ValueError, match="empty data set"):
        opened(np.zeros((0, 3)), np.zeros(0))


def test_same_shapes_with_other_contents_are_noticed(notices):
    opened(np.full((20, 3), job().rank), np.zeros(20))
    assert any("different contents" in text for text in notices()) == (job().rank == 0 and job().size > 1)


class Windows(keras.utils.PyDataset):
    """Draws the rows of a batch when it is read, whatever its number."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drawn = []

    def __len__(self):
        return 8

    def __getitem__(self, index):
        rows = np.random.randint(SAMPLES, size=6)
        self.drawn.append([*rows.tolist(), random.random()])
        x, y = data()
        return x[rows], y[rows]


def rows_of_all(drawn):
    """What ranks have drawn, once the first batch was read to compare them."""
    return [str(rows) for theirs in everyone(drawn) for rows in theirs[1:]]


@pytest.mark.parametrize("options", [{}, {"workers": 2}], ids=["in turn", "by threads"])
@pytest.mark.parametrize("mode", ["local"], indirect=True)
def test_batches_that_are_drawn_when_they_are_read_differ_by_rank(options, mode):
    keras.utils.set_random_seed(3)
    source = Windows(**options)
    compiled()().fit(source, epochs=2, shuffle=False, verbose=0)
    assert len(set(rows_of_all(source.drawn))) >= 16  # TensorFlow reads more, for their shapes
    assert len(set(everyone(np.random.random()))) == 1


def test_batches_of_a_loop_that_are_drawn_when_they_are_read_differ_by_rank():
    keras.utils.set_random_seed(3)
    source = Windows()
    for _ in range(2):
        part = keras_hpc.shard(source)
        assert len([part[index] for index in range(len(part))]) == 8 // job().size
    found = rows_of_all([[], *source.drawn])
    assert len(set(found)) == len(found)
    assert len(set(everyone(np.random.random()))) == 1


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="sees samples in layers")
@pytest.mark.parametrize("processes", [2, *enough([0])])
def test_samples_that_are_drawn_when_they_are_read_differ_by_rank(processes, mode):
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            numbers = [np.random.random(), random.random(), float(torch.rand(()))]
            return np.float32([*numbers, index, 0, 0]), np.int64(0)

    class Seeing(keras.layers.Layer):
        def call(self, x):
            if hasattr(x, "numpy"):
                seen.extend(x.numpy()[:, :4].tolist())
            return x

    seen = []
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), Seeing(), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    seen.clear()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=processes)
    model.fit(loader, epochs=2, verbose=0)
    rows = np.array([row for theirs in everyone(seen) for row in theirs])
    rows = rows[(rows[:, 0] > 0) & (rows[:, 0] < 1) & (rows[:, 3] % 1 == 0)]  # others have built or tried the model
    for column in range(3):
        assert len(np.unique(rows[:, column])) == len(rows)
    assert sorted(rows[:, 3].tolist()) == sorted([*range(16)] * 2)


def test_a_loader_goes_on_at_a_step_of_several_virtual_ranks():
    torch = pytest.importorskip("torch")
    from keras_hpc.keras_hooks.data.partition import Shard
    from keras_hpc.keras_hooks.data.torch_loaders import _Part

    loader = torch.utils.data.DataLoader(torch.arange(24), batch_size=6)
    part = _Part(loader, Shard(1, 4, "global", turns=2))
    batches = [batch.tolist() for batch in part]
    part.passes.next, part.passes.first = 0, 2  # steps
    assert len(batches) == 8
    assert [batch.tolist() for batch in part] == batches[4:]


def test_a_tf_dataset_without_an_order_is_named(notices):
    tf = pytest.importorskip("tensorflow")
    opened(tf.data.Dataset.range(9).batch(3).map(lambda row: row, num_parallel_calls=2, deterministic=False))
    named = [text for text in notices() if "deterministic=False" in text]
    assert len(named) == (job().size > 1 and job().rank == 0)
