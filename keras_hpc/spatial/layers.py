# SPDX-License-Identifier: Apache-2.0
"""What each kind of Keras' layers does to positions: reads windows, works on each by itself, or needs all of them.

Layers are told by their exact class: one that is derived from a layer of Keras may compute anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import keras
from keras import layers

from keras_hpc.spatial import asking, geometry, settings

CONVOLUTIONS = (
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D, layers.DepthwiseConv1D, layers.DepthwiseConv2D),
    *(layers.SeparableConv1D, layers.SeparableConv2D),
)
TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
MAX_POOLING = (layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D)
AVERAGE_POOLING = (layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D)
UPSAMPLING = (layers.UpSampling1D, layers.UpSampling2D, layers.UpSampling3D, layers.Resizing)
PADDING = (layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D)
CROPPING = (layers.Cropping1D, layers.Cropping2D, layers.Cropping3D)
WINDOWED = (*CONVOLUTIONS, *TRANSPOSED, *MAX_POOLING, *AVERAGE_POOLING, *UPSAMPLING, *PADDING, *CROPPING)

_BORDERED = (layers.Conv2D, layers.Conv3D)  # of whose `call` the convolution is a method

GLOBAL_AVERAGE = (layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D)
GLOBAL_MAX = (layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D)
_SPATIAL_DROPOUT = (layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)
# What they keep from one call to the next depends on how many calls there were, or on all positions.
_KEEPING = (layers.BatchNormalization, layers.SpectralNormalization)

MERGES = (layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum)
_POINTWISE = (
    *MERGES,
    *(layers.Activation, layers.ReLU, layers.LeakyReLU, layers.ELU, layers.Dense, layers.Identity, layers.Rescaling),
    layers.Masking,
    *(layers.Dropout, layers.GaussianNoise, layers.GaussianDropout, layers.AlphaDropout),
)
# On the last axis only.
_ON_CHANNELS = tuple(
    getattr(layers, name)
    for name in (*("LayerNormalization", "Normalization", "RMSNormalization", "UnitNormalization"),)
    if hasattr(layers, name)
)
# Operations on tensors, as `x + y` and `keras.ops.add(x, y)` make them. They have no public class.
_POINTWISE_OPERATIONS = frozenset(
    (
        *("Abs", "Absolute", "Add", "Arctan", "Cast", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Divide", "DivideNoNan"),
        *("Elu", "Equal", "Erf", "Exp", "Expm1", "Floor", "Gelu", "Greater", "GreaterEqual", "HardSigmoid", "HardSilu"),
        *("HardTanh", "Hypot", "LeakyRelu", "Less", "LessEqual", "Log", "Log10", "Log1p", "Log2", "LogSigmoid"),
        *("Logaddexp", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Multiply", "Negative"),
        *("NotEqual", "Power", "Reciprocal", "Relu", "Relu6", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Silu"),
        *("Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "Squareplus", "StopGradient", "Subtract", "Tan"),
        *("Tanh", "TanhShrink", "TrueDivide", "Where"),
    )
)

Layer = TypeVar("Layer", bound=type)


def pointwise(layer_class: Layer) -> Layer:
    """Say that a layer of your own computes each position by itself, so that samples may be split there.

    A class decorator. The layer maps tensors (batch, ..., channels) to a tensor of the same spatial extents, and each
    output position depends on the same position of the inputs only. It is tried on small samples when a model is
    planned, and refused if it does not.

    Raises:
        TypeError: it is not a class of layers.
    """
    return _marked(layer_class, "pointwise")


def whole(layer_class: Layer) -> Layer:
    """Say that a layer of your own needs all positions, so that every rank of a group gets them and computes it.

    A class decorator, for layers that mix positions. What follows may be split again.

    Raises:
        TypeError: it is not a class of layers.
    """
    return _marked(layer_class, "whole")


def _marked(layer_class: Layer, mark: str) -> Layer:
    if not (isinstance(layer_class, type) and issubclass(layer_class, layers.Layer)):
        raise TypeError(f"`{mark}` marks a class derived from keras.layers.Layer. Received: {layer_class!r}")
    layer_class._keras_hpc_mark = layer_class, mark  # type: ignore[attr-defined]
    return layer_class


def mark_of(layer: Any) -> str | None:
    """Return how a layer's own class is marked: "pointwise", "whole", or None."""
    of, mark = getattr(type(layer), "_keras_hpc_mark", (None, None))
    return mark if of is type(layer) else None


