# SPDX-License-Identifier: Apache-2.0
"""Plans of models in parts: what all parts compute, in turns in this process, against the whole; and refusals."""

import itertools
import re

import keras
import numpy as np
import pytest
from keras import layers

import keras_hpc
from keras_hpc import partition
from keras_hpc.spatial import geometry, windows
from keras_hpc.spatial import layers as kinds

RANKS = {"torch": (1,)}
SOAK = {"tensorflow": (1,), "jax": (1,)}

WITH_TENSORFLOW = keras.backend.backend() == "tensorflow"


def fetched(fetch, pieces, grid):
    """What all ranks have after a fetch of what they had."""
    for one in fetch.axes if fetch else ():
        moves = [one.move_at(grid.place(rank)) for rank in range(grid.size)]
        index = one.axis - 1
        lines = [grid.line(r, index) if index < len(grid.parts) else [r] for r in range(grid.size)]

        def rows(x, begin, end, axis=one.axis):
            return x[(slice(None),) * axis + (slice(begin, end),)]

        found = []
        for rank, (move, line) in enumerate(zip(moves, lines, strict=True)):
            part = line.index(rank)
            blocks = [rows(pieces[line[q]], *dict(moves[line[q]].sends)[part]) for q, _ in move.receives]
            x = [*blocks[: move.lower], rows(pieces[rank], *move.own), *blocks[move.lower :]]
            pads = [move.pads if axis == one.axis else (0, 0) for axis in range(x[0].ndim)]
            how = {"mode": "edge"} if fetch.fill == "edge" else {"constant_values": fetch.fill}
            found.append(np.pad(np.concatenate(x, axis=one.axis), pads, **how))
        pieces = found
    return pieces


def part_of(x, split, grid, rank):
    for axis in split:
        begin, end = geometry.bounds(x.shape[axis], grid.parts[axis - 1])[grid.place(rank)[axis - 1]]
        x = x[(slice(None),) * axis + (slice(begin, end),)]
    return x


def with_borders(layer, step, pieces, grid, rank):
    """What a rank makes of its own rows and of those that others send."""
    (axis,), read = step.splits[0], step.fetches[0]
    one = next(one for one in read.axes if one.axis == axis)
    line = grid.line(rank, axis - 1)
    part = line.index(rank)
    rows = (slice(None),) * axis
    sent = {q: dict(one.move_at(grid.place(line[q])).sends) for q, _ in one.move_at(grid.place(rank)).receives}
    received = [pieces[line[q]][(*rows, slice(*sends[part]))] for q, sends in sent.items()]
    received = np.concatenate(received or [pieces[rank][(*rows, slice(0, 0))]], axis=axis)
    borders = geometry.borders(step.axes[axis - 1], grid.parts[axis - 1], part)
    own, received = (keras.ops.convert_to_tensor(x) for x in (pieces[rank], received))

    def add(x, kernel, convolution, of_others, begins):
        y = keras.ops.convert_to_numpy(convolution(x, kernel)).copy()
        for begin, added in zip(begins, of_others(received, kernel), strict=True):
            y[(*rows, slice(begin, begin + added.shape[axis]))] += keras.ops.convert_to_numpy(added)
        return keras.ops.convert_to_tensor(y)

    return windows.compute_own(layer, step.axes, axis, borders, own, add, layer)


def in_parts(plan, x):
    """The pieces of the output that the ranks of a group compute."""
    grid = plan.grid
    split = plan.splits[id(plan.model.inputs[0])]
    values = {id(plan.model.inputs[0]): [part_of(x, split, grid, rank) for rank in range(grid.size)]}
    for node, step in plan.nodes():
        inputs = [
            values[id(t)] if step.kind == "borders" else fetched(f, values[id(t)], grid)
            for f, t in zip(step.fetches, node.input_tensors, strict=True)
        ]
        results = []
        for rank in range(grid.size):
            mine = {
                id(t): keras.ops.convert_to_tensor(v[rank]) for t, v in zip(node.input_tensors, inputs, strict=True)
            }
            args, kwargs = node.arguments.fill_in(mine)
            place = grid.place(rank)
            if step.kind == "borders":
                y = with_borders(node.operation, step, inputs[0], grid, rank)
            elif step.kind == "window":
                y = windows.compute(node.operation, step.axes, step.splits[0], grid, place, args[0], node.operation)
            else:
                assert step.kind == "layer"
                y = node.operation(*args, **kwargs)
            results.append(keras.ops.convert_to_numpy(y))
        values[id(node.outputs[0])] = results
    return values[id(plan.model.outputs[0])]


