# SPDX-License-Identifier: Apache-2.0
"""Models in parts with teams, late gradients, data that ranks read themselves, and compiled steps."""

import inspect

import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import assert_identical, enough, enough_on, on_one_rank, values
from spatial_cases import norm, ranks

import keras_hpc
from keras_hpc.spatial.geometry import Grid
from keras_hpc.tools import rehearsal
from keras_hpc.tools.alone import standing_in

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2, 4), "jax": (2, 4), "torch": (4,)}
TIMEOUT = 600


def init(**options):
    keras_hpc.init(batch="global", timeout_seconds=60, **options)


@pytest.fixture
def job(request):
    init(**request.param)
    yield
    keras_hpc.finalize()


with_teams = pytest.mark.parametrize("job", [{"spatial": 2, "teams": 2}], indirect=True)
reading = pytest.mark.parametrize("job", [{"spatial": 2, "shard": False}], indirect=True)


def network(**options):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((21, 6, 2))
    # Of kernels of 5 PyTorch computes the gradient for a single small image, too.
    x = layers.Conv2D(3, 5, strides=2, padding="same")(inputs)
    model = keras.Model(inputs, layers.Conv2D(1, 5, padding="same")(layers.ReLU()(norm()(x))))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


def samples(count=7):
    x = np.random.default_rng(0).normal(size=(count, 21, 6, 2)).astype("float32")
    return x, np.tanh(x[:, ::2, ::2, :1])


def fit(model):
    x, y = samples()
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0).history
    found = history["loss"], values(model)
    if not _alone():
        assert_identical(found[1])
    return found


def assert_close(found, expected):
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("job", [{"spatial": 2}], indirect=True)
@pytest.mark.parametrize("weighs", [False, True], ids=["", "weighted"])
def test_a_metric_that_ignores_a_class(job, weighs):
    if "ignore_class" not in inspect.signature(keras.metrics.SparseCategoricalCrossentropy).parameters:
        pytest.skip("an older Keras")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 21, 2)).astype("float32")
    y = rng.integers(0, 3, (5, 21))
    y[:, :9] = 0
    weight = rng.random((5, 21)).astype("float32") if weighs else None

    def evaluate():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((21, 2))
        model = keras.Model(inputs, layers.Conv1D(3, 3, padding="same", activation="softmax")(inputs))
        metric = keras.metrics.SparseCategoricalCrossentropy(ignore_class=0, name="metric")
        model.compile(
            "sgd", "sparse_categorical_crossentropy", **{"weighted_metrics" if weighs else "metrics": [metric]}
        )
        found = model.evaluate(x, y, sample_weight=weight, batch_size=4, verbose=0, return_dict=True)
        return [found["loss"], found["metric"]]

    expected = on_one_rank(evaluate)
    assert_close(evaluate(), expected)


@enough_on("torch")
def test_late_gradients_are_those_of_ranks_with_whole_samples():
    def train(**options):
        init(teams=2, **options)
        try:
            keras_hpc.configure_team(1, schedule="pipelined", synchronous_steps=2, cooldown_steps=1)
            model = network()
            keras_hpc.assign_team(model, 1)
            return fit(model)
        finally:
            keras_hpc.finalize()

    expected = train()
    assert_close(train(spatial=2), expected)
    assert_close(train(spatial=ranks()), expected)


@with_teams
@enough_on("torch")
def test_models_of_two_teams_train_in_turns(job):
    def train():
        first, second = network(), network()
        if keras_hpc.is_initialized():
            keras_hpc.assign_team(second, 1)
        x, y = samples(4)
        mine = slice(None) if _alone() else _of_group(4)
        losses = []
        for step in range(4):
            for model in (first, second)[step % 2 :]:
                losses.append(model.train_on_batch(x[mine], y[mine] + step))
        return [values(first), values(second)]

    expected = on_one_rank(train)
    found = train()
    for one, other in zip(found, expected, strict=True):
        assert_identical(one)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def _alone():
    from keras_hpc.job import current

    return current.is_local()


