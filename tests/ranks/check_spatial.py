# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""Groups of ranks that compute each sample together train, evaluate and predict as one rank does."""

import os

import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import assert_identical, enough, enough_on, on_one_rank, values
from mpi4py import MPI
from spatial_cases import (
    NETWORKS,
    assert_like_one_rank,
    bordered,
    centred,
    compiled,
    direct,
    even,
    grid,
    integers,
    masked,
    masked_at_once,
    masked_average,
    norm,
    pixels,
    ranks,
    samples,
    strided,
    ties,
    unet,
    volumes,
)

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2, 4)}
SOAK = {"tensorflow": (3, 4), "jax": (2, 3, 4), "torch": (3, 4)}
TIMEOUT = 900
TOLERANCE = 1e-5  # of the largest gradient


# Grids of two axes, which take four ranks, are tried by the other tests.
few_ranks = pytest.mark.skipif(
    MPI.COMM_WORLD.size > 3 and not os.environ.get("TESTS_SOAK"), reason="finds nothing more on four ranks"
)


def my_group(array, batch):
    """The rows of a batch that this rank's group computes."""
    begin, end = (-(-batch * g // keras_hpc.group_count()) for g in (keras_hpc.group(), keras_hpc.group() + 1))
    return array[begin:end]


def gradients(model, before):
    return [b - a for b, a in zip(before, values(model), strict=True)]


OTHERS = [
    pytest.param(network, marks=[enough_on("torch"), *([] if network is strided else [few_ranks])])
    for network in NETWORKS
    if network not in (unet, volumes)
]


@pytest.mark.parametrize("network", [*enough([unet], "torch"), *enough([volumes], "torch"), *OTHERS])
def test_a_step_has_the_gradients_of_one_rank(network, grid):
    if network is volumes and len(grid) > 2:
        pytest.skip("two axes are enough")

    def alone():
        model = compiled(network)
        x, y = samples(model, 4)
        before = values(model)
        loss = float(model.train_on_batch(x, y)[0])
        return loss, gradients(model, before), [w.path for w in model.weights]

    loss, expected, names = on_one_rank(alone)
    model = compiled(network)
    x, y = samples(model, 4)
    before = values(model)
    mine = float(model.train_on_batch(my_group(x, 4), my_group(y, 4))[0])
    assert keras_hpc.allreduce(mine) == pytest.approx(loss, rel=1e-5)
    largest = max(np.abs(g).max() for g, name in zip(expected, names, strict=True) if "moving" not in name)
    assert largest > 1e-2
    for name, found, want in zip(names, gradients(model, before), expected, strict=True):
        assert np.abs(found - want).max() <= TOLERANCE * largest, (name, np.abs(found - want).max(), largest)
    assert_identical(values(model))


@pytest.mark.parametrize("network", [*enough([strided], "torch", "jax"), *enough([unet], "torch")])  # mostly compiling
@enough_on("torch")
@few_ranks
def test_fit_evaluate_and_predict(network, grid, tmp_path):
    def train():
        model = compiled(network, optimizer=keras.optimizers.SGD(0.05, momentum=0.9), weighted_metrics=["accuracy"])
        x, y = samples(model, 7)
        weight = np.linspace(0.5, 2, y.size).reshape(y.shape).astype("float32")
        history = model.fit(x, y, sample_weight=weight, batch_size=4, epochs=2, shuffle=False, verbose=0,
                            validation_data=(x[:5], y[:5])).history  # fmt: skip
        scores = model.evaluate(x, y, batch_size=3, verbose=0)
        outputs = model.predict(x, batch_size=2, verbose=0)
        return {
            "history": history,
            "scores": scores,
            "outputs": outputs,
            "direct": np.array(direct(model, x[:2])),
        }, model

    expected, model = assert_like_one_rank(train, of_weights=3e-5, of_results=5e-5)
    if keras_hpc.rank() == 0:  # a saved model knows nothing of parts, and one rank saves it
        model.save(tmp_path / "model.keras")
        with keras_hpc.local():
            loaded = keras.saving.load_model(tmp_path / "model.keras")
            x, y = samples(model, 7)
            for one in (loaded, model):  # the latter has been compiled with what all ranks exchange
                np.testing.assert_allclose(one.predict(x, verbose=0), expected["outputs"], rtol=2e-5, atol=5e-5)
            np.testing.assert_allclose(model.evaluate(x, y, batch_size=3, verbose=0), expected["scores"], rtol=5e-5)
    keras_hpc.barrier()
    for is_over in (False, True):  # what rank 0 has compiled is for itself; and then what all have is for them all
        if is_over:
            keras_hpc.finalize()
        outputs = model.predict(samples(model, 7)[0], batch_size=2, verbose=0)
        np.testing.assert_allclose(outputs, expected["outputs"], rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("training", enough([True, False], "torch"))
def test_a_model_inside_keeps_the_mode_that_it_is_called_with(training, grid):
    def outputs():
        def network():
            inner = keras.Sequential([keras.Input((12, 7, 2)), layers.Conv2D(3, 3), layers.BatchNormalization()])
            inputs = keras.Input((12, 7, 2))
            return keras.Model(inputs, layers.Conv2D(2, 1)(inner(inputs, training=training)))

        model = compiled(network)
        return keras.ops.convert_to_numpy(model(samples(model, 4)[0]))

    np.testing.assert_allclose(outputs(), on_one_rank(outputs), rtol=1e-4, atol=1e-5)


LOSSES = {
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "weighted mean": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "entropy": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "function": lambda: "mae",
}


def whole():
    inputs = keras.Input((13, 9, 2))
    x = layers.Flatten()(layers.Conv2D(2, 3, padding="same", activation="tanh")(inputs))
    return keras.Model(inputs, layers.Dense(3)(x))


def narrow():
    """Too few rows for parts: ranks with the same columns have the same output."""
    inputs = keras.Input((1, 9, 2))
    return keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(inputs))


@pytest.mark.parametrize(
    "network",
    [*(pytest.param(n, marks=[enough_on("torch"), few_ranks]) for n in (whole, pixels)), *enough([narrow], "torch")],
)
@pytest.mark.parametrize("loss", ["entropy", *enough(["weighted mean"], "torch"), *enough(["sum", "function"])])
def test_losses_metrics_and_weights(network, loss, grid):
    if network is narrow and len(grid) == 1 + (grid[-1] == 1):
        pytest.skip("split along two axes only")

    def train():
        kinds = keras.metrics
        metrics = [kinds.MeanSquaredError("a"), kinds.RootMeanSquaredError("b"), kinds.TruePositives(name="c")]
        metrics += [kinds.BinaryAccuracy("d"), kinds.AUC(from_logits=True, name="e")]
        optimizer = keras.optimizers.SGD(0.001 if loss == "sum" else 0.1)
        model = compiled(network, LOSSES[loss](), optimizer, weighted_metrics=metrics, metrics=None)
        x, _ = samples(model, 6)
        y = (np.random.default_rng(1).random((6, *model.output_shape[1:])) > 0.5).astype("float32")
        weight = np.random.default_rng(2).random(y.shape[:-1]).astype("float32")
        history = model.fit(x, y, sample_weight=weight, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return {
            "history": history,
            "scores": model.evaluate(x, y, sample_weight=weight, batch_size=4, verbose=0),
        }, model

    assert_like_one_rank(train, of_weights=1e-5, of_results=1e-5)


@pytest.mark.parametrize("how", enough(["accumulation", "mixed_bfloat16", "lora"], "torch"))
@few_ranks
def test_ways_of_training(how, grid):
    def train():
        keras.utils.set_random_seed(3)
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy(how if how == "mixed_bfloat16" else "float32")
        try:
            model = keras.Sequential([
                keras.Input((21, 9, 3)), layers.Conv2D(6, 5, strides=2, padding="same"), norm(), layers.ReLU(),
                layers.Conv2D(4, 3, padding="same", activation="tanh", name="adapted"), layers.Conv2D(2, 1),
            ])  # fmt: skip
        finally:
            keras.config.set_dtype_policy(policy)
        if how == "lora":
            model.get_layer("adapted").enable_lora(2)
        accumulated = 2 if how == "accumulation" else None
        model.compile(keras.optimizers.SGD(0.2, gradient_accumulation_steps=accumulated), "mse")
        assert not keras_hpc.is_initialized() or keras_hpc.partition(model).is_split or keras_hpc.size() == 1
        x = np.random.default_rng(0).normal(size=(8, 21, 9, 3)).astype("float32")
        y = np.tanh(x[:, ::2, ::2, :2] + x[:, ::2, ::2, 1:])
        before = values(model)
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return [after - b for after, b in zip(values(model), before, strict=True)]

    expected = on_one_rank(train)
    found = train()
    assert_identical(found)
    largest = max(np.abs(change).max() for change in expected)
    assert largest > 1e-2
    tolerance = 0.03 if how == "mixed_bfloat16" else 1e-5
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(largest, 1))


def padded():
    """Columns that are only padded, of which a rank has a part, in the copy that exchanges rows."""
    inputs = keras.Input((9, 16, 2))
    x = layers.ZeroPadding2D(((3, 0), (1, 1)))(layers.Conv2D(3, 3, padding="same")(inputs))
    return keras.Model(inputs, layers.Conv2D(2, (3, 1), padding="same")(x))


@pytest.mark.parametrize(
    "network",
    [
        *enough([ties, even], "torch"),
        *enough([masked, masked_average, centred], "torch"),
        *enough([masked_at_once, padded, bordered, integers]),
    ],
)
@few_ranks
def test_what_random_models_have_found(network, grid):
    def train():
        # A mean over weights of samples is 84 times as large as one over positions.
        optimizer = keras.optimizers.SGD(0.0005 if network is even else 0.05, gradient_accumulation_steps=2)
        keras.utils.set_random_seed(3)
        model = network()
        weights = np.linspace(1, 2, 6).reshape(6, 1, 1) if network is even else None  # for all positions
        loss = "mse" if weights is None else keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(optimizer, loss, weighted_metrics=["mse"])
        if keras_hpc.is_initialized() and keras_hpc.size() > 1:
            keras_hpc.partition(model, min_rows=1)
        random = np.random.default_rng(0)
        x = random.normal(size=(6, *model.input_shape[1:])).astype("float32")
        for sample in range(6):
            x[sample, 3 + 3 * sample :] = 0
        y = random.normal(size=(6, *model.output_shape[1:])).astype("float32")
        history = model.fit(x, y, batch_size=4, sample_weight=weights, epochs=2, shuffle=False, verbose=0).history
        return {"history": history, "outputs": model.predict(x, verbose=0)}, model

    assert_like_one_rank(train, of_weights=1e-5, of_results=1e-5)


@enough_on("torch")
def test_outputs_of_several_widths_and_weights_with_a_mask(grid):
    """What is the same for all outputs are the rows that are split."""

    def train():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((13, 8, 2))
        x = layers.Conv2D(4, 3, padding="same", activation="tanh")(inputs)
        narrow = layers.Conv2D(2, 3, strides=(1, 1) if grid[-1] == 2 else (1, 2), padding="same")(x)
        model = keras.Model(inputs, [layers.Conv2D(3, 1)(x), narrow])
        of_classes = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, ignore_class=1, reduction="mean_with_sample_weight"
        )
        model.compile(keras.optimizers.SGD(0.1), [of_classes, keras.losses.CosineSimilarity(axis=-1)])
        if keras_hpc.is_initialized() and keras_hpc.size() > 1:
            keras_hpc.partition(model, min_rows=1)
        random = np.random.default_rng(0)
        x = random.normal(size=(6, 13, 8, 2)).astype("float32")
        y = [random.integers(0, 3, (6, 13, 8)), random.normal(size=(6, *narrow.shape[1:])).astype("float32")]
        weights = [random.random((6, *tensor.shape[1:3])).astype("float32") for tensor in model.outputs]
        history = model.fit(x, y, sample_weight=weights, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return {"loss": history["loss"]}, model

    assert_like_one_rank(train, of_weights=1e-5, of_results=1e-5)


@enough_on("torch")
def test_parts_too_small_for_pytorch(grid):
    """A rank has a sample that is large enough for PyTorch's own algorithm, of which parts are not."""

    def train():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((80, 80, 3))
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
        model = keras.Model(inputs, layers.Conv2D(1, 3, padding="same")(x))
        model.compile(keras.optimizers.SGD(1.0), "mse")
        x = np.random.default_rng(0).normal(size=(samples_of_all, 80, 80, 3)).astype("float32")
        model.fit(x, x[..., :1], batch_size=samples_of_all, verbose=0)
        return values(model)

    samples_of_all = keras_hpc.group_count()
    expected = on_one_rank(train)
    for a, b in zip(train(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@enough_on("torch")
def test_a_reader_gives_this_ranks_part_only(grid):
    def train(part):
        model = compiled(unet, optimizer=keras.optimizers.SGD(0.1))
        x, y = samples(model, 2)
        axes = [keras_hpc.part(43), keras_hpc.part(24, axis=1)] if part else [(0, 43), (0, 24)]
        rows = (slice(None), *(slice(*axis) for axis in axes))
        logs = [model.train_on_batch(x[rows], y[rows], return_dict=True)["loss"] for _ in range(2)]
        return [float(value) for value in logs], values(model)

    assert [a.tolist() for a in train(True)[1]] == [a.tolist() for a in train(False)[1]]


def test_groups_and_parts(grid):
    size = int(np.prod(grid))
    assert keras_hpc.group() == keras_hpc.rank() // size
    assert keras_hpc.group_count() == keras_hpc.size() // size
    rows = keras_hpc.allgather(
        np.array([keras_hpc.part(7), keras_hpc.part(7, axis=1), keras_hpc.part(7, axis=2)])[None]
    )
    first = rows[:size]
    if grid == (2, 2):
        assert first[:, 0].tolist() == [[0, 3], [0, 3], [3, 7], [3, 7]]
        assert first[:, 1].tolist() == [[0, 3], [3, 7], [0, 3], [3, 7]]
    else:
        assert first[0, 0, 0] == 0
        assert first[-1, 0, 1] == 7
        assert first[:, 1].tolist() == [[0, 7]] * size
    assert rows[:, 2].tolist() == [[0, 7]] * keras_hpc.size()


@pytest.mark.parametrize("rows", [16, 1], ids=["rows", "one row"])
def test_random_layers_draw_by_part_and_group(rows, grid):
    """One row is split along its columns only, so ranks that have the same columns draw the same, too."""
    inputs = keras.Input((rows, 16, 2))
    x = layers.Dropout(0.5)(layers.Conv2D(2, 1, kernel_initializer="ones")(inputs))
    split = keras.Model(inputs, x)
    split.compile("sgd", "mse")
    axes = [axis for axis, parts in enumerate(grid) if parts > 1 and split.output_shape[axis + 1] > 1]
    ones = np.ones((1, rows, 16, 2), "float32")
    masks = keras_hpc.allgather(keras.ops.convert_to_numpy(split(ones, training=True)))
    size = int(np.prod(grid))
    for group in range(keras_hpc.group_count()):
        same = masks[group * size : (group + 1) * size]
        assert all(np.array_equal(m, same[0]) for m in same), "the outputs are whole"
    assert 0.2 < np.mean(masks[0] == 0) < 0.8
    for axis in axes:
        rank = (1, 2)[axis == 0 and len(grid) > 1 and grid[1] > 1]  # the next part of the first group along the axis
        parts = keras_hpc.allgather_object(keras_hpc.part(masks[0].shape[axis], axis=axis))
        first, other = (np.take(masks[0], range(*parts[r]), axis) for r in (0, rank))
        if first.shape == other.shape:
            assert not np.array_equal(first, other), "each part has numbers of its own"


def test_steps_of_ones_own_get_whole_outputs(grid):
    class Trainer(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.max((y - y_pred) ** 2, axis=(1, 2, 3)))

    def train():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((13, 9, 2))
        model = Trainer(inputs, layers.Conv2D(2, 3, padding="same")(inputs))
        model.compile(keras.optimizers.SGD(0.1))
        x, _ = samples(model, 4)
        model.fit(x, np.tanh(x), batch_size=4, epochs=2, shuffle=False, verbose=0)
        return values(model)

    expected = on_one_rank(train)
    for a, b in zip(train(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