def check(model, parts, min_rows=1):
    plan = partition(model, parts, min_rows)
    shape = model.inputs[0].shape[1:]
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype("float32")
    expected = keras.ops.convert_to_numpy(model(x))
    for rank, piece in enumerate(in_parts(plan, x)):
        want = part_of(expected, plan.outputs[0], plan.grid, rank)
        np.testing.assert_allclose(piece, want, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert str(plan).count("\n") == len(list(plan.nodes())) + 2
    return plan


def pooled(kind, *args, **options):
    return lambda: kind(*args, **options)


def make(shape, *stack):
    return keras.Sequential([keras.Input(shape), *(one() for one in stack)])


IMAGES = [
    *(pooled(layers.Conv2D, 3, k, strides=s, padding=p) for k, s, p in itertools.product(
        ((5, 3), (2, 4), 1), (1, 2, 3), ("same", "valid")) if s == 1 or k != 1),
    pooled(layers.Conv2D, 4, 3, dilation_rate=2, padding="same", activation="softmax"),
    pooled(layers.DepthwiseConv2D, (3, 2), depth_multiplier=2, padding="same"),
    pooled(layers.SeparableConv2D, 3, 3, strides=2, padding="same"),
    *(pooled(layers.Conv2DTranspose, 3, k, strides=s, padding=p) for k, s, p in itertools.product(
        (2, 3, 4), (1, 2, 3), ("same", "valid"))),
    pooled(layers.Conv2DTranspose, 2, 3, strides=2, padding="same", output_padding=1),
    *(pooled(kind, k, strides=s, padding=p) for kind, (k, s), p in itertools.product(
        (layers.MaxPooling2D, layers.AveragePooling2D), ((2, 2), (3, 2), (2, 1), (3, 3)), ("same", "valid"))),
    pooled(layers.UpSampling2D, (2, 3)),
    pooled(layers.UpSampling2D, (3, 2), interpolation="bilinear"),
    # It asks for TensorFlow, which is not there in the jobs of other backends.
    *([pooled(layers.Resizing, 28, 33)] if WITH_TENSORFLOW else []),
    *([pooled(layers.Resizing, 42, 22, interpolation="nearest")] if WITH_TENSORFLOW else []),
    pooled(layers.ZeroPadding2D, ((9, 1), (0, 2))),
    pooled(layers.Cropping2D, ((1, 6), (2, 0))),
    pooled(layers.LayerNormalization),
    pooled(layers.PReLU, shared_axes=[1, 2], alpha_initializer="ones"),
]  # fmt: skip


@pytest.mark.parametrize("parts", [2, (3, 1), (2, 2), (1, 3)])
def test_layers_over_images(parts):
    for number, layer in enumerate(IMAGES):
        keras.utils.set_random_seed(number)
        try:
            check(make((14, 11, 3), layer), parts)
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"{layer().get_config()}") from error


