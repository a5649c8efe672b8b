# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""Each kind of data reaches the ranks whole: every sample once an epoch, in the order of one rank, in as many steps."""

import contextlib
import itertools
import time

import keras
import numpy as np
import pytest
from data_cases import (
    SAMPLES,
    Batches,
    X,
    Y,
    _job,
    batches,
    mode,
    opened,
    rows_of_all,
    steps_of_all,
    visits_each_once,
)
from keras_cases import enough, enough_on, everyone, job

import keras_hpc
from keras_hpc.keras_hooks.data.arrays import ShardedArrays
from keras_hpc.keras_hooks.data.partition import Shard

# Each of the sources has a backend of its own here; check_data_fit.py has JAX train with them.
RANKS = {"tensorflow": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}


def tensors(array):
    return keras.ops.convert_to_tensor(array)


def frame(array):
    return pytest.importorskip("pandas").DataFrame(array, columns=["a", "b", "c"])


def torch_tensor(array):
    return pytest.importorskip("torch").tensor(array)


def sparse(array):
    return pytest.importorskip("scipy.sparse").csr_matrix(array)


KINDS = {"numpy": lambda a: a, "tensor": tensors, "pandas": frame, "torch": torch_tensor, "scipy": sparse}


@pytest.mark.parametrize("shuffle", [True, *enough([False, "batch"], "torch")])
@pytest.mark.parametrize("kind", ["tensor", *enough(["scipy", "numpy", "pandas", "torch"], "torch")])
def test_ranks_together_hold_the_batches_of_one_rank(kind, shuffle, mode):
    x = KINDS[kind](X)
    adapter = opened(x, Y, batch_size=5, shuffle=shuffle)
    one = ShardedArrays(Shard(0, 1), x, Y, None, None, 5 * job().size if mode == "local" else 5, None, shuffle)
    one.seed = adapter.seed
    for _epoch in range(2):
        reference = batches(one)
        for leaf in (0, 1):
            adapter.passes.next = one.passes.next - 1
            steps = steps_of_all(adapter, leaf=leaf)
            assert len(steps) == len(reference) == adapter.num_batches
            for ranks, whole in zip(steps, reference, strict=True):
                np.testing.assert_array_equal(np.concatenate(ranks), keras.tree.flatten(whole)[leaf])
                counts = [len(rows) for rows in ranks]
                assert max(counts) - min(counts) <= 1


def test_nested_structures_weights_and_class_weights(mode):
    x = {"a": X, "b": [Y, Y + 100]}
    adapter = opened(x, [Y, Y + 1], sample_weight=np.linspace(0, 1, SAMPLES), batch_size=4, shuffle=True)
    for x_batch, y_batch, weights in batches(adapter):
        np.testing.assert_array_equal(x_batch["a"], X[y_batch[0]])
        np.testing.assert_array_equal(x_batch["b"][1], y_batch[0] + 100)
        np.testing.assert_array_equal(y_batch[1], y_batch[0] + 1)
        np.testing.assert_allclose(weights[0], y_batch[0] / (SAMPLES - 1), atol=1e-6)
    for _x, y_batch, weights in batches(opened(X, Y % 2, class_weight={0: 1.0, 1: 3.0}, batch_size=4)):
        np.testing.assert_array_equal(weights, np.where(y_batch, 3, 1))


def test_shuffling_follows_the_users_seed_and_the_epoch():
    def epochs():
        np.random.seed(job().rank)  # ranks need not agree on their own
        if job().rank == 0:
            keras.utils.set_random_seed(5)
        adapter = opened(X, Y, batch_size=4, shuffle=True)
        return [rows_of_all(adapter).tolist() for _ in range(3)]

    first = epochs()
    assert first == epochs()
    assert first[0] != first[1] != first[2] != first[0]
    again = opened(X, Y, batch_size=4, shuffle=True)
    assert rows_of_all(again).tolist() not in first