def _of_group(batch):
    begin, end = (-(-batch * g // keras_hpc.group_count()) for g in (keras_hpc.group(), keras_hpc.group() + 1))
    return slice(begin, end)


@with_teams
def test_a_team_has_all_ranks_and_no_local_steps(job):
    with pytest.raises(ValueError, match="a team has all ranks"):
        keras_hpc.configure_team(1, schedule="local", every=2)
    with pytest.raises(ValueError, match="a team has all ranks"):
        keras_hpc.configure_team(1, ranks=[0])


@pytest.mark.parametrize("job", [{"spatial": 2}], indirect=True)
def test_compiled_steps(job):
    if keras.backend.backend() == "torch":
        with pytest.raises(ValueError, match="Expected jit_compile=False"):
            network(jit_compile=True)
        return
    expected = on_one_rank(lambda: fit(network()))
    assert_close(fit(network(jit_compile=True)), expected)


class Batches(keras.utils.PyDataset):
    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return tuple(array[4 * index : 4 * index + 4] for array in self.arrays)


def _tensorflow_data(x, y, shuffled=False):
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return (data.shuffle(8, seed=1) if shuffled else data).batch(4)


def test_ranks_that_stand_in_for_a_group_compute_their_parts():
    """Of what others of the group would send, there are zeros; gradients are those of the ranks that are there."""
    init()
    with standing_in(Grid((3,)), keras_hpc.rank() + 1):
        model = keras.Sequential([keras.Input((33, 6, 2)), layers.Conv2D(3, 5, strides=2, padding="same")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        begin, end = keras_hpc.part(33)
        x = np.random.default_rng(0).normal(size=(2, 33, 6, 2)).astype("float32")
        found = keras.ops.convert_to_numpy(model(x))
        with keras_hpc.local():
            x[:, :begin] = x[:, end:] = 0
            expected = keras.ops.convert_to_numpy(model(x))
        begin, end = keras_hpc.part(17)
        np.testing.assert_allclose(found[:, begin:end], expected[:, begin:end], rtol=0, atol=1e-6)
        assert not found[:, :begin].any()
        assert not found[:, end:].any()
        before = values(model)
        rehearsal.step_of(model, 2)()
        assert np.abs(values(model)[0] - before[0]).max() > 0
        assert_identical(values(model))
    keras_hpc.finalize()


@reading
@pytest.mark.parametrize("source", ["arrays", *enough(["PyDataset", "shuffled"], "torch"), *enough(["tf.data"])])
@pytest.mark.parametrize("part", [False, *enough([True])], ids=["whole", "part"])
def test_what_ranks_read_themselves(job, source, part):
    make = {"arrays": lambda x, y: (x, y), "PyDataset": lambda x, y: (Batches(x, y),),
            "tf.data": lambda x, y: (_tensorflow_data(x, y),),
            "shuffled": lambda x, y: (_tensorflow_data(x, y, shuffled=True),)}[source]  # fmt: skip

    def train(x, y):
        model = network()
        size = {"batch_size": 4} if source == "arrays" else {}
        history = model.fit(*make(x, y), epochs=2, shuffle=False, verbose=0, **size).history
        return history["loss"], values(model)

    x, y = samples(8)
    expected = on_one_rank(lambda: train(x, y))
    rows, halves = slice(*keras_hpc.part(21)), slice(*keras_hpc.part(11))
    mine = (x[:, rows], y[:, halves]) if part else (x, y)
    assert_close(train(*mine), expected)
    others = [x + keras_hpc.rank(), y] if not part else [array[: 8 - keras_hpc.rank()] for array in mine]
    if not part or source == "arrays":
        with pytest.raises(ValueError, match="The ranks of a group compute the same samples"):
            train(*others)


@pytest.mark.parametrize("job", [{"spatial": 2}], indirect=True)
def test_channels_that_come_first_are_refused(job):
    """However few they are: their number is no number of rows. A model that is left whole is computed as ever."""
    for channels in (3, 16):
        given = keras.Sequential([keras.Input((channels, 36, 12)), layers.Conv2D(2, 3, data_format="channels_first")])
        with pytest.raises(ValueError, match="has its channels first; expected data_format='channels_last'"):
            given.compile("sgd", "mse")
    keras.config.set_image_data_format("channels_first")
    try:
        inputs = keras.Input((3, 36, 12))
        x = layers.Conv2D(4, 3, padding="same", activation="relu", name="one")(inputs)
        x = layers.BatchNormalization(axis=1, synchronized=True)(x)
        model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))
        with pytest.raises(ValueError, match=r"`one` \(Conv2D\).*set_image_data_format\('channels_last'\) before"):
            model.compile("sgd", "mse")
        assert not keras_hpc.partition(model, parts=1).is_split
    finally:
        keras.config.set_image_data_format("channels_last")
    if keras.backend.backend() == "tensorflow":
        return  # it has no such convolutions on CPUs
    x = np.random.default_rng(0).normal(size=(4, 3, 36, 12)).astype("float32")
    initial = values(model)

    def train():
        model.set_weights(initial)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, x[:, :2, 0, 0], batch_size=4, shuffle=False, verbose=0)
        return values(model)

    expected = on_one_rank(train)
    for a, b in zip(train(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
