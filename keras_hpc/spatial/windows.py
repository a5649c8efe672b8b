# SPDX-License-Identifier: Apache-2.0
"""Computes a layer on the window that a part has of its input, so that exactly the part's rows come out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from keras_hpc.spatial import geometry
from keras_hpc.spatial import layers as kinds
from keras_hpc.spatial.settings import again_in, with_settings


def compute(
    layer: Any,
    axes: Sequence[geometry.Axis],
    split: frozenset[int],
    grid: geometry.Grid,
    place: Sequence[int],
    x: Any,
    call: Callable[[Any], Any],
) -> Any:
    """Return this part's rows of a layer's output.

    Args:
        layer: of `layers.WINDOWED`.
        axes: what it does along each spatial axis.
        split: along which axes its output is split.
        grid: the ranks of a group.
        place: the part of each axis of the grid that this rank has.
        x: the window of the layer's input, padding included.
        call: calls the layer.
    """
    outer, layer = layer, kinds.core_of(layer)
    kind = type(layer)
    if kind in kinds.PADDING or kind in kinds.CROPPING:
        return x
    rows = [
        geometry.bounds(axis.outputs, grid.parts[i])[place[i]] if i + 1 in split else (0, axis.outputs)
        for i, axis in enumerate(axes)
    ]

    def with_window() -> contextlib.AbstractContextManager[None]:
        return with_settings(layer, kinds.settings_of(layer, axes, x.shape[1:-1]))

    with with_window(), again_in(outer, with_window) if outer is not layer else contextlib.nullcontext():
        y = call(x)
    # Ranks decide alike: their graphs are to have the same nodes.
    if kind in (*kinds.TRANSPOSED, *kinds.UPSAMPLING):
        crops = [axis.crop(*part) for axis, part in zip(axes, rows, strict=True)]
        y = y[(slice(None), *(slice(*crop) for crop in crops))]
    if kinds.averages_in_image(layer) and kinds.padding_of(layer, axes) != "edge":
        y = _without_padding(axes, rows, y)
    return y


def compute_own(
    layer: Any,
    axes: Sequence[geometry.Axis],
    axis: int,
    borders: Sequence[geometry.Border],
    x: Any,
    add: Callable[..., Any],
    call: Callable[[Any], Any],
) -> Any:
    """Return this part's rows of the output of a convolution, of its own rows and of those that it receives.

    Args:
        layer: for which `layers.adds_borders` is true.
        axes: what it does along each spatial axis.
        axis: of the tensor, that is split.
        borders: what rows of lower and upper parts add to.
        x: this part's rows of the layer's input.
        add: a backend's `with_borders` for these ranks.
        call: calls the layer.
    """
    layer = kinds.core_of(layer)
    convolution = layer.convolution_op
    widths = [(0, 0), *(one.sides for one in axes if isinstance(one, geometry.Windowed)), (0, 0)]
    # At least one, so that what is received is used on all ranks: backward it is exchanged, too.
    needed = [one for one in borders if one.rows] or [one for one in borders if one.changes]

    def of_others(received: Any, kernel: Any) -> list[Any]:
        found, at = [], 0
        for border in needed:
            rows = received if len(needed) == 1 else received[(slice(None),) * axis + (slice(at, at + border.rows),)]
            at += border.rows
            with with_settings(layer, {"padding": "valid"}):
                found.append(convolution(ops.pad(rows, [*widths[:axis], border.pads, *widths[axis + 1 :]]), kernel))
        return found

    def with_borders(x: Any, kernel: Any) -> Any:
        kernel = ops.convert_to_tensor(kernel)
        return add(x, kernel, convolution, of_others, [border.outputs[0] for border in needed])

    with with_settings(layer, {"convolution_op": with_borders}):
        return call(x)


def _without_padding(axes: Sequence[geometry.Axis], rows: Sequence[geometry.Rows], y: Any) -> Any:
    """Return averages over whole windows as averages over the rows of them that lie in the image."""
    for index, (axis, part) in enumerate(zip(axes, rows, strict=True)):
        if not isinstance(axis, geometry.Windowed):
            continue
        factors = [axis.width / count for count in axis.counts(*part)]
        if any(axis.sides):
            shape = [-1 if a == index + 1 else 1 for a in range(len(y.shape))]
            y = y * ops.reshape(ops.convert_to_tensor(factors, y.dtype), shape)
    return y
