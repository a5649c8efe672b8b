# SPDX-License-Identifier: Apache-2.0
"""What operations on tensors do to their axes, as `x[..., :3]` and `keras.ops.mean(x, axis=(1, 2))` make them.

An axis is *kept* if each of its positions is made of the same position of the inputs: along it an operation computes a
part by itself. Slices and padding read *windows* of an axis. Any other axis is needed whole.

Operations have no public class, so they are told by their names.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import layers

from keras_hpc.spatial import geometry
from keras_hpc.spatial.settings import with_settings

# Along one axis, or several, of an output with the axes of the input.
_ALONG_AXES = frozenset(
    (
        *("Argsort", "Concatenate", "Cumprod", "Cumsum", "Flip", "Glu", "LogSoftmax", "Normalize", "Repeat", "Roll"),
        *("Softmax", "Sort", "Split"),
    )
)
_REDUCTIONS = frozenset(
    (
        *("All", "Amax", "Amin", "Any", "Argmax", "Argmin", "CountNonzero", "Logsumexp", "Max", "Mean", "Median"),
        *("Min", "Norm", "Prod", "Std", "Sum", "Var"),
    )
)
# Of which ranks combine what each of them has.
COMBINED = frozenset(("Amax", "Amin", "Max", "Mean", "Min", "Moments", "Std", "Sum", "Var"))


@dataclasses.dataclass(frozen=True)
class Effect:
    """What an operation does to axes, of which 0 is that of samples.

    Attributes:
        kept: axes along which it computes each position by itself.
        windows: of other axes, what it reads.
        fill: what these are padded with.
    """

    kept: frozenset[int]
    windows: Mapping[int, geometry.Windowed] = dataclasses.field(default_factory=dict)
    fill: float = 0.0


def effect_of(node: Any, parts: Sequence[int]) -> Effect | None:
    """Return what a node of the graph does to axes; None: it is no operation of Keras, or not a known one.

    Args:
        node: of a functional model.
        parts: into how many each spatial axis is split.
    """
    operation, x = node.operation, node.input_tensors[0]
    name, rank = type(operation).__name__, len(x.shape)
    if any(len(other.shape) != rank for other in node.input_tensors):
        return None
    if type(operation) is layers.Reshape:
        return Effect(geometry.reshaped(x.shape, node.outputs[0].shape, parts))
    if type(operation) is layers.Permute:
        return _kept_by((0, *operation.dims), rank)
    if not type(operation).__module__.startswith("keras."):
        return None
    if name in _ALONG_AXES:  # of layers, too
        return Effect(frozenset(range(rank)) - reduced_axes(operation, rank))
    if isinstance(operation, layers.Layer):
        return None
    if name in _REDUCTIONS:
        gone = reduced_axes(operation, rank)
        keeps = getattr(operation, "keepdims", False)  # counts of what is not zero have none
        stay = range(rank) if keeps else [axis for axis in range(rank) if axis not in gone]
        return _kept_by(stay, rank, gone)
    effect = _OTHERS.get(name)
    return effect(node, parts) if effect else None


def reduced_axes(operation: Any, rank: int) -> frozenset[int]:
    """Return along which axes of its input an operation works."""
    axis = getattr(operation, "axes" if type(operation).__name__ == "Moments" else "axis", None)
    if axis is None:
        return frozenset(range(rank))
    return frozenset(one % rank for one in (axis if isinstance(axis, (tuple, list)) else [axis]))


def is_combined(node: Any, split: frozenset[int]) -> bool:
    """Return whether a node reduces all axes along which its input is split, and ranks can combine what each has."""
    operation, x = node.operation, node.input_tensors[0]
    if type(operation).__name__ not in COMBINED or not type(operation).__module__.startswith("keras."):
        return False
    axes = reduced_axes(operation, len(x.shape))
    return split <= axes and 0 not in axes and "float" in x.dtype and getattr(operation, "initial", None) is None


def compute(
    operation: Any,
    windows: Mapping[int, geometry.Windowed],
    shape: Sequence[int | None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: Callable[..., Any],
) -> Any:
    """Return this part of what an operation gives.

    Args:
        operation: for which `effect_of` knows something.
        windows: that it reads, which it has already.
        shape: of this part of the output.
        args: what it is called with.
        kwargs: likewise.
        call: calls it.
    """
    name = type(operation).__name__
    if name == "GetItem":
        x = args[0]
        keys = _keys(_key_of(args, kwargs), len(x.shape))
        places = [place for place, one in enumerate(keys) if one is not None]  # of each axis
        for axis, window in windows.items():
            keys[places[axis]] = slice(None, None, window.stride)
        return call(x, tuple(keys))
    settings: dict[str, Any] = {}
    known = tuple(-1 if rows is None else rows for rows in shape)
    if type(operation) is layers.Reshape:
        settings = {"target_shape": known[1:], "_resolved_target_shape": known[1:]}  # the latter in older Keras
    elif name == "Reshape":
        settings = {"newshape": known}
    elif name == "Pad":
        widths = _widths(operation, len(args[0].shape))
        settings = {"pad_width": tuple((0, 0) if axis in windows else each for axis, each in enumerate(widths))}
    with with_settings(operation, settings):
        return call(*args, **kwargs)


def _kept_by(stay: Sequence[int], rank: int, mixed: frozenset[int] = frozenset()) -> Effect:
    """Return what keeps those axes that have their place in the output, `stay[i]` being what axis i of it was."""
    return Effect(frozenset(axis for axis in range(min(rank, len(stay))) if stay[axis] == axis) - mixed)


def _inserted(axes: Sequence[int], rank: int) -> Effect:
    places = {axis % (rank + len(axes)) for axis in axes}
    old = iter(range(rank))
    return _kept_by([-1 if place in places else next(old) for place in range(rank + len(axes))], rank)


def _squeezed(node: Any, parts: Sequence[int]) -> Effect:
    x, rank = node.input_tensors[0], len(node.input_tensors[0].shape)
    axis = node.operation.axis
    gone = reduced_axes(node.operation, rank) if axis is not None else {a for a in range(rank) if x.shape[a] == 1}
    return _kept_by([a for a in range(rank) if a not in gone], rank)


def _transposed(node: Any, parts: Sequence[int]) -> Effect:
    operation, rank = node.operation, len(node.input_tensors[0].shape)
    order = list(range(rank))
    if type(operation).__name__ == "Transpose":
        order = [axis % rank for axis in operation.axes] if operation.axes is not None else order[::-1]
    elif type(operation).__name__ == "Swapaxes":
        one, other = operation.axis1 % rank, operation.axis2 % rank
        order[one], order[other] = order[other], order[one]
    else:
        moves = {to % rank: axis % rank for axis, to in zip(operation.source, operation.destination, strict=True)}
        others = iter(axis for axis in order if axis not in moves.values())
        order = [moves[place] if place in moves else next(others) for place in order]
    return _kept_by(order, rank)


def _sliced(node: Any, parts: Sequence[int]) -> Effect | None:
    shape = node.input_tensors[0].shape
    stay: list[int] = []
    windows: dict[int, geometry.Windowed] = {}
    axis = 0
    for one in _keys(_key_of(node.arguments.args, node.arguments.kwargs), len(shape)):
        if one is None:
            stay.append(-1)
            continue
        if not isinstance(one, (slice, int)):
            return None
        if isinstance(one, slice):
            stay.append(axis)
            extent = shape[axis]
            begin, end, step = (0, 0, 1) if extent is None else one.indices(extent)
            rows = len(range(begin, end, step))
            if step < 1 or (extent and not rows):
                stay[-1] = -1
            elif extent is not None and (begin, step, rows) != (0, 1, extent):
                windows[axis] = geometry.Windowed(extent, rows, 1, step, -begin)
        axis += 1
    kept = _kept_by(stay, len(shape)).kept
    return Effect(kept - windows.keys(), {a: window for a, window in windows.items() if a in kept})


def _key_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs["key"] if "key" in kwargs else args[1]


def _keys(key: Any, rank: int) -> list[Any]:
    """Return a key with one entry for each axis, and a None for each that is inserted."""
    keys = list(key) if isinstance(key, (tuple, list)) else [key]
    at = next((i for i, one in enumerate(keys) if one is Ellipsis), len(keys))
    rest = keys[at + 1 :]
    given = sum(one is not None for one in (*keys[:at], *rest))
    return [*keys[:at], *[slice(None)] * (rank - given), *rest]


def _padded(node: Any, parts: Sequence[int]) -> Effect:
    x = node.input_tensors[0]
    rank, arguments = len(x.shape), node.arguments
    widths = _widths(node.operation, rank)
    fill = arguments.kwargs.get("constant_values", arguments.args[1] if len(arguments.args) > 1 else None)
    plain = node.operation.mode == "constant" and (fill is None or isinstance(fill, (int, float)))
    windows = {
        axis: geometry.Windowed(x.shape[axis], x.shape[axis] + sum(each), before=each[0])
        for axis, each in enumerate(widths)
        if plain and any(each) and x.shape[axis] is not None
    }
    return Effect(frozenset(axis for axis in range(rank) if not any(widths[axis])), windows, float(fill or 0))


def _widths(operation: Any, rank: int) -> list[tuple[int, int]]:
    widths = [tuple(map(operator.index, each)) for each in operation.pad_width]
    return widths * rank if len(widths) == 1 else widths  # type: ignore[return-value]


_OTHERS: dict[str, Callable[[Any, Sequence[int]], Effect | None]] = {
    "ExpandDims": lambda node, _: _inserted(_listed(node.operation.axis), len(node.input_tensors[0].shape)),
    "GetItem": _sliced,
    "Moveaxis": _transposed,
    "Pad": _padded,
    "Reshape": lambda node, parts: Effect(geometry.reshaped(node.input_tensors[0].shape, node.outputs[0].shape, parts)),
    "Squeeze": _squeezed,
    "Stack": lambda node, _: _inserted([node.operation.axis], len(node.input_tensors[0].shape)),
    "Swapaxes": _transposed,
    "Transpose": _transposed,
    "Unstack": lambda node, _: _unstacked(node.operation.axis, len(node.input_tensors[0].shape)),
}


def _unstacked(axis: int, rank: int) -> Effect:
    return _kept_by([a for a in range(rank) if a != axis % rank], rank)


def _listed(axis: Any) -> Sequence[int]:
    return axis if isinstance(axis, (tuple, list)) else [axis]