def core_of(layer: Any) -> Any:
    """Return the layer that works on positions: that which a SpectralNormalization wraps, or the layer itself."""
    return layer.layer if type(layer) is layers.SpectralNormalization else layer


def is_windowed(layer: Any) -> bool:
    """Return whether a layer reads windows."""
    return type(core_of(layer)) in WINDOWED


def is_over_time(layer: Any) -> bool:
    """Return whether a layer computes each step of the first axis by itself."""
    if type(layer) is not layers.TimeDistributed:
        return False
    return not any(isinstance(one, _KEEPING) for one in layer.layer._flatten_layers())


def draws_alike(layer: Any, split: frozenset[int]) -> bool:
    """Return whether a layer draws the same random numbers for all positions along the axes that are split."""
    shape = getattr(layer, "noise_shape", None)
    ones = type(layer) is layers.Dropout and shape is not None and all(shape[axis] == 1 for axis in split)
    return type(layer) in _SPATIAL_DROPOUT or ones


def axis_of(layer: Any, index: int, extent: int, outputs: int) -> geometry.Axis:
    """Return what a layer of `WINDOWED` does along a spatial axis.

    Args:
        layer: the layer.
        index: of the axis, 0 for the first spatial one.
        extent: rows of its input.
        outputs: rows of its output.
    """

    def item(value: Any) -> Any:
        return value[index] if isinstance(value, (tuple, list)) else value

    kind = type(layer)
    if kind in PADDING or kind in CROPPING:
        sides = layer.padding if kind in PADDING else layer.cropping
        before = sides[index][0] if isinstance(sides[0], (tuple, list)) else sides[0]
        return geometry.Windowed(extent, outputs, before=before if kind in PADDING else -before)
    if kind in UPSAMPLING:
        reach = 0 if getattr(layer, "interpolation", "nearest") == "nearest" else 1
        factor = outputs // extent if kind is layers.Resizing else item(layer.size)
        return geometry.Upsampled(extent, factor, reach)
    if kind in TRANSPOSED:
        kernel, stride, dilation = item(layer.kernel_size), item(layer.strides), item(layer.dilation_rate)
        extra = item(layer.output_padding)
        return geometry.Transposed.of_layer(extent, outputs, kernel, stride, dilation, layer.padding, extra)
    pooling = kind in MAX_POOLING or kind in AVERAGE_POOLING
    kernel = item(layer.pool_size if pooling else layer.kernel_size)
    dilation = 1 if pooling else item(layer.dilation_rate)
    return geometry.Windowed.of_layer(extent, kernel, item(layer.strides), dilation, layer.padding)


def settings_of(layer: Any, axes: Sequence[geometry.Axis], rows: Sequence[int]) -> dict[str, Any]:
    """Return the attributes that a layer of `WINDOWED` has while it computes a window of `rows`, padding included."""
    kind = type(layer)
    if kind is layers.Resizing:
        sizes = [n * axis.factor for n, axis in zip(rows, axes, strict=True) if isinstance(axis, geometry.Upsampled)]
        return dict(zip(("height", "width"), sizes, strict=True))
    if kind in TRANSPOSED:
        return {"padding": "valid", "output_padding": None}
    return {} if kind in (*UPSAMPLING, *PADDING, *CROPPING) else {"padding": "valid"}


def padding_of(layer: Any, axes: Sequence[geometry.Axis]) -> float | Literal["edge"]:
    """Return what a layer of `WINDOWED` sees outside of the image: a number, or the edge again and again.

    Keras on PyTorch repeats the edge in an AveragePooling whose padding is longer on one side, and takes averages of
    whole windows; else, and on other backends, an average leaves the padding out.
    """
    if type(layer) in MAX_POOLING:
        return -math.inf
    if averages_in_image(layer) and keras.backend.backend() == "torch":
        sides = [axis.sides for axis in axes if isinstance(axis, geometry.Windowed)]
        return "edge" if any(before != after for before, after in sides) else 0.0
    return 0.0