def test_layers_over_lines_and_volumes():
    lines = [
        pooled(layers.Conv1D, 3, 4, padding="causal", dilation_rate=2),
        pooled(layers.Conv1D, 3, 3, strides=2, padding="same"),
        pooled(layers.SeparableConv1D, 3, 3, padding="same"),
        pooled(layers.Conv1DTranspose, 2, 3, strides=2, padding="same"),
        pooled(layers.AveragePooling1D, 3, 2, padding="same"),
        pooled(layers.ZeroPadding1D, (2, 3)),
        pooled(layers.Cropping1D, (3, 1)),
        pooled(layers.UpSampling1D, 3),
    ]
    for layer, parts in itertools.product(lines, (2, 3, (4, 1))):
        check(make((17, 3), layer), parts)
    volumes = [
        pooled(layers.Conv3D, 3, (2, 3, 1), padding="same"),
        pooled(layers.Conv3DTranspose, 2, 3, strides=2, padding="same"),
        pooled(layers.MaxPooling3D, 2, padding="same"),
        pooled(layers.UpSampling3D, (1, 2, 3)),
        pooled(layers.ZeroPadding3D, ((1, 0), (2, 2), (0, 1))),
        pooled(layers.Cropping3D, ((1, 0), (1, 2), (0, 1))),
    ]
    for layer, parts in itertools.product(volumes, (2, (2, 1, 2), (1, 3))):
        check(make((7, 6, 5, 2), layer), parts)


def test_a_stack_that_ends_whole():
    stack = (
        *(pooled(layers.Conv2D, 4, 5, strides=2, padding="same"), pooled(layers.ReLU), pooled(layers.MaxPooling2D)),
        *(pooled(layers.Conv2D, 4, 3, padding="same"), pooled(layers.Flatten), pooled(layers.Dense, 3)),
    )
    plan = check(make((37, 20, 3), *stack), (2, 2))
    assert [len(step.splits[0]) for _, step in plan.nodes()] == [2, 2, 2, 2, 0, 0]
    deep = check(make((37, 20, 3), *stack), 4, min_rows=4)  # 10 rows are too few for 4 parts
    assert [len(step.splits[0]) for _, step in deep.nodes()] == [1, 1, 0, 0, 0, 0]
    whole = check(make((37, 20, 3), *stack), 1)
    assert not whole.is_split


