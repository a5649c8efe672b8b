# SPDX-License-Identifier: Apache-2.0
"""Random functional models of the layers that can be computed in parts, each made from a seed alone."""

import random

import keras
from keras import layers

MOST = 6000  # values of a tensor


class Maker:
    """Grows a model.

    Args:
        seed: of everything that is chosen.
        several_groups: whether batch normalization is over several groups of ranks: then it is synchronized.
    """

    def __init__(self, seed, several_groups):
        self.random = random.Random(seed)
        self.several_groups = several_groups
        self.dims = self.random.choice((1, 2, 2, 2, 3))
        self.masked = self.dims == 1 and self.random.random() < 0.25
        self.tensors = []  # that a layer may read

    # ---- choices

    def chance(self, probability):
        return self.random.random() < probability

    def pick(self, *values):
        return self.random.choice(values)

    def each(self, *values):
        """A number for each spatial axis, or one for all."""
        return tuple(self.pick(*values) for _ in range(self.dims)) if self.chance(0.6) else self.pick(*values)

    def layer(self, name):
        return getattr(layers, f"{name}{self.dims}D")

    def activation(self):
        return self.pick(None, None, "relu", "tanh", "gelu", "softplus", "elu")

    # ---- layers that read windows

    def convolution(self, x):
        dilation = self.each(1, 2, 3) if self.chance(0.3) else 1
        strides = self.each(1, 2, 3) if dilation == 1 and self.chance(0.5) else 1
        padding = self.pick("same", "same", "valid", *(["causal"] if self.dims == 1 else []))
        channels = x.shape[-1]
        groups = self.pick(*(n for n in (1, 1, 1, 2, 3) if channels % n == 0))
        return self.layer("Conv")(
            groups * self.pick(1, 2, 3), self.each(1, 2, 3, 4, 5), strides=strides, padding=padding,
            dilation_rate=dilation, groups=groups, activation=self.activation(), use_bias=self.chance(0.7),
        )  # fmt: skip

    def depthwise(self, x):
        if self.dims == 3:
            return self.convolution(x)
        kernel, strides, padding = self.each(1, 2, 3, 4), self.pick(1, 1, 2, 3), self.pick("same", "valid")
        if self.chance(0.5):
            return self.layer("SeparableConv")(self.pick(1, 2, 4), kernel, strides=strides, padding=padding)
        return self.layer("DepthwiseConv")(kernel, strides=strides, padding=padding, depth_multiplier=self.pick(1, 2))

    def transposed(self, x):
        kernel, strides = self.each(1, 2, 3, 4, 5), self.each(1, 2, 3)
        extra = None
        if self.chance(0.2) and strides != 1 and isinstance(strides, int):
            extra = self.random.randrange(strides)
        dilation = self.pick(1, 1, 2) if strides == 1 and extra is None else 1
        return getattr(layers, f"Conv{self.dims}DTranspose")(
            self.pick(1, 2, 3), kernel, strides=strides, padding=self.pick("same", "valid"), output_padding=extra,
            dilation_rate=dilation, activation=self.activation(),
        )  # fmt: skip

    def pooling(self, x):
        kind = self.layer(self.pick("MaxPooling", "AveragePooling"))
        return kind(
            self.each(1, 2, 3, 4), strides=self.pick(None, self.each(1, 2, 3)), padding=self.pick("same", "valid")
        )

    def upsampling(self, x):
        if self.dims == 2:
            return layers.UpSampling2D(self.each(1, 2, 3), interpolation=self.pick("nearest", "bilinear"))
        return self.layer("UpSampling")(self.pick(1, 2, 3) if self.dims == 1 else tuple(self.pick(1, 2) for _ in "abc"))

    def sides(self, most):
        pairs = tuple((self.random.randint(0, most), self.random.randint(0, most)) for _ in range(self.dims))
        return pairs[0] if self.dims == 1 else pairs

    def padding(self, x):
        return self.layer("ZeroPadding")(self.sides(4))

    def cropping(self, x):
        return self.layer("Cropping")(self.sides(3))

    # ---- layers that do not

    def normalization(self, x):
        channels, rank = x.shape[-1], len(x.shape)
        kinds = [
            lambda: layers.BatchNormalization(
                momentum=0.9, synchronized=self.several_groups or self.chance(0.5), scale=self.chance(0.8)
            ),
            lambda: layers.LayerNormalization(), lambda: layers.UnitNormalization(axis=-1),
        ]  # fmt: skip
        if not self.masked and rank > 2:
            kinds += [
                lambda: layers.GroupNormalization(self.pick(*(n for n in (1, 2, 3, -1) if channels % n == 0))),
                lambda: layers.LayerNormalization(axis=self.pick([*range(1, rank)], [*range(1, rank - 1)])),
            ]
            if hasattr(layers, "RMSNormalization"):
                kinds += [lambda: layers.RMSNormalization()]
        return self.pick(kinds[0], *kinds)()

    def pointwise(self, x):
        return self.pick(
            lambda: layers.ReLU(), lambda: layers.LeakyReLU(), lambda: layers.ELU(),
            lambda: layers.ReLU(6) if self.masked else layers.Softmax(), lambda: layers.Activation("tanh"),
            lambda: layers.Dense(self.pick(2, 3), activation=self.activation()), 
            # Rescaling asks for TensorFlow, which is not there in the jobs of other backends.
            lambda: layers.Rescaling(0.5, 0.1) if keras.backend.backend() == "tensorflow" else layers.ReLU(),
            lambda: layers.PReLU(shared_axes=list(range(1, self.dims + 1))), lambda: layers.Dropout(0.0),
            lambda: layers.Identity(), lambda: layers.GaussianNoise(0.0),
        )()  # fmt: skip

    def any_layer(self, x):
        if self.masked:  # which convolutions drop
            return self.pick(self.normalization, self.pointwise)(x)
        return self.pick(
            self.convolution, self.convolution, self.convolution, self.depthwise, self.transposed, self.pooling,
            self.pooling, self.upsampling, self.padding, self.cropping, self.normalization, self.normalization,
            self.pointwise, self.pointwise,
        )(x)  # fmt: skip

    # ---- parts of the graph

    def applied(self, x, make=None):
        """A layer of `x` whose output has no axis without rows, and is not too large."""
        for _ in range(50):
            layer = (make or self.any_layer)(x)
            try:
                shape = layer.compute_output_shape(x.shape)
                fits = all(1 <= n for n in shape[1:]) and _size(shape) <= MOST
                if fits:
                    return layer(x)
            except (ValueError, ZeroDivisionError, TypeError):  # Keras knows better
                pass
        return x

    def merged(self, x):
        """Another tensor of the same extents, or one made so, beside `x`."""
        others = [t for t in self.tensors if t.shape[:-1] == x.shape[:-1]]
        other = self.pick(*others)
        if self.chance(0.4):
            return layers.Concatenate()([x, other])
        if other.shape != x.shape:
            other = layers.Dense(x.shape[-1])(other)
        kind = self.pick("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "+", "*", "-")
        if kind in "+*-":
            return {"+": lambda: x + other, "*": lambda: x * other, "-": lambda: other - 0.5 * x}[kind]()
        return getattr(layers, kind)()([x, other])

    def gated(self, x):
        """Channels of `x` times numbers made of all positions."""
        pool = self.layer(self.pick("GlobalAveragePooling", "GlobalMaxPooling"))
        gate = layers.Dense(x.shape[-1], activation="sigmoid")(pool(keepdims=True)(x))
        return self.pick(lambda: layers.Multiply()([x, gate]), lambda: x * gate, lambda: layers.Add()([gate, x]))()

    def function(self, x):
        ops = keras.ops
        return self.pick(
            lambda: ops.tanh(x), lambda: ops.square(x) * 0.3, lambda: ops.sigmoid(x) - 0.5, lambda: 2.0 * x,
            lambda: ops.maximum(x, 0.1), lambda: ops.abs(x), lambda: 1.0 - x,
        )()  # fmt: skip

    def shared(self, x):
        """A model inside of the model, used once or twice."""
        inputs = keras.Input(x.shape[1:])
        y = inputs
        for _ in range(self.pick(1, 2, 3)):
            y = self.applied(y)
        if self.chance(0.3) and y.shape == inputs.shape:
            y = y + inputs
        if y is inputs:
            return x
        inner = keras.Model(inputs, y)
        first = inner(x)
        if self.chance(0.5):
            others = [t for t in self.tensors if t.shape == x.shape]
            return layers.Concatenate()([first, inner(self.pick(*others, x))])
        return first

    def shared_layer(self, x):
        """One convolution of two tensors."""
        others = [t for t in self.tensors if t.shape[-1] == x.shape[-1]]
        layer = self.layer("Conv")(x.shape[-1], self.each(1, 3), padding="same")
        self.tensors.append(layer(self.pick(*others)))
        return layer(x)

    def end(self, x):
        if self.chance(0.2):
            return self.applied(x, self.pick(self.normalization, self.pointwise))
        return x

    def made(self):
        """The model."""
        most = {1: 40, 2: 17, 3: 8}[self.dims]
        inputs = [keras.Input((*(self.random.randint(4, most) for _ in range(self.dims)), self.pick(1, 2, 3)))]
        if self.chance(0.15) and not self.masked:
            inputs.append(keras.Input((*inputs[0].shape[1:-1], 2)))
        x = inputs[0]
        if self.masked:
            channels = layers.Conv1D(x.shape[-1], self.pick(3, 4), padding="same")(x)
            x = layers.Add()([layers.Masking()(x), channels])
        self.tensors = [x, *inputs[1:]]
        for _ in range(self.random.randint(2, 8)):
            if self.chance(0.15):  # a branch
                x = self.pick(*self.tensors)
            step = self.pick(
                *[self.applied] * 6, self.merged, self.function, self.gated, self.shared, self.shared_layer
            )
            if self.masked and step in (self.gated, self.shared, self.shared_layer):
                step = self.applied
            y = step(x)
            if _size(y.shape) <= MOST:
                x = y
                self.tensors.append(x)
        if len(inputs) > 1:
            x = self.joined(x, inputs[1])
        way = self.pick("split", "split", "pool", "flat", "two")
        if way == "split" or (self.masked and way != "pool"):
            outputs = self.end(layers.Dense(2)(x) if self.masked else self.layer("Conv")(self.pick(1, 2, 3), 1)(x))
        elif way == "two":
            outputs = [self.layer("Conv")(2, 1)(x), self.end(self.layer("Conv")(3, 1, name="second")(x))]
        elif way == "pool":
            kind = "GlobalAveragePooling" if self.masked else self.pick("GlobalAveragePooling", "GlobalMaxPooling")
            outputs = self.end(layers.Dense(3)(self.layer(kind)()(x)))
        else:
            x = self.layer("Conv")(2, 1)(x)
            if self.chance(0.4):
                order = list(range(1, self.dims + 2))
                self.random.shuffle(order)
                x = layers.Permute(order)(x)
            outputs = self.end(layers.Dense(3)(layers.Flatten()(x)))
        return keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs)

    def joined(self, x, other):
        """Something of `x` and the second input, so that the model has a way from both."""
        if x.shape[:-1] == other.shape[:-1]:
            return layers.Concatenate()([x, other])
        pooled = self.layer("GlobalAveragePooling")(keepdims=True)(self.applied(other))
        return x + layers.Dense(x.shape[-1])(pooled)


def _size(shape):
    size = 1
    for extent in shape[1:]:
        size *= extent
    return size