def adds_borders(
    layer: Any, axes: Sequence[geometry.Axis], grid: geometry.Grid, have: frozenset[int], want: frozenset[int]
) -> bool:
    """Return whether a layer is computed on own rows, and what other parts' rows add to its output is added to that.

    So the part's input is not copied into a larger tensor, and the framework pads as it does on one rank: it may have
    better programs for that. Not on PyTorch, where autograd copies a gradient behind whatever is added in place; nor
    where sums of 16 bits would be rounded twice, or the rows of others would be needed again backward.

    Args:
        layer: of `WINDOWED`.
        axes: what it does along each spatial axis.
        grid: the ranks of a group.
        have: along which axes its input is split.
        want: along which axes its output is.
    """
    if type(layer) not in _BORDERED or layer.padding != "same" or have != want or len(have) != 1:
        return False
    if keras.backend.backend() == "torch" or layer.compute_dtype not in ("float32", "float64"):
        return False
    if settings.is_recomputed(layer):
        return False
    index = min(have) - 1
    axis, parts = axes[index], grid.parts[index]
    return isinstance(axis, geometry.Windowed) and all(
        geometry.borders(axis, parts, part) is not None for part in range(parts)
    )


def averages_in_image(layer: Any) -> bool:
    """Return whether a layer is an average of what lies in the image, where its windows reach out of it."""
    return type(layer) in AVERAGE_POOLING and layer.padding == "same"


def is_pointwise(layer: Any, rank: int) -> bool:
    """Return whether a layer or operation computes each position of tensors with `rank` axes by itself."""
    layer = core_of(layer)
    kind = type(layer)
    if not isinstance(layer, layers.Layer):
        return kind.__module__.startswith("keras.") and kind.__name__ in _POINTWISE_OPERATIONS
    if kind in _ON_CHANNELS:
        return getattr(layer, "axis", None) in (-1, rank - 1, [-1], [rank - 1], (-1,), (rank - 1,))
    if kind is layers.PReLU:
        return set(range(1, rank - 1)) <= set(layer.shared_axes or ())
    return kind in _POINTWISE and getattr(layer, "noise_shape", None) is None


def fault(layer: Any, rank: int) -> str | None:
    """Return why a layer that would be split cannot be, whatever its class allows; or None."""
    layer = core_of(layer)
    if reason := fault_of_format(layer):
        return reason
    if type(layer) is layers.BatchNormalization and layer.axis not in (-1, rank - 1):
        return f"normalizes along axis {layer.axis}, not along the channels"
    if getattr(layer, "quantization_mode", None) is not None:
        return "is quantized"
    return _fault_of_activation(getattr(layer, "activation", None), rank)


def fault_of_regularizer(layer: Any) -> str | None:
    """Return what is wrong with a layer, whatever its kind, that regularizes an output, or one inside; None: none."""
    every = layer._flatten_layers() if isinstance(layer, layers.Layer) else []
    if all(getattr(one, "activity_regularizer", None) is None for one in every):
        return None
    return "has an activity_regularizer, which would see a part only"


def interpolates_elsewhere(layer: Any, x: Any, output: Any) -> bool:
    """Return whether a layer of `UPSAMPLING` makes a row of other rows than of its neighbours, or rounds integers.

    Args:
        layer: of `WINDOWED`.
        x: what it reads.
        output: what it gives.
    """
    if type(layer) not in UPSAMPLING:
        return False
    interpolation = getattr(layer, "interpolation", "nearest")
    if interpolation not in ("nearest", "bilinear") or (interpolation == "bilinear" and "int" in x.dtype):
        return True
    if type(layer) is not layers.Resizing:
        return False
    filters = layer.crop_to_aspect_ratio or layer.pad_to_aspect_ratio or getattr(layer, "antialias", False)
    return bool(filters) or any(m % n for n, m in zip(x.shape[1:-1], output.shape[1:-1], strict=True))


def fault_of_format(layer: Any) -> str | None:
    """Return what is wrong with a layer whose channels come before its rows; None: they come last."""
    if getattr(layer, "data_format", "channels_last") == "channels_last":
        return None
    return (
        "has its channels first; expected data_format='channels_last', or for all layers "
        "keras.config.set_image_data_format('channels_last') before the model is made"
    )


def _fault_of_activation(activation: Any, rank: int) -> str | None:
    known: Callable[..., Any] | None = getattr(keras.activations, getattr(activation, "__name__", ""), None)
    if activation is None or known is activation:
        return None
    if isinstance(activation, layers.Layer) and is_pointwise(activation, rank) and fault(activation, rank) is None:
        return None
    if isinstance(activation, layers.Layer) or not callable(activation):
        return f"has an activation that is not one of Keras' and may mix positions, {activation!r}"
    found = asking.fault_of_function(activation, rank)
    return found and f"has an activation that {found}, {activation!r}"
