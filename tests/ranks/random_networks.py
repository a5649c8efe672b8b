# SPDX-License-Identifier: Apache-2.0
"""Random networks of the kinds that scripts train, each with data of its kind, drawn from a seed."""

import keras
import numpy as np
from keras import layers

FAMILIES = {"vector": (5,), "image": (6, 6, 2), "series": (6, 3), "tokens": (6,)}
WORDS = 9


def data(family, samples, source):
    """Samples of a family; sequences end at different lengths."""
    shape = (samples, *FAMILIES[family])
    if family == "tokens":
        x = source.integers(1, WORDS, size=shape).astype("int32")
    else:
        x = source.normal(size=shape).astype("float32")
    if family in ("series", "tokens"):
        lengths = source.integers(1, shape[1] + 1, size=samples)
        x[np.arange(shape[1])[None] >= lengths[:, None]] = 0
    return x


def features(family, x):
    """Two numbers of each sample that a network may learn."""
    flat = x.reshape(len(x), -1).astype("float32") / (4 if family == "tokens" else 1)
    return np.stack([flat[:, 0], flat.mean(1)], 1)


@keras.saving.register_keras_serializable("tests")
class Penalty(layers.Layer):
    """A loss of its own, and a penalty on what passes."""

    def call(self, x):
        self.add_loss(0.03 * keras.ops.mean(keras.ops.square(x)))
        return x


@keras.saving.register_keras_serializable("tests")
class Gated(layers.Layer):
    """A layer of keras.ops, with weights and layers of its own."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.inside = layers.Dense(units)

    def build(self, shape):
        self.inside.build(shape)
        self.gate = self.add_weight(shape=(shape[-1], self.units), name="gate")

    def call(self, x):
        return self.inside(x) * keras.ops.sigmoid(keras.ops.matmul(x, self.gate))

    def compute_output_shape(self, shape):
        return (*shape[:-1], self.units)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("tests")
class Counting(layers.Layer):
    """Counts its steps, keeps means of what passes, and computes with both."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.ticks = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="ticks")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen", aggregation="sum")
        self.center = self.add_weight(
            shape=shape[-1:], initializer="zeros", trainable=False, name="center", aggregation="mean"
        )

    def call(self, x, training=False):
        result = (x - self.center) * (1 + 0.01 * self.steps) + 0.001 * self.seen
        if training:
            self.steps.assign_add(1)
            self.ticks.assign(self.ticks + 2)
            self.seen.assign(self.seen + keras.ops.cast(keras.ops.shape(x)[0], "float32"))
            self.center.assign(0.7 * self.center + 0.3 * keras.ops.mean(x, axis=tuple(range(len(x.shape) - 1))))
        return result


