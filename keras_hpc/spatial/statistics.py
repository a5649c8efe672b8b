# SPDX-License-Identifier: Apache-2.0
"""Numbers of samples of which each rank has a part: group and layer normalization, and maxima.

Of each sample, rank q of a group has the share s_q of the positions, with mean m_q and variance v_q. Together they have

    mean = sum s_q m_q        variance = sum s_q (v_q + (m_q - mean)^2)

All ranks get all m_q and v_q, so nothing cancels, and the gradient of what they get goes back to its owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import layers, ops

Gather = Callable[[Any], Any]  # (batch, 1, n) of this rank to (batch, ranks, n) of all


def reduced_axes(layer: Any, rank: int) -> frozenset[int] | None:
    """Return over which axes of a tensor with `rank` axes a layer normalizes; None: it is no layer of this kind."""
    if type(layer) is layers.GroupNormalization:
        return frozenset(range(1, rank)) if layer.axis in (-1, rank - 1) else None
    if type(layer) is layers.LayerNormalization and not layer.rms_scaling:
        axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
        return frozenset(axis % rank for axis in axes)
    return None


def normalized(
    layer: Any, shares: Sequence[float], rows: Sequence[slice], gather: Gather, x: Any, *_: Any, **__: Any
) -> Any:
    """Return this rank's part of a layer's output.

    Args:
        layer: for which `reduced_axes` knows the axes.
        shares: of each rank of the group, of the positions; their sum is 1.
        rows: of each axis of the tensor, this rank's.
        gather: gives the numbers of all ranks.
        x: this rank's part of the input, (batch, ..., channels).
    """
    dtype = keras.backend.result_type(keras.backend.standardize_dtype(x.dtype), "float32")
    rank = len(x.shape)
    values = ops.cast(x, dtype)
    if type(layer) is layers.GroupNormalization:
        groups = layer.groups if layer.groups != -1 else x.shape[-1]
        values = ops.reshape(values, (-1, math.prod(x.shape[1:-1]), groups, x.shape[-1] // groups))
        axes = [1, 3]
    else:
        axes = sorted(reduced_axes(layer, rank) or ())
    mean, variance = combined(gather, shares, *ops.moments(values, axes=axes, keepdims=True))
    scale = ops.rsqrt(variance + layer.epsilon)
    y = ops.reshape((values - mean) * scale, ops.shape(x))
    for variable, apply in ((layer.gamma, ops.multiply), (layer.beta, ops.add)):
        if variable is not None:
            y = apply(y, ops.cast(_of_part(layer, variable, rows, rank), dtype))
    return ops.cast(y, layer.compute_dtype)


def combined(gather: Gather, shares: Sequence[float], mean: Any, variance: Any = None) -> Any:
    """Return the mean of all parts, and the variance if there is one, of those that each rank has of its part.

    Args:
        gather: gives the numbers of all ranks.
        shares: what the mean of each rank counts.
        mean: of this rank's positions, for each sample.
        variance: likewise.
    """
    kept = mean.shape[1:]
    size = math.prod(kept)
    given = [mean] if variance is None else [mean, variance]
    everyone = gather(ops.reshape(ops.stack(given, axis=1), (-1, 1, len(given) * size)))
    # Split, and not sliced: a compiler's program of slices and their gradients is several times as large.
    means, *variances = ops.split(everyone, len(given), axis=-1)
    weights = ops.reshape(ops.convert_to_tensor(list(shares), everyone.dtype), (1, -1, 1))
    mean = ops.sum(weights * means, axis=1, keepdims=True)
    of_all = ops.reshape(mean, (-1, *kept))
    if variance is None:
        return of_all
    (variances,) = variances
    return of_all, ops.reshape(ops.sum(weights * (variances + ops.square(means - mean)), axis=1), (-1, *kept))


def reduced(name: str, gather: Gather, shares: Sequence[float], copies: int, x: Any, axes: Sequence[int]) -> Any:
    """Return what an operation makes of the positions of all parts, with extents of 1 in their place.

    Args:
        name: of the operation, one of `operations.COMBINED`.
        gather: gives the numbers of all ranks.
        shares: of each rank of the group, of the positions; their sum is 1.
        copies: how many ranks have the same part.
        x: this rank's part.
        axes: over which it reduces; all those that are split are among them.
    """
    if name in ("Max", "Amax"):
        return maximum(gather, x, axes)
    if name in ("Min", "Amin"):
        return -maximum(gather, -x, axes)
    dtype = keras.backend.result_type(keras.backend.standardize_dtype(x.dtype), "float32")
    values = ops.cast(x, dtype)
    if name == "Sum":
        y = combined(gather, [1 / copies] * len(shares), ops.sum(values, axis=axes, keepdims=True))
    elif name == "Mean":
        y = combined(gather, shares, ops.mean(values, axis=axes, keepdims=True))
    else:
        mean, variance = combined(gather, shares, *ops.moments(values, axes=list(axes), keepdims=True))
        if name == "Moments":
            y = mean, variance
        else:
            y = ops.sqrt(variance) if name == "Std" else variance
    return keras.tree.map_structure(lambda one: ops.cast(one, x.dtype), y)


def maximum(gather: Gather, x: Any, axes: Sequence[int]) -> Any:
    """Return the maximum over the positions of all parts, with extents of 1 in their place.

    Its gradient goes to all positions that have it in equal shares, as it does on one rank.

    Args:
        gather: gives the numbers of all ranks.
        x: this rank's part.
        axes: over which it reduces; all those that are split are among them.
    """
    dtype = keras.backend.result_type(keras.backend.standardize_dtype(x.dtype), "float32")  # counts have no 16 bits
    values = ops.cast(x, dtype)
    mine = ops.max(values, axis=list(axes), keepdims=True)
    kept = mine.shape[1:]
    size = math.prod(kept)
    count = ops.sum(ops.cast(ops.equal(values, mine), dtype), axis=list(axes), keepdims=True)
    numbers = ops.concatenate([ops.reshape(mine, (-1, size)), ops.stop_gradient(ops.reshape(count, (-1, size)))], -1)
    everyone = gather(ops.reshape(numbers, (-1, 1, 2 * size)))
    maxima, counts = everyone[..., :size], everyone[..., size:]
    found = ops.stop_gradient(ops.max(maxima, axis=1, keepdims=True))
    counts = ops.stop_gradient(ops.where(ops.equal(maxima, found), counts, ops.zeros_like(counts)))
    # A zero with the gradient that the maximum has.
    change = ops.where(counts > 0, maxima - ops.stop_gradient(maxima), ops.zeros_like(maxima))
    share = counts / ops.maximum(ops.sum(counts, axis=1, keepdims=True), 1)
    return ops.cast(ops.reshape(found[:, 0] + ops.sum(share * change, axis=1), (-1, *kept)), x.dtype)


def masked_average(gather: Gather, x: Any, mask: Any) -> Any:
    """Return the average of each channel over the positions of all parts that a mask leaves, (batch, channels).

    Args:
        gather: gives the numbers of all ranks.
        x: this rank's part, (batch, rows, channels).
        mask: (batch, rows), which positions count.
    """
    dtype = keras.backend.result_type(keras.backend.standardize_dtype(x.dtype), "float32")
    counts = ops.expand_dims(ops.cast(mask, "bool"), -1)
    sums = ops.sum(ops.where(counts, ops.cast(x, dtype), 0), axis=1)
    numbers = ops.concatenate([sums, ops.sum(ops.cast(counts, dtype), axis=1)], axis=-1)
    total = ops.sum(gather(ops.expand_dims(numbers, 1)), axis=1)
    return ops.cast(total[:, :-1] / total[:, -1:], x.dtype)


def _of_part(layer: Any, variable: Any, rows: Sequence[slice], rank: int) -> Any:
    """Return the scale or offset of this rank's positions, so that it broadcasts."""
    if type(layer) is layers.GroupNormalization:
        return ops.convert_to_tensor(variable)
    axes = sorted(reduced_axes(layer, rank) or ())
    given = [axis % rank for axis in (layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis])]
    # Keras takes the numbers as they lie in memory, in whatever order the axes are given.
    whole = ops.reshape(variable, [variable.shape[given.index(axis)] for axis in axes])
    mine = whole[tuple(rows[axis] for axis in axes)]
    return ops.reshape(mine, [mine.shape[axes.index(axis)] if axis in axes else 1 for axis in range(rank)])