def test_a_batch_looked_at_on_one_rank_does_not_shift_its_order():
    adapter = opened(X, Y, batch_size=4, shuffle=True)
    if job().rank == 0 and keras.backend.backend() == "jax":  # builds its model from a batch
        next(adapter.get_jax_iterator())
    assert visits_each_once(rows_of_all(adapter))


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_fewer_samples_than_ranks(samples, mode):
    adapter = opened(X[:samples], Y[:samples], batch_size=32)
    assert adapter.num_batches == 1
    assert visits_each_once(rows_of_all(adapter), samples)
    assert batches(adapter)[0][0].shape[1:] == (3,)


def test_batch_size_from_steps(mode):
    adapter = opened(X, Y, steps_per_epoch=4)
    assert adapter.num_batches == 4
    assert visits_each_once(rows_of_all(adapter))


def dataset(rows=8, known=True):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return (data if known else data.filter(lambda x, y: True)).batch(rows)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rows", [8, *enough([1, 40], "tensorflow")])
def test_tf_dataset(rows, known, mode):
    data = dataset(rows, known)
    adapter = opened(data)
    for _epoch in range(2):
        steps = steps_of_all(adapter)
        np.testing.assert_array_equal(np.concatenate([np.concatenate(s) for s in steps]), Y)
        count = -(-SAMPLES // rows)
        assert len(steps) == (-(-count // job().size) if mode == "local" else count)
        first = min(rows, SAMPLES)
        assert max(len(part) for part in steps[0]) == (first if mode == "local" else -(-first // job().size))


def test_a_tf_dataset_whose_order_is_that_of_time(mode):
    tf = pytest.importorskip("tensorflow")

    def wait(row):
        return time.sleep(0.05 * (row % 4 == 3 - job().rank)) or (X[row], Y[row])  # each rank for other rows

    data = tf.data.Dataset.range(SAMPLES).map(lambda r: tf.numpy_function(wait, [r], [X.dtype, Y.dtype], True), 4)
    options = tf.data.Options()
    options.deterministic = False
    data = data.map(lambda x, y: (tf.reshape(x, (3,)), tf.reshape(y, ()))).with_options(options).batch(1)
    assert visits_each_once(rows_of_all(opened(data)))


def test_tf_dataset_without_end(mode):
    rows = rows_of_all(opened(dataset(37).repeat(), steps_per_epoch=4), limit=4)
    assert len(rows) == 4 * SAMPLES * (job().size if mode == "local" else 1)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow must be there before init()")
def test_each_rank_has_a_file_of_its_own_where_a_pipeline_is_cached(mode, tmp_path):
    path = str(keras_hpc.broadcast_object(str(tmp_path)))
    adapter = opened(dataset().cache(path + "/rows"))
    for _epoch in range(2):  # the second one is read from the file
        assert visits_each_once(rows_of_all(adapter))
    cache = type(dataset()).cache
    shared = getattr(cache, "__wrapped__", cache)(dataset(), path + "/shared")
    with pytest.raises(ValueError, match="import tensorflow") if job().size > 1 else contextlib.nullcontext():
        opened(shared)


def test_looking_at_a_first_batch_reads_no_other_ones(mode):
    """Keras does so to build a model. Of what fills a `cache()`, shuffles or draws from NumPy, ranks read the same."""
    tf = pytest.importorskip("tensorflow")
    read = []

    def stream():
        for row in X:
            read.append(row)
            yield row

    data = tf.data.Dataset.from_generator(stream, output_signature=tf.TensorSpec((3,))).batch(1)
    adapter = opened(data.prefetch(2))
    with adapter.looked_at():
        batches(adapter, limit=1)
        time.sleep(0.2)  # for whoever reads ahead
    assert len(read) == 1


def test_tf_dataset_of_ragged_and_sparse_tensors_and_dicts(mode):
    tf = pytest.importorskip("tensorflow")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("ragged tensors are TensorFlow's")
    ragged = tf.ragged.constant([[i] * (1 + i % 3) for i in range(SAMPLES)])
    data = tf.data.Dataset.from_tensor_slices({"a": ragged, "b": tf.sparse.from_dense(X), "y": Y}).batch(8)
    seen = everyone(batches(opened(data)))
    assert len({len(steps) for steps in seen}) == 1
    rows = [batch for step in zip(*seen, strict=True) for batch in step]
    np.testing.assert_array_equal(np.concatenate([b["y"] for b in rows]), Y)
    np.testing.assert_array_equal(np.concatenate([b["b"] for b in rows]), X)
    np.testing.assert_array_equal(np.concatenate([b["a"][:, 0] for b in rows if len(b["a"])]), Y)


def test_unbatched_tf_dataset_is_refused():
    if job().size > 1:
        with pytest.raises(ValueError, match="must be batches"):
            opened(dataset().unbatch())


def test_unseeded_shuffle_is_noticed(caplog, monkeypatch):
    import logging

    monkeypatch.setattr(logging.getLogger("keras_hpc"), "propagate", True)
    tf = pytest.importorskip("tensorflow")
    tf.random.set_seed(1)
    data = dataset().unbatch().shuffle(100).batch(5)  # the global seed of TensorFlow is enough
    assert visits_each_once(rows_of_all(opened(data)))
    assert "without a seed" not in caplog.text
    from tensorflow.python.eager import context

    context.context()._set_global_seed(None)
    opened(dataset().unbatch().shuffle(100).batch(5))
    assert ("without a seed" in caplog.text) == (job().rank == 0 and job().size > 1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("read_by", ["", *enough(["threads"], "torch"), *enough(["processes"], "tensorflow")])
def test_py_dataset(read_by, shuffle, mode):
    options = {"threads": {"workers": 3}, "processes": {"workers": 2, "use_multiprocessing": True}}.get(read_by, {})
    if read_by == "processes" and (shuffle or mode == "global" or keras.backend.backend() != "tensorflow"):
        pytest.skip("slow, the same as with threads, and JAX warns of every fork, also beside PyTorch")
    data = Batches(**options)
    adapter = opened(data, shuffle=shuffle)
    orders = []
    for _epoch in range(2):
        adapter.on_epoch_begin()
        orders.append(rows_of_all(adapter))
        adapter.on_epoch_end()
    assert all(map(visits_each_once, orders))
    assert (orders[0] == orders[1]).all() != shuffle
    assert shuffle or (orders[0] == Y).all()
    assert data.ended == 2
    assert adapter.num_batches == (-(-5 // job().size) if mode == "local" else 5)


def merged_graphs(kind):
    """Two batches: of each four graphs with three nodes each, in one graph."""
    batch = {"nodes": np.zeros((12, 2)), "graph": np.repeat(np.arange(4), 3)}, np.zeros(4)

    class Graphs(keras.utils.PyDataset):
        num_batches = 2

        def __getitem__(self, index):
            return batch

    if kind == "PyDataset":
        return Graphs()
    if kind == "generator":
        return iter([batch, batch])
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensors(batch).repeat(2)
    if kind == "tf.data":
        return data
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), data.element_spec)
    return tf.data.Dataset.from_generator(lambda: iter([batch, batch]), output_signature=spec)


@pytest.mark.parametrize("kind", ["PyDataset", "generator", *enough(["tf.data", "tf.data unknown"], "tensorflow")])
def test_batches_with_other_numbers_of_rows_are_dealt_or_refused(kind, mode):
    def read():
        return [len(y) for _, y in batches(opened(merged_graphs(kind), steps_per_epoch=2))]

    if mode == "local" or job().size == 1:
        assert np.sum(everyone(sum(read()))) == 8
    else:
        with pytest.raises(Exception, match="a row for each sample"):
            read()


def test_endless_py_dataset(mode):
    class Endless(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, index):
            return X[:3], np.full(3, index)

    rows = rows_of_all(opened(Endless(), steps_per_epoch=4), limit=4)
    np.testing.assert_array_equal(np.unique(rows), np.arange(4 * (job().size if mode == "local" else 1)))


def loader(**kwargs):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(data, **{"batch_size": 8, **kwargs})


@enough_on("torch")
@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_data_loader(shuffle, mode):
    adapter = opened(loader(shuffle=shuffle))
    orders = [rows_of_all(adapter) for _ in range(2)]
    assert all(map(visits_each_once, orders))
    assert (orders[0] == orders[1]).all() != shuffle
    assert adapter.num_batches == (-(-5 // job().size) if mode == "local" else 5)


@enough_on("torch")
def test_epochs_of_a_single_step_take_other_samples(mode):
    """Each epoch marks the samples of its only step in the weights: input i is one in sample i alone."""
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.eye(SAMPLES), torch.ones(SAMPLES, 1))
    batch = 32 // job().size if mode == "local" else 32
    dropping = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    weights = [np.zeros((SAMPLES, 1))]
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: weights.append(model.get_weights()[0]))
    model.fit(dropping, epochs=3, verbose=0, callbacks=[keep])
    taken = [tuple(np.flatnonzero(after != before)) for before, after in itertools.pairwise(weights)]
    step = batch * job().size if mode == "local" else batch
    assert [len(samples) for samples in taken] == [step] * 3
    assert len(set(taken)) == 3


@enough_on("torch")
def test_torch_loader_of_a_stream(mode):
    torch = pytest.importorskip("torch")

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(torch.tensor(X), torch.tensor(Y), strict=True)

    adapter = opened(torch.utils.data.DataLoader(Stream(), batch_size=8))
    assert adapter.num_batches is None
    np.testing.assert_array_equal(rows_of_all(adapter), Y)


@enough_on("torch")
def test_loader_with_a_distributed_sampler_is_left_alone():
    torch = pytest.importorskip("torch")
    given = loader()
    sampler = torch.utils.data.DistributedSampler(given.dataset, num_replicas=job().size, rank=job().rank)
    adapter = opened(loader(sampler=sampler))
    assert type(adapter).__module__.startswith("keras.")
    assert sum(len(batch[1]) for batch in batches(adapter)) == -(-SAMPLES // job().size)


def test_local_and_shard_false_leave_data_alone(monkeypatch):
    with keras_hpc.local():
        assert type(opened(X, Y)).__module__.startswith("keras.")
    monkeypatch.setattr(job(), "shard", False)
    assert type(opened(X, Y)).__module__.startswith("keras.")
    assert type(opened((X, Y) for _ in range(2))).__module__.startswith("keras.")


def test_generators_are_dealt():
    def batches():
        for start in range(0, SAMPLES, 5):  # 8 batches, the last with 2 samples
            yield X[start : start + 5], Y[start : start + 5]

    adapter = opened(batches())
    seen = [int(y) for _, labels in adapter.get_numpy_iterator() for y in np.asarray(labels)]
    of_rank = everyone(seen)
    assert sorted(y for theirs in of_rank for y in theirs) == list(range(SAMPLES))
    assert job().size == 1 or of_rank[0][:5] == [0, 1, 2, 3, 4]


def test_an_endless_generator_goes_on_where_an_epoch_ended():
    def forever():
        for number in itertools.count():
            yield np.full((4, 2), number, "float32"), np.zeros((4, 1), "float32")

    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(logs["loss"]))

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    model.fit(forever(), steps_per_epoch=3, epochs=2, verbose=0, callbacks=[Watch()])
    assert len(seen) == 6
    keras_hpc.check_replicas(model)


def test_generators_are_read_no_further_than_used():
    taken = []

    def forever():
        for number in itertools.count():
            taken.append(number)
            yield np.full((4, 2), number, "float32"), np.zeros((4, 1), "float32")

    stream = forever()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    model.fit(stream, steps_per_epoch=4, epochs=2, validation_data=stream, validation_steps=1, verbose=0)
    model.predict(stream, steps=2, verbose=0)
    time.sleep(0.2)  # for a prefetch, which would now read more
    assert job().size == 1 or len(taken) == job().size * (8 + 2) + 2
