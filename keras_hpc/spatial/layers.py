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

from keras_hpc.spatial import geometry

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
# They mix positions as they like, so each rank gets all of them.
WHOLE = (layers.Flatten, layers.Reshape, layers.Permute)

_MERGES = (layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum)
_POINTWISE = (
    *_MERGES,
    *(layers.Activation, layers.ReLU, layers.LeakyReLU, layers.ELU, layers.Dense, layers.Identity, layers.Rescaling),
    layers.Masking,
    *(layers.Dropout, layers.GaussianNoise, layers.GaussianDropout, layers.AlphaDropout),
)
# On the last axis only.
_ON_CHANNELS = tuple(
    getattr(layers, name)
    for name in (
        *("Concatenate", "LayerNormalization", "Normalization", "RMSNormalization", "Softmax", "UnitNormalization"),
    )
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
_OPERATIONS_ON_CHANNELS = ("Concatenate", "LogSoftmax", "Softmax")  # on the last axis only

Layer = TypeVar("Layer", bound=type)


def pointwise(layer_class: Layer) -> Layer:
    """Say that a layer of your own computes each position by itself, so that samples may be split there.

    A class decorator. The layer maps tensors (batch, ..., channels) to a tensor of the same spatial extents, and each
    output position depends on the same position of the inputs only.

    Raises:
        TypeError: it is not a class of layers.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, layers.Layer)):
        raise TypeError(f"`pointwise` marks a class derived from keras.layers.Layer. Received: {layer_class!r}")
    layer_class._keras_hpc_pointwise = layer_class  # type: ignore[attr-defined]
    return layer_class


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
    where sums of 16 bits would be rounded twice.

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
    kind = type(layer)
    if getattr(kind, "_keras_hpc_pointwise", None) is kind:
        return True
    on_channels = getattr(layer, "axis", None) in (-1, rank - 1, [-1], [rank - 1], (-1,), (rank - 1,))
    if not isinstance(layer, layers.Layer):
        known = kind.__module__.startswith("keras.")
        named = kind.__name__ in _POINTWISE_OPERATIONS
        return known and (named or (kind.__name__ in _OPERATIONS_ON_CHANNELS and on_channels))
    if kind is layers.Normalization and layer.axis == ():  # by one mean of everything, which is known
        return True
    if kind in _ON_CHANNELS:
        return on_channels
    if kind is layers.PReLU:
        return set(range(1, rank - 1)) <= set(layer.shared_axes or ())
    return kind in _POINTWISE


def fault(layer: Any, rank: int) -> str | None:
    """Return why a layer that would be split cannot be, whatever its class allows; or None."""
    if reason := fault_of_format(layer):
        return reason
    if getattr(layer, "activity_regularizer", None) is not None:
        return "has an activity_regularizer, which would see a part only"
    if getattr(layer, "noise_shape", None) is not None:
        return "has a noise_shape"
    if type(layer) is layers.BatchNormalization and layer.axis not in (-1, rank - 1):
        return f"normalizes along axis {layer.axis}, not along the channels"
    interpolation = getattr(layer, "interpolation", "nearest")
    if type(layer) in UPSAMPLING and interpolation not in ("nearest", "bilinear"):
        return f"interpolates by {interpolation!r}; expected 'nearest' or 'bilinear'"
    if type(layer) is layers.Resizing and (
        layer.crop_to_aspect_ratio or layer.pad_to_aspect_ratio or getattr(layer, "antialias", False)
    ):
        return "keeps an aspect ratio, or filters before it resizes"
    if getattr(layer, "quantization_mode", None) is not None:
        return "is quantized"
    return _fault_of_activation(getattr(layer, "activation", None), rank)


def fault_of_format(layer: Any) -> str | None:
    """Return what is wrong with a layer whose channels come before its rows; None: they come last."""
    if getattr(layer, "data_format", "channels_last") == "channels_last":
        return None
    return (
        "has its channels first; expected data_format='channels_last', or for all layers "
        "keras.config.set_image_data_format('channels_last') before the model is made"
    )


def fault_of_dtype(layer: Any, dtype: str) -> str | None:
    """Return what is wrong with a layer of `WINDOWED` for tensors of a dtype; None: nothing."""
    if getattr(layer, "interpolation", "nearest") == "nearest" or "int" not in dtype:
        return None
    return f"interpolates {dtype}, and a part rounds ties in another way; expected floats, as of a Rescaling before it"


def _fault_of_activation(activation: Any, rank: int) -> str | None:
    known: Callable[..., Any] | None = getattr(keras.activations, getattr(activation, "__name__", ""), None)
    if activation is None or known is activation:
        return None
    if isinstance(activation, layers.Layer) and is_pointwise(activation, rank) and fault(activation, rank) is None:
        return None
    return f"has an activation that is not one of Keras' and may mix positions, {activation!r}"
