# SPDX-License-Identifier: Apache-2.0
"""Random layers that can be computed in parts, each chosen by a seed alone."""

import random

import keras
from keras import layers


class LayerMaker:
    """Makes layers for a tensor.

    Args:
        seed: of everything that is chosen.
        several_groups: whether batch normalization is over several groups of ranks: then it is synchronized.
    """

    def __init__(self, seed, several_groups):
        self.random = random.Random(seed)
        self.several_groups = several_groups
        self.dims = self.random.choice((1, 2, 2, 2, 3))
        self.masked = self.dims < 3 and self.random.random() < 0.2

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

    def filters(self):
        """How many; of one, PyTorch often cannot compute the gradient of its kernel."""
        return self.pick(2, 3, 4) if keras.backend.backend() == "torch" and self.chance(0.9) else self.pick(1, 2, 3)

    # ---- layers that read windows

    def convolution(self, x):
        dilation = self.each(1, 2, 3) if self.chance(0.3) else 1
        strides = self.each(1, 2, 3) if dilation == 1 and self.chance(0.5) else 1
        padding = self.pick("same", "same", "valid", *(["causal"] if self.dims == 1 else []))
        channels = x.shape[-1]
        groups = self.pick(*(n for n in (1, 1, 1, 2, 3) if channels % n == 0))
        return self.layer("Conv")(
            groups * self.filters(), self.each(1, 2, 3, 4, 5), strides=strides, padding=padding,
            dilation_rate=dilation, groups=groups, activation=self.activation(), use_bias=self.chance(0.7),
        )  # fmt: skip

    def depthwise(self, x):
        if self.dims == 3:
            return self.convolution(x)
        kernel, strides, padding = self.each(1, 2, 3, 4, 5), self.pick(1, 1, 2, 3), self.pick("same", "valid")
        how = {"strides": strides, "padding": padding, "depth_multiplier": self.pick(1, 2)}
        if strides == 1:
            how["dilation_rate"] = self.pick(1, 1, 2, 3)
        if self.chance(0.5):
            return self.layer("SeparableConv")(self.pick(1, 2, 4), kernel, activation=self.activation(), **how)
        return self.layer("DepthwiseConv")(kernel, activation=self.activation(), **how)

    def transposed(self, x):
        kernel, strides = self.each(1, 2, 3, 4, 5), self.each(1, 2, 3)
        extra = None
        if self.chance(0.2) and strides != 1:
            each = [strides] * self.dims if isinstance(strides, int) else strides
            extra = tuple(self.random.randrange(stride) for stride in each)
            extra = extra[0] if isinstance(strides, int) or self.dims == 1 else extra
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
            if self.chance(0.4):
                height, width = (extent * self.pick(1, 2, 3) for extent in x.shape[1:3])
                return layers.Resizing(height, width, interpolation=self.pick("nearest", "bilinear"))
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
        spatial = [*range(1, rank - (keras.backend.backend() != "torch"))]
        kinds = [
            lambda: layers.BatchNormalization(
                momentum=0.9, synchronized=self.several_groups or self.chance(0.5), scale=self.chance(0.8)
            ),
            lambda: layers.LayerNormalization(), lambda: layers.UnitNormalization(axis=-1),
        ]  # fmt: skip
        if not self.masked and rank > 2:
            kinds += [
                lambda: layers.GroupNormalization(self.pick(*(n for n in (1, 2, 3, -1) if channels % n == 0))),
                # On PyTorch, Keras 3.15 normalizes over the last axes only.
                lambda: layers.LayerNormalization(axis=self.pick([*range(1, rank)], spatial)),
            ]
            if hasattr(layers, "RMSNormalization"):
                kinds += [lambda: layers.RMSNormalization()]
        return self.pick(kinds[0], *kinds)()

    def pointwise(self, x):
        return self.pick(
            lambda: layers.ReLU(), lambda: layers.LeakyReLU(), lambda: layers.ELU(),
            lambda: layers.ReLU(6) if self.masked else layers.Softmax(), lambda: layers.Activation("tanh"),
            lambda: layers.Dense(self.pick(2, 3), activation=self.activation()), 
            lambda: layers.Rescaling(0.5, 0.1),
            lambda: layers.PReLU(shared_axes=list(range(1, self.dims + 1))), lambda: layers.Dropout(0.0),
            lambda: layers.Identity(), lambda: layers.GaussianNoise(0.0),
        )()  # fmt: skip

    def any_layer(self, x):
        if self.masked and self.chance(0.8):  # convolutions drop masks
            return self.pick(self.normalization, self.pointwise)(x)
        return self.pick(
            self.convolution, self.convolution, self.convolution, self.depthwise, self.transposed, self.pooling,
            self.pooling, self.upsampling, self.padding, self.cropping, self.normalization, self.normalization,
            self.pointwise, self.pointwise,
        )(x)  # fmt: skip
