# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""What models in parts refuse: other samples on the ranks of a group, and what is no sum over positions."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_cases import enough_on
from spatial_cases import compiled, direct, grid, pixels, ranks, residual, samples, strided

import keras_hpc

RANKS = {"jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2, 3, 4), "jax": (2, 3, 4), "torch": (3, 4)}
TIMEOUT = 900


@enough_on("torch", "tensorflow")
def test_different_samples_in_a_group_are_refused(grid):
    model = compiled(strided)
    x, y = samples(model, 4)
    with pytest.raises(ValueError, match="The ranks of a group compute the same samples"):
        model.train_on_batch(x + keras_hpc.rank(), y)
    with pytest.raises(ValueError, match="same data on all ranks"):
        model.evaluate(x + keras_hpc.rank(), y, verbose=0)
    with pytest.raises(ValueError, match="same data on all ranks"):
        model.predict(x + keras_hpc.rank(), verbose=0)
    with pytest.raises(ValueError, match=r"The inputs of .* Expected all 45 rows of axis 1, or the \d+ rows"):
        model.train_on_batch(x[:, :7], y)
    in_a_loop = compiled(residual)
    x, _ = samples(in_a_loop, 2)
    direct(in_a_loop, x)
    with pytest.raises(ValueError, match="The ranks of a group compute the same samples"):
        in_a_loop(x + keras_hpc.rank(), training=False)


def test_refusals_come_from_compile(grid):
    class Own(layers.Layer):
        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((36, 12, 4)), layers.Conv2D(4, 3), Own(name="odd")])
    with pytest.raises(ValueError, match=r"`odd` \(Own\) cannot be computed in parts"):
        model.compile("sgd", "mse")
    first = keras.Sequential([keras.Input((16, 36, 12)), layers.Conv2D(16, 3, data_format="channels_first")])
    with pytest.raises(ValueError, match="has its channels first; expected data_format='channels_last'"):
        first.compile("sgd", "mse")
    keras_hpc.partition(model, parts=1)
    model.compile("sgd", "mse")  # each rank of a group computes all of it
    x = np.ones((4, 36, 12, 4), "float32")
    model.fit(x, np.ones((4, 34, 10, 4), "float32"), verbose=0)
    with pytest.raises(ValueError, match=r"begins with keras\.Input"):
        keras.Sequential([layers.Conv2D(3, 3)]).compile("sgd", "mse")
    with pytest.raises(ValueError, match="arranged by init"):
        keras_hpc.partition(model, parts=7)
    with pytest.raises(ValueError, match="without spatial"):
        keras_hpc.keep_local(model.layers[0])


class Sparse(layers.Layer):
    def compute_output_shape(self, input_shape):
        return input_shape

    def call(self, x):
        return self.with_loss(x)

    def with_loss(self, x):
        self.add_loss(keras.ops.sum(keras.ops.square(x)))
        return x


class Moving(layers.Layer):
    def build(self, shape):
        self.largest = self.add_weight(shape=(), trainable=False)

    def call(self, x, training=False):
        if training:
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(x)))
        return x


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Whatever the kind of the layer, and whoever has the regularizer.
        (lambda: layers.Softmax(activity_regularizer="l2"), "activity_regularizer"),
        (lambda: layers.Reshape((36, 6, 6), activity_regularizer="l2"), "activity_regularizer"),
        (lambda: layers.SpectralNormalization(layers.Conv2D(3, 3), activity_regularizer="l2"), "activity_regularizer"),
        (lambda: layers.TimeDistributed(layers.Dense(3, activity_regularizer="l2")), "activity_regularizer"),
        (lambda: keras_hpc.spatial.pointwise(Sparse)(), "adds a loss of its own"),
        (lambda: keras_hpc.spatial.pointwise(Moving)(), "keeps numbers of all positions"),
        # By the numbers of rows, which few samples do not tell.
        (lambda: layers.Lambda(lambda x: keras.ops.concatenate([2 * x[:, :9], x[:, 9:]], 1)), "axis 1"),
    ],
)
@enough_on("torch")
def test_what_would_see_a_part_only(make, words, grid):
    model = keras.Sequential([keras.Input((36, 12, 3)), layers.Conv2D(3, 3, padding="same"), make()])
    with pytest.raises(ValueError, match=rf"cannot be computed in parts: it .*{words}"):
        model.compile("sgd", "mse")