class Networks:
    """Draws what lies between an input and a vector of features.

    Args:
        draw: a `random.Random`.
        say: called with what was drawn.
        x: data that preprocessing layers adapt to.
        smooth: whether small changes must stay small, whatever the optimizer: then layers are few.
    """

    def __init__(self, draw, say, x, smooth=False):
        self.draw, self.say, self.x, self.smooth = draw, say, x, smooth

    def pick(self, *values):
        return self.draw.choice(values)

    def body(self, family, x):
        return getattr(self, f"_{family}")(x)

    def _apply(self, x, *kinds):
        name, make = self.pick(*kinds)
        self.say(name)
        return make(x)

    def _regularized(self):
        return {
            "kernel_regularizer": self.pick(None, None, keras.regularizers.L2(0.01)),
            "activity_regularizer": self.pick(None, None, keras.regularizers.L2(0.02)),
        }

    def normalization(self, x):
        kinds = [
            lambda: layers.BatchNormalization(synchronized=True, momentum=self.pick(0.5, 0.9)),
            lambda: layers.LayerNormalization(), lambda: layers.RMSNormalization(),
            lambda: layers.GroupNormalization(self.pick(1, 2)), lambda: layers.UnitNormalization(),
        ]  # fmt: skip
        layer = self.pick(*kinds)()
        self.say(type(layer).__name__)
        return layer(x)

    def nested(self, x):
        """A model in the model, called twice."""
        inside = keras.Input(x.shape[1:])
        middle = layers.Dense(x.shape[-1], "tanh")(inside)
        if self.pick(True, False):
            middle = layers.BatchNormalization(synchronized=True)(middle)
        model = keras.Model(inside, middle)
        if self.pick(True, False, False):
            model.trainable = False
            self.say("frozen inside")
        return model(model(x)) if self.pick(True, False) else model(x) + x

    def _vector(self, x):
        if self.smooth:
            return layers.Dense(6, "tanh")(self.pick(layers.Dense(8, "tanh"), Gated(6), Counting())(x))
        for _ in range(self.pick(1, 2)):
            x = self._apply(
                x,
                ("dense", lambda x: layers.Dense(8, "tanh", **self._regularized())(x)),
                ("gated", lambda x: Gated(6)(x)),
                ("counting", lambda x: Counting()(x)),
                ("penalty", lambda x: Penalty()(x)),
                ("nested", self.nested),
                ("normalized", self.normalization),
                ("adapted", self._adapted),
                ("spectral", lambda x: layers.SpectralNormalization(layers.Dense(8))(x)),
                ("lora", self._lora),
                ("residual", lambda x: x + layers.Dense(x.shape[-1], "gelu", kernel_constraint="max_norm")(x)),
            )
        return layers.Dense(6, "tanh")(x)

    def _augmented(self, x):
        """Layers that draw random numbers, of which nothing comes."""
        kinds = [
            lambda: layers.RandomTranslation(0.0, 0.0), lambda: layers.RandomRotation(0.0),
            lambda: layers.RandomZoom(0.0), lambda: layers.RandomContrast(0.0),
            lambda: layers.GaussianNoise(0.0), lambda: layers.Dropout(0.0), lambda: layers.SpatialDropout2D(0.0),
        ]  # fmt: skip
        layer = self.pick(*kinds)()
        self.say(type(layer).__name__)
        return layer(x)

    def _adapted(self, x):
        if tuple(x.shape[1:]) != self.x.shape[1:]:
            return layers.Dense(6, "elu")(x)
        kinds = [layers.Normalization]
        if keras.backend.backend() == "tensorflow":
            kinds.append(lambda: layers.Discretization(num_bins=4))
        layer = self.pick(*kinds)()
        layer.adapt(self.x)
        self.say(type(layer).__name__)
        x = layer(x)
        return x if isinstance(layer, layers.Normalization) else layers.Flatten()(layers.Embedding(4, 2)(x))

    def _lora(self, x):
        layer = layers.Dense(7, lora_rank=2)
        return layer(x)

    def _image(self, x):
        for _ in range(self.pick(1, 2, 3)):
            convolve = {"padding": "same", "activation": self.pick("tanh", "gelu", None)}
            x = self._apply(
                x,
                ("conv", lambda x, c=convolve: layers.Conv2D(3, self.pick(2, 3), **c, **self._regularized())(x)),
                ("counting", lambda x: Counting()(x)),
                ("augmented", self._augmented),
                ("strided", lambda x: layers.Conv2D(4, 3, strides=2, padding="same")(x)),
                ("dilated", lambda x, c=convolve: layers.Conv2D(4, 3, dilation_rate=2, **c)(x)),
                ("depthwise", lambda x, c=convolve: layers.DepthwiseConv2D(3, depth_multiplier=2, **c)(x)),
                ("separable", lambda x, c=convolve: layers.SeparableConv2D(4, 3, **c)(x)),
                ("transposed", lambda x, c=convolve: layers.Conv2DTranspose(2, 3, strides=2, **c)(x)),
                ("pooled", lambda x: layers.AveragePooling2D(2, padding="same")(layers.Conv2D(4, 1)(x))),
                ("max", lambda x: layers.MaxPooling2D(2, padding="same")(layers.Conv2D(4, 1)(x))),
                ("normalized", lambda x: self.normalization(layers.Conv2D(4, 1)(x))),
                ("residual", lambda x: x + layers.Conv2D(x.shape[-1], 3, padding="same", activation="tanh")(x)),
                ("upsampled", lambda x: layers.UpSampling2D(2)(layers.Conv2D(2, 2, strides=2, padding="same")(x))),
                ("nested", self.nested),
            )
        ends = layers.Flatten(), layers.GlobalAveragePooling2D(), layers.GlobalMaxPooling2D()
        return layers.Dense(6, "tanh")(self.pick(*ends)(x))

    def _series(self, x):
        masked = self.pick(True, False)
        if masked:
            self.say("masked")
            x = layers.Masking()(x)
        return self._sequence(x, masked)

    def _tokens(self, x):
        masked = self.pick(True, False)
        self.say(f"mask_zero={masked}")
        words = layers.Embedding(WORDS, 4, mask_zero=masked, embeddings_regularizer=self.pick(None, None, "l2"))(x)
        return self._sequence(words, masked)

    def _sequence(self, x, masked):
        convolutions = [] if masked else [  # these drop masks
            ("einsum", lambda x: layers.EinsumDense("abc,cd->abd", output_shape=(None, 4), bias_axes="d")(x)),
            ("grouped", lambda x: layers.GroupQueryAttention(4, 4, 2)(x, x)),
            ("conv", lambda x: layers.Conv1D(4, 3, padding=self.pick("same", "causal"))(x)),
            ("separable", lambda x: layers.SeparableConv1D(4, 2, padding="same")(x)),
        ]  # fmt: skip
        for _ in range(self.pick(0, 1)):
            x = self._apply(
                x,
                ("lstm", lambda x: layers.LSTM(4, return_sequences=True)(x)),
                ("attention", lambda x: layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x))),
                ("causal", lambda x: layers.MultiHeadAttention(1, 3)(x, x, use_causal_mask=True)),
                ("dot", lambda x: layers.Attention(use_scale=True)([x, x])),
                ("distributed", lambda x: layers.TimeDistributed(layers.Dense(4, "tanh"))(x)),
                ("normalized", lambda x: self.normalization(x)),
                *convolutions,
            )
        kinds = [
            ("lstm", lambda x: layers.LSTM(4, unroll=self.pick(True, False))(x)),
            ("gru", lambda x: layers.GRU(4, reset_after=self.pick(True, False))(x)),
            ("rnn", lambda x: layers.SimpleRNN(4, go_backwards=True)(x)),
            ("bidirectional", lambda x: layers.Bidirectional(layers.GRU(3), merge_mode=self.pick("sum", "concat"))(x)),
            ("cells", lambda x: layers.RNN([layers.LSTMCell(3), layers.GRUCell(4)])(x)),
            ("average", lambda x: layers.GlobalAveragePooling1D()(x)),
        ]
        if not masked:
            kinds += [
                ("convlstm", lambda x: layers.Flatten()(
                    layers.ConvLSTM1D(2, 2)(layers.Reshape((x.shape[1], x.shape[2], 1))(x)))),
                ("flat", lambda x: layers.Dense(6, "tanh")(layers.Flatten()(x))),
                ("pooled", lambda x: layers.GlobalMaxPooling1D()(layers.MaxPooling1D(2)(layers.Conv1D(4, 2)(x)))),
            ]  # fmt: skip
        return self._apply(x, *kinds)