def test_branches_and_operands_that_are_whole_or_broadcast():
    inputs = keras.Input((16, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    bias = layers.Reshape((1, 8, 4))(layers.Dense(32)(layers.Flatten()(x)))  # whole, and of one row
    image = layers.Reshape((16, 8, 4))(layers.Dense(512)(layers.Flatten()(x)))  # whole, of all rows
    y = layers.Concatenate()([x + bias, x * image, x * 2.0, keras.ops.relu(x)])
    plan = check(keras.Model(inputs, layers.Conv2D(2, 3)(y)), 2)
    assert plan.outputs == [{1}]
    for extents in ((16, 8), (None, None)):
        inner_inputs = keras.Input((*extents, 16))
        inner = keras.Model(inner_inputs, layers.Conv2D(3, 3)(inner_inputs))
        nested = partition(keras.Model(inputs, inner(y)), 2)
        assert nested.outputs == [{1}]
        assert f"{inner.name}/" in str(nested)


def test_received_rows_and_bytes():
    plan = partition(make((64, 10, 3), pooled(layers.Conv2D, 8, 5, padding="same"), pooled(layers.Flatten)), 4)
    lines = str(plan).splitlines()
    assert "4 rows, 480 B" in lines[2]  # 2 on each side of a middle part, of 10 x 3 float32
    assert "48 rows, 15.4 kB" in lines[3]  # those of 3 other parts
    assert lines[4].startswith("15.8 kB in all; 1 of 2 layers")
    half = partition(make((64, 10, 3), pooled(layers.Conv2D, 8, 5, padding="same", dtype="mixed_float16")), 4)
    assert "4 rows, 240 B" in str(half)


class Own(layers.Layer):
    """A layer of the user's own."""

    def call(self, x):
        return x


class OwnConvolution(layers.Conv2D):
    """One that may compute anything."""


@keras_hpc.spatial.pointwise
class Doubled(layers.Layer):
    """A layer of the user's own that computes each position by itself."""

    def call(self, x):
        return x * 2


class Derived(Doubled):
    """Of which nobody has said so."""


@keras_hpc.spatial.pointwise
class Centred(layers.Layer):
    """A layer of which somebody has said so wrongly."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=(1, 2), keepdims=True)


@keras_hpc.spatial.pointwise
class Numbered(layers.Layer):
    """Another one, whose values tell where they stand."""

    def call(self, x):
        return x + keras.ops.reshape(keras.ops.arange(x.shape[1], dtype=x.dtype), (-1, 1, 1))


@keras_hpc.spatial.pointwise
class Normalized(layers.Layer):
    """Another one, in training only."""

    def build(self, shape):
        self.norm = layers.BatchNormalization()
        self.norm.build(shape)

    def call(self, x, training=False):
        return self.norm(x, training=training)


@keras_hpc.spatial.pointwise
class Noisy(layers.Layer):
    """A layer that draws and computes each position by itself."""

    def build(self, shape):
        self.drops, self.seeds = layers.Dropout(0.5), keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        return self.drops(x, training=training) + keras.random.normal(keras.ops.shape(x), seed=self.seeds)


MIXING = "mixes positions along axis 1: its values change beside others"
REFUSED = [
    (pooled(Own, name="mine"), "`mine` (Own)"),
    (pooled(OwnConvolution, 3, 3, name="mine"), "`mine` (OwnConvolution)"),
    (pooled(Derived, name="mine"), "`mine` (Derived)"),
    (pooled(Centred, name="mine"), f"`mine` (Centred) cannot be computed in parts: it {MIXING}"),
    (pooled(Numbered, name="mine"), "needs all positions along axis 1: its values change without others"),
    (pooled(Normalized, name="mine"), MIXING),
    (pooled(layers.Lambda, lambda x: keras.ops.flip(x, 1), name="mine"), MIXING),
    (pooled(layers.Conv2D, 3, 3, data_format="channels_first"), "channels first"),
    (pooled(layers.Conv2D, 3, 3, activity_regularizer="l2"), "activity_regularizer"),
    (pooled(layers.Conv2D, 3, 3, activation=lambda x: x / keras.ops.max(x)), "an activation that mixes positions"),
    (pooled(layers.Activation, lambda x: x / keras.ops.max(x)), "an activation that mixes positions"),
    (pooled(layers.BatchNormalization, axis=1), "along axis 1"),
]
OF_EVERYTHING = [
    pooled(layers.UpSampling2D, 2, interpolation="bicubic"),
    pooled(layers.GroupNormalization, 4, axis=1),
    pooled(layers.Softmax, axis=1),
    pooled(layers.PReLU),
    pooled(layers.Resizing, 8, 8),
    pooled(layers.Resizing, 32, 32, antialias=True),
    pooled(layers.RandomFlip),
]
AS_THEIR_INPUTS = [
    pooled(layers.SpatialDropout2D, 0.5),
    pooled(layers.Dropout, 0.5, noise_shape=(None, 1, 1, 3)),
    pooled(layers.Lambda, lambda x: x * keras.ops.sigmoid(x)),
    pooled(layers.Conv2D, 3, 3, activation=lambda x: keras.ops.maximum(x, 0)),
    pooled(layers.SpectralNormalization, layers.Conv2D(3, 3)),
    pooled(Noisy),
]


@pytest.mark.parametrize(("layer", "words"), REFUSED)
def test_refused_layers(layer, words):
    stack = (pooled(layers.Conv2D, 3, 3, padding="same"), layer)
    model = make((16, 16, 3), *stack) if "channels" not in words else make((16, 16, 3), layer)
    with pytest.raises(ValueError, match="cannot be computed in parts") as error:
        partition(model, 2)
    for word in (words, "keras_hpc.partition(model, parts=1)", "Received: a model for 2 parts"):
        assert word in str(error.value)
    assert not partition(model, 1).is_split


def test_layers_that_get_everything_and_others():
    first, last = pooled(layers.Conv2D, 3, 3, padding="same"), pooled(layers.Conv2D, 2, 1)
    for layer, splits in ((OF_EVERYTHING, [1, 0, 1]), (AS_THEIR_INPUTS, [1, 1, 1])):
        for one in layer:
            plan = partition(make((16, 16, 3), first, one, last), 2)
            assert [len(step.splits[0]) for _, step in plan.nodes()] == splits, str(plan)


def test_moments_over_all_that_is_split_are_combined():
    inputs = keras.Input((16, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    mean, variance = keras.ops.moments(x, axes=(1, 2), keepdims=True)
    plan = partition(keras.Model(inputs, (x - mean) * keras.ops.rsqrt(variance + 0.1)), 2)
    kinds_of = {type(node.operation).__name__: step.kind for node, step in plan.nodes()}
    assert kinds_of["Moments"] == "reduction"
    assert plan.outputs == [{1}]
    assert partition(keras.Model(inputs, keras.ops.count_nonzero(x, axis=-1)), 2).outputs == [{1}]


def test_refused_models():
    class Subclassed(keras.Model):
        pass

    with pytest.raises(TypeError, match=r"a functional model.*Received: `own` \(Subclassed\)"):
        partition(Subclassed(name="own"), 2)
    with pytest.raises(TypeError, match=r"begins with keras\.Input"):
        partition(keras.Sequential([layers.Conv2D(3, 3)]), 2)
    with pytest.raises(ValueError, match="extents of its images are known"):
        partition(make((None, 16, 3), pooled(layers.Conv2D, 3, 3)), 2)
    assert partition(make((16, None, 3), pooled(layers.Conv2D, 3, 3, padding="same")), 1)
    for parts in (0, (2, 0), (), (1, 1, 1, 2), True, "2"):
        with pytest.raises(ValueError, match=r"number of parts.*Received: "):
            partition(make((16, 16, 3)), parts)
    with pytest.raises(ValueError, match=r"min_rows.*Received: 0"):
        partition(make((16, 16, 3)), 2, min_rows=0)


def test_a_layer_marked_pointwise_and_models_without_images():
    check(make((16, 16, 3), pooled(layers.Conv2D, 3, 3, padding="same"), Doubled), 2)
    words = make((16, 3), pooled(layers.LSTM, 4), pooled(layers.Dense, 2))
    assert not partition(words, 2).is_split
    with pytest.raises(TypeError, match=r"derived from keras\.layers\.Layer"):
        keras_hpc.spatial.pointwise(int)


OF_TWO = {
    *("Add", "Divide", "DivideNoNan", "Equal", "Greater", "GreaterEqual", "Hypot", "Less", "LessEqual", "Logaddexp"),
    *("LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Multiply", "NotEqual", "Power", "Subtract", "TrueDivide"),
    "Where",
}
FUNCTIONS = {
    "Cast": lambda x: keras.ops.cast(x, "float16"),
    "Clip": lambda x: keras.ops.clip(x, 0.2, 0.6),
    "LogicalNot": lambda x: keras.ops.logical_not(x > 0.5),
    "Where": lambda a, b: keras.ops.where(a > b, a, b),
}


@pytest.mark.parametrize("name", sorted(kinds._POINTWISE_OPERATIONS - {"Abs"}))  # which Keras makes an Absolute
def test_operations_that_are_split_compute_each_position_by_itself(name):
    """In another order of positions they give the same numbers in that order."""
    function = FUNCTIONS.get(name) or getattr(keras.ops, re.sub("(?<!^)(?=[A-Z])", "_", name).lower())
    x = np.random.default_rng(0).random((2, 2, 8, 3, 2)).astype("float32")
    inputs = [keras.Input((8, 3, 2)) for _ in x]
    if name not in OF_TWO:
        inputs, x = inputs[:1], x[:1]
    model = keras.Model(inputs, layers.Conv2D(1, 1)(keras.ops.cast(function(*inputs), "float32")))
    assert name in {type(operation).__name__ for operation in model.operations}
    assert partition(model, 2).is_split
    order = np.random.default_rng(1).permutation(8)
    found, expected = ([keras.ops.convert_to_tensor(a) for a in given] for given in (x[:, :, order], x))
    found, expected = (keras.ops.convert_to_numpy(function(*given)) for given in (found, expected))
    np.testing.assert_array_equal(found, expected[:, order])