def test_an_activity_regularizer_of_a_layer_that_gets_everything(grid):
    inputs = keras.Input((36, 12, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    x = layers.GroupNormalization(4, axis=1, activity_regularizer="l2")(x)
    x = layers.MultiHeadAttention(1, 2, attention_axes=(1, 2), activity_regularizer="l2")(x, x)
    keras.Model(inputs, x).compile("sgd", "mse")
    pooled = keras.Model(inputs, layers.GlobalAveragePooling2D(activity_regularizer="l2")(inputs))
    with pytest.raises(ValueError, match="has an activity_regularizer, which would see a part only"):
        keras.Model(inputs, pooled(layers.Conv2D(3, 3, padding="same")(inputs))).compile("sgd", "mse")


def test_a_loss_that_a_layer_inside_of_another_adds_of_a_part(grid):
    inputs = keras.Input((36, 12, 3))
    x = layers.Conv2D(3, 3, padding="same")(inputs)
    model = keras.Model(inputs, layers.TimeDistributed(Sparse(name="odd"))(x))
    with pytest.raises(ValueError, match=r"add a loss of its own where its output is split\. .*`odd` \(Sparse\)"):
        model.compile("sgd", "mse")


def test_arguments_of_init():
    with pytest.raises(ValueError, match=f"Expected a number of ranks that {ranks() + 1} divides"):
        keras_hpc.init(spatial=ranks() + 1)
    for wrong in ((2, 0), 2.0, "2"):
        with pytest.raises(ValueError, match="number of parts along each"):
            keras_hpc.init(spatial=wrong)
    keras_hpc.init(spatial=np.int64(ranks()))  # as arithmetic with NumPy gives it
    assert keras_hpc.part(np.int64(ranks())) == (keras_hpc.rank(), keras_hpc.rank() + 1)
    keras_hpc.finalize()


@enough_on("torch", "tensorflow")
@pytest.mark.parametrize("way", ["fit", "train_on_batch", "evaluate", "predict"])
def test_a_model_that_was_compiled_before_there_was_a_job(way):
    model = pixels()
    model.compile("sgd", "mse")
    x = np.ones((2, 13, 9, 2), "float32")
    keras_hpc.init(batch="global", spatial=2 if ranks() % 2 == 0 else ranks())  # parts of four rows and more
    getattr(model, way)(x, *[x] * (way != "predict"), **({} if way == "train_on_batch" else {"verbose": 0}))
    assert model.predict_on_batch(_of_part(x, 1)).shape[1] == 13  # an input may be a part
    keras_hpc.finalize()


def test_what_keras_says_of_a_lambda_is_quoted_without_colours(grid):
    model = keras.Sequential([
        keras.Input((36, 12, 3)), layers.Conv2D(3, 3, padding="same"), layers.Lambda(lambda x: x * np.ones((36, 1, 1)))
    ])  # fmt: skip
    with pytest.raises(ValueError, match=r"cannot compute a part of its axis \d: \w+: Exception encountered") as caught:
        model.compile("sgd", "mse")
    assert "\x1b" not in str(caught.value)


def _of_part(array, *axes):
    """What a reader reads that asks for this rank's rows of these axes."""
    for axis in axes:
        array = array[(slice(None),) * axis + (slice(*keras_hpc.part(array.shape[axis], axis - 1)),)]
    return array


@enough_on("torch", "jax")
@pytest.mark.parametrize(
    ("axes", "words"),
    [
        # What is whole, as it has few columns, or few rows, was cut, or what is split has rows of its own.
        (((1, 2), (1, 2), (1, 2)), "The inputs of .* Expected all 6 rows of axis 2, which is not split"),
        (((), (1, 2), ()), "The targets of .* Expected all 6 rows of axis 2, which is not split"),
        (((1,), (2,), (1,)), "The targets of .* Expected all 6 rows of axis 2, which is not split"),
        (((), (), (1, 2)), "The sample weights of .* Expected all 6 rows of axis 2, which is not split"),
    ],
)
def test_a_part_of_what_is_whole(axes, words, grid):
    if grid != (2, 2):
        pytest.skip("columns are not cut")
    inputs = keras.Input((13, 6, 2))
    model = keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(inputs))
    model.compile("sgd", "mse")
    x, y = np.ones((2, 13, 6, 2), "float32"), np.ones((2, 13, 6, 2), "float32")
    given = [_of_part(a, *of) for a, of in zip((x, y, y[..., 0]), axes, strict=True)]
    with pytest.raises(ValueError, match=words + r".*Received: 3 rows"):
        model.train_on_batch(*given)


@pytest.mark.parametrize("way", ["fit", "train_on_batch", "evaluate"])
@enough_on("torch")
def test_targets_that_are_neither_whole_nor_a_part(way, grid):
    x = np.ones((2, 13, 9, 2), "float32")
    options = {} if way == "train_on_batch" else {"verbose": 0}
    for given, what in (({"y": x[:, :3]}, "targets"), ({"y": x, "sample_weight": x[:, :3, :, 0]}, "sample weights")):
        words = rf"The {what} of model .* Expected all 13 rows of axis 1, or the \d rows from \d+ .* Received: 3 rows"
        with pytest.raises(ValueError, match=words):  # of a new model: Keras on JAX loses one whose step has failed
            getattr(compiled(pixels, "mse", metrics=None), way)(x, **given, **options)
    compiled(pixels, "mse", metrics=None).train_on_batch(x, _of_part(x, 1))  # though the input is whole


@enough_on("torch", "jax")
def test_a_model_stays_in_parts_though_a_call_of_it_has_failed(grid):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError

    model = compiled(pixels, "mse", metrics=None)
    x = np.ones((2, 13, 9, 2), "float32")
    with pytest.raises(ZeroDivisionError):
        model.fit(x, x, verbose=0, callbacks=[Fails()])
    assert model.predict_on_batch(_of_part(x, 1)).shape[1] == 13  # an input may still be a part
    model.train_on_batch(_of_part(x, 1), _of_part(x, 1))


class Rows(keras.utils.PyDataset):
    """Reads this rank's rows only."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        x = _of_part(np.arange(2 * 24 * 6 * 2, dtype="float32").reshape(2, 24, 6, 2) / 600, 1)
        return x, x


@enough_on("torch")
def test_a_reader_of_parts_is_told_what_it_needs(grid, caplog):
    """Its ranks' data are not the same, but no samples are repeated for it."""
    inputs = keras.Input((24, 6, 2))
    model = keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(inputs))
    model.compile("sgd", "mse")
    with caplog.at_level("WARNING", "keras_hpc"):
        model.fit(Rows(), shuffle=False, verbose=0)
    said = "If each reads its own rows of these, as keras_hpc.part says, call keras_hpc.init(shard=False)"
    assert (said in caplog.text) == (keras_hpc.rank() == 0)
    assert "repeated" not in caplog.text


def test_extents_that_tensorflow_does_not_know(grid):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("other backends see the arrays")
    import tensorflow as tf

    x = np.ones((2, 24, 6, 2), "float32")
    unknown = tf.TensorSpec((None, None, None, 2))
    data = tf.data.Dataset.from_generator(lambda: iter([(x, x)]), output_signature=(unknown, unknown))
    data = data.apply(tf.data.experimental.assert_cardinality(1))
    inputs = keras.Input((24, 6, 2))
    model = keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"unknown number of rows, which `tf.ensure_shape` in a `map` tells"):
        model.fit(data, shuffle=False, verbose=0)
    known = data.map(lambda x, y: (tf.ensure_shape(x, (None, 24, 6, 2)), tf.ensure_shape(y, (None, 24, 6, 2))))
    model.fit(known, shuffle=False, verbose=0)
