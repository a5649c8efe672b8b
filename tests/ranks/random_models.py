# SPDX-License-Identifier: Apache-2.0
"""Random functional models of layers that can be computed in parts, each made from a seed alone."""

import keras
from keras import layers
from random_layers import LayerMaker

MOST = 6000  # values of a tensor
MOST_ROWS = {1: 40, 2: 17, 3: 8}


class Maker(LayerMaker):
    """Grows a model.

    Args:
        seed: of everything that is chosen.
        several_groups: whether batch normalization is over several groups of ranks: then it is synchronized.
    """

    def __init__(self, seed, several_groups):
        super().__init__(seed, several_groups)
        self.tensors = []  # that a layer may read

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

    def same(self, channels):
        """A convolution that keeps the extents."""
        return self.layer("Conv")(channels, self.each(1, 2, 3, 4), padding="same", activation=self.activation())

    # ---- ways to go on from a tensor

    def merged(self, x):
        """Another tensor of the same extents, or one made so, beside `x`."""
        others = [t for t in self.tensors if t.shape[:-1] == x.shape[:-1]]
        other = self.pick(*others, x)
        if self.chance(0.4):
            return layers.Concatenate()([x, other])
        if other.shape != x.shape:
            other = layers.Dense(x.shape[-1])(other)
        kind = self.pick("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "+", "*", "-")
        if kind in "+*-":
            return {"+": lambda: x + other, "*": lambda: x * other, "-": lambda: other - 0.5 * x}[kind]()
        return getattr(layers, kind)()([x, other])

    def residual(self, x):
        """Two convolutions beside what they read."""
        y = self.same(x.shape[-1])(self.applied(self.same(self.pick(2, 3))(x), self.pointwise))
        return self.pick(lambda: layers.Add()([x, y]), lambda: y + x, lambda: layers.Concatenate()([x, y]))()

    def dense_block(self, x):
        """Each convolution reads what all those before it have made."""
        for _ in range(self.pick(2, 3)):
            x = layers.Concatenate()([x, self.same(self.filters())(x)])
        return x

    def hourglass(self, x):
        """Down, on, up again, and beside what was there before."""
        strides = [self.pick(1, 2, 3) for _ in range(self.dims)]
        down = self.pick(
            self.layer("Conv")(self.pick(2, 3), self.each(1, 2, 3), strides=strides, padding="same"),
            self.layer("MaxPooling")(strides, padding="same"),
        )(x)
        transposed = getattr(layers, f"Conv{self.dims}DTranspose")
        up = self.pick(
            transposed(self.pick(1, 2), self.each(1, 2, 3, 4), strides=strides, padding="same"),
            self.layer("UpSampling")(strides[0] if self.dims == 1 else strides),
        )
        y = up(self.applied(down, self.pick(self.pointwise, self.normalization)))
        cut = [(0, extent - rows) for extent, rows in zip(y.shape[1:-1], x.shape[1:-1], strict=True)]
        if any(after < 0 for _, after in cut):
            return x
        y = self.layer("Cropping")(cut[0] if self.dims == 1 else cut)(y)
        return layers.Concatenate()([x, y])

    def bottleneck(self, x):
        """All of it as a few numbers, and images of these."""
        extents = [self.random.randint(1, MOST_ROWS[self.dims]) for _ in range(self.dims)]
        x = layers.Dense(4, activation="tanh")(layers.Flatten()(x))
        shape = (*extents, self.pick(1, 2))
        return layers.Reshape(shape)(layers.Dense(_size((None, *shape)))(x))

    def gated(self, x):
        """Channels of `x` times numbers made of all positions."""
        pool = self.layer(self.pick("GlobalAveragePooling", "GlobalMaxPooling"))
        gate = layers.Dense(x.shape[-1], activation="sigmoid")(pool(keepdims=True)(x))
        return self.pick(lambda: layers.Multiply()([x, gate]), lambda: x * gate, lambda: layers.Add()([gate, x]))()

    def modulated(self, x):
        """Channels of `x` times, and plus, numbers made of vectors."""
        vectors = [t for t in self.tensors if len(t.shape) == 2]
        if not vectors:
            return self.gated(x)
        shape = (*[1] * self.dims, x.shape[-1])
        scale, offset = (layers.Reshape(shape)(layers.Dense(x.shape[-1])(self.pick(*vectors))) for _ in "ab")
        return x * (1.0 + scale) + offset

    def function(self, x):
        if self.chance(0.4):
            return self.of_positions(x)
        ops = keras.ops
        return self.pick(
            lambda: ops.tanh(x), lambda: ops.square(x) * 0.3, lambda: ops.sigmoid(x) - 0.5, lambda: 2.0 * x,
            lambda: ops.maximum(x, 0.1), lambda: ops.abs(x), lambda: 1.0 - x, lambda: ops.where(x > 0, x, 0.1 * x),
            lambda: ops.concatenate([x, -x], axis=-1), lambda: ops.clip(x, -1, 1), lambda: ops.leaky_relu(x),
            lambda: ops.softmax(x, axis=-1), lambda: x * ops.stop_gradient(ops.sigmoid(x)), lambda: x / 2.0,
            lambda: ops.exp(-ops.square(x)), lambda: ops.cast(x > 0.2, x.dtype) * x, lambda: ops.log1p(ops.abs(x)),
            lambda: ops.logaddexp(x, 0.5), lambda: ops.silu(x), lambda: x**2,
        )()  # fmt: skip

    def of_positions(self, x):
        """Operations that move positions, or read several."""
        ops, (rows, *_, channels) = keras.ops, x.shape[1:]
        space, others = list(range(1, self.dims + 1)), [(0, 0)] * self.dims
        again = [0, *space[::-1], self.dims + 1]
        return self.pick(
            lambda: x * ops.mean(x, axis=space, keepdims=True), lambda: x - ops.max(x, axis=space, keepdims=True),
            lambda: x / (1.0 + ops.std(x + 0.1 * ops.tanh(x), axis=space, keepdims=True)),
            lambda: x + 0.1 * ops.sum(x, axis=self.pick(*space), keepdims=True), lambda: x[..., :1] * x,
            lambda: ops.concatenate(ops.split(x, channels, axis=-1)[::-1], axis=-1), lambda: ops.flip(x, axis=1) + x,
            lambda: x[:, self.pick(0, 1, 2) :: self.pick(1, 2, 3)] if rows > 2 else x, lambda: x[:, : rows // 2 + 1],
            lambda: ops.pad(x, [(0, 0), (self.pick(0, 1, 3), 1), *others], constant_values=0.5),
            lambda: ops.max(ops.reshape(x, (-1, *x.shape[1:-1], channels, 1)), axis=-1),
            lambda: ops.transpose(x, again), lambda: ops.expand_dims(ops.tanh(x[..., 0]), -1),
            lambda: ops.roll(x, 2, axis=self.pick(*space)),
            lambda: layers.Lambda(lambda y: y * keras.ops.sigmoid(y))(x),
            lambda: self.layer("SpatialDropout")(0.0)(x), lambda: ops.softmax(x, axis=1) * rows,
        )()  # fmt: skip

    # ---- models and layers that are used several times

    def inner(self, x):
        """A model of one tensor like `x`, or None."""
        shape = x.shape[1:]
        if self.chance(0.4):
            y = keras.Input(shape)
            model = keras.Sequential([y])
            for _ in range(self.pick(1, 2, 3)):
                layer = self.any_layer(y)
                try:
                    after = layer.compute_output_shape(y.shape)
                    if all(1 <= n for n in after[1:]) and _size(after) <= MOST:
                        model.add(layer)
                except (ValueError, ZeroDivisionError, TypeError):
                    continue
                y = model.outputs[0]
            return model if model.layers else None
        inputs = y = keras.Input(shape)
        for _ in range(self.pick(1, 2, 3)):
            y = self.applied(y)
        if self.chance(0.3) and y.shape == inputs.shape:
            y = y + inputs
        if self.chance(0.3) and (deeper := self.inner(y)) is not None:
            y = deeper(y)
        return None if y is inputs else keras.Model(inputs, y)

    def shared(self, x):
        """A model inside of the model, used once or twice."""
        inner = self.inner(x)
        if inner is None:
            return x
        first = inner(x)
        if self.chance(0.5):
            others = [t for t in self.tensors if t.shape == x.shape]
            return layers.Concatenate()([first, inner(self.pick(*others, x))])
        return first

    def pair(self, x):
        """A model inside of the model with two inputs and two outputs."""
        other = self.pick(*[t for t in self.tensors if len(t.shape) == len(x.shape)], x)
        a, b = keras.Input(x.shape[1:]), keras.Input(other.shape[1:])
        first, second = self.applied(a), self.applied(self.same(2)(b))
        if first.shape[:-1] == second.shape[:-1]:
            first = layers.Concatenate()([first, second])
        if first is a:
            first = self.same(2)(a)
        first, second = keras.Model([a, b], [first, second])([x, other])
        self.tensors.append(second)
        return first

    def shared_layer(self, x):
        """One layer of two tensors, of other extents as may be."""
        others = [t for t in self.tensors if t.shape[-1] == x.shape[-1] and len(t.shape) == len(x.shape)]
        layer = self.pick(
            lambda: self.layer("Conv")(x.shape[-1], self.each(1, 3), padding="same"),
            lambda: layers.Dense(x.shape[-1]), lambda: layers.LayerNormalization(),
            lambda: layers.BatchNormalization(synchronized=self.several_groups),
        )()  # fmt: skip
        self.tensors.append(layer(self.pick(*others, x)))
        return layer(x)

    # ---- the whole

    def end(self, x):
        if self.chance(0.2):
            return self.applied(x, self.pick(self.normalization, self.pointwise))
        return x

    def made(self):
        """The model."""
        inputs = self.inputs()
        x = inputs[0]
        if self.masked:
            channels = self.layer("Conv")(x.shape[-1], self.pick(3, 4), padding="same")(x)
            x = layers.Add()([layers.Masking()(x), channels])
        self.tensors = [x, *inputs[1:]]
        for _ in range(self.random.randint(2, 8)):
            if self.chance(0.15):  # a branch
                x = self.pick(*(t for t in self.tensors if len(t.shape) > 2))
            step = self.pick(
                *[self.applied] * 9, self.merged, self.merged, self.function, self.function, self.gated, self.modulated,
                self.residual, self.dense_block, self.hourglass, self.shared, self.shared, self.pair,
                self.shared_layer, *[self.bottleneck] * self.chance(0.3),
            )  # fmt: skip
            if self.masked and self.chance(0.7):
                step = self.pick(self.applied, self.merged, self.function)
            y = step(x)
            if _size(y.shape) <= MOST:
                x = y
                self.tensors.append(x)
        for other in inputs[1:]:
            x = self.joined(x, other)
        outputs = self.outputs(x)
        return keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs)

    def inputs(self):
        most = MOST_ROWS[self.dims]
        least = self.pick(1, 4, 4, 4)
        extents = [tuple(self.random.randint(least, most) for _ in range(self.dims)) for _ in "ab"]
        inputs = [keras.Input((*extents[0], self.pick(1, 2, 3)))]
        if self.chance(0.2) and not self.masked:
            inputs.append(keras.Input((*self.pick(*extents), 2)))
        if self.chance(0.15):
            inputs.append(keras.Input((3,)))
        return inputs

    def outputs(self, x):
        way = self.pick("split", "split", "pool", "flat", "several")
        if way == "split" or (self.masked and way == "flat"):
            return self.end(layers.Dense(2)(x) if self.masked else self.layer("Conv")(self.filters(), 1)(x))
        if way == "several":
            made = [layers.Dense(2) if self.masked else self.layer("Conv")(n, 1, name=f"out{n}") for n in (2, 3, 4)]
            return [made[0](x), self.end(made[1](x)), *[made[2](self.function(x))] * self.chance(0.3)]
        if way == "pool":
            kind = "GlobalAveragePooling" if self.masked else self.pick("GlobalAveragePooling", "GlobalMaxPooling")
            return self.end(layers.Dense(3)(self.layer(kind)()(x)))
        x = self.layer("Conv")(2, 1)(x)
        if self.chance(0.4):
            order = list(range(1, self.dims + 2))
            self.random.shuffle(order)
            x = layers.Permute(order)(x)
        return self.end(layers.Dense(3)(layers.Flatten()(x)))

    def joined(self, x, other):
        """Something of `x` and another input, so that the model has a way from both."""
        if x.shape[:-1] == other.shape[:-1]:
            return layers.Concatenate()([x, other])
        if len(other.shape) == 2:
            pooled = layers.Reshape((*[1] * self.dims, 3))(other)
        else:
            pooled = self.layer("GlobalAveragePooling")(keepdims=True)(self.applied(other))
        return x + layers.Dense(x.shape[-1])(pooled)


def _size(shape):
    size = 1
    for extent in shape[1:]:
        size *= extent
    return size
