# SPDX-License-Identifier: Apache-2.0
"""Asks functions and layers of a user's own, on small samples, whether they compute each position by itself.

What they give for half of the positions must stay as it is when the others change, with the same random numbers, in
training and else; and, where nothing is random, when the others are not there. A layer is also asked about as many
positions as there will be, for it may know their numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends

_ROWS = 6  # of each sample along the axis that is asked about; half of them are compared
_MOST = 2**18  # numbers of a tensor with all rows; of a larger one other axes get few rows, too
_SAMPLES, _CHANNELS = 2, 4
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FINE, _COARSE = 1e-3, 2e-2  # of the largest value, with 32 bits and with 16

Arrays = list[np.ndarray]
Call = Callable[[Arrays], list[Any]]


def fault_of_function(function: Callable[..., Any], rank: int) -> str | None:
    """Return what is wrong with a function of one tensor with `rank` axes; None: it computes each position by itself.

    Args:
        function: of the user's own.
        rank: how many axes the tensor has, the first of samples and the last of channels.
    """
    shape = (_SAMPLES, *(_ROWS,) * (rank - 2), _CHANNELS)

    def call(arrays: Arrays) -> list[Any]:
        return [function(keras.ops.convert_to_tensor(arrays[0]))]

    for axis in range(1, rank - 1):
        try:
            found = _fault([call], [call], [(shape, "float32")], axis, _ROWS, [True], "float32")
        except Exception as error:  # noqa: BLE001  whatever it is, a part would get it, too
            found = _cannot(axis, error)
        if found:
            return found
    return None


def fault_of_layer(node: Any, axes: Sequence[int]) -> str | None:
    """Return what is wrong with a layer that is said to compute each position by itself; None: nothing.

    Args:
        node: of a functional model, at which the layer is called.
        axes: along which its inputs are split.
    """
    layer, tensors, extents = node.operation, node.input_tensors, node.outputs[0].shape
    random = adds_losses = False
    kept: Arrays = []

    def caller(training: bool) -> Call:
        def call(arrays: Arrays) -> list[Any]:
            nonlocal random, adds_losses, kept
            pairs = zip(tensors, arrays, strict=True)
            given = {id(x): keras.ops.convert_to_tensor(a, dtype=x.dtype) for x, a in pairs}
            args, kwargs = node.arguments.fill_in(given)
            if layer._call_has_training_arg:
                kwargs = {**kwargs, "training": training}
            with keras.StatelessScope(collect_losses=True) as scope:
                outputs: list[Any] = keras.tree.flatten(layer(*args, **kwargs))
            random = random or (not training and bool(scope.state_mapping))  # it keeps something, as a seed
            adds_losses = adds_losses or bool(scope.losses)
            kept = [_number(value) for value in scope.state_mapping.values()]
            return outputs

        return call

    alone = [caller(False)]
    trained = [caller(True)] if layer._call_has_training_arg else []
    for axis in axes:
        split = [len(x.shape) > axis and x.shape[axis] == extents[axis] for x in tensors]
        for rows in sorted({_ROWS, max(_ROWS, extents[axis])}):
            few = rows > _ROWS and any(math.prod(_small(x, axis, rows)) > _MOST for x in tensors)
            shapes = [
                (_small(x, axis if cut else None, rows, few), x.dtype) for x, cut in zip(tensors, split, strict=True)
            ]
            ways = [*alone, *trained], alone, shapes, axis, rows, split, layer.compute_dtype
            try:
                found = _fault(*ways, lambda: random, lambda: kept)
            except Exception as error:  # noqa: BLE001  whatever it is, a part would get it, too
                found = None if few else _cannot(axis, error)  # it may need all rows of another axis
            if found or adds_losses:
                return found or "adds a loss of its own, which would be of a part only"
    return None


def _cannot(axis: int, error: Exception) -> str:
    said = " ".join(_COLOURS.sub("", str(error)).split())  # Keras colours what it says of a call
    return f"cannot compute a part of its axis {axis}: {type(error).__name__}: {said[:300]}"


def _small(tensor: Any, axis: int | None, rows: int, few: bool = False) -> tuple[int, ...]:
    """Return the shape of a tensor of few samples, so many positions along an axis, and few along others if told so."""
    last = len(tensor.shape) - 1
    shape = [
        rows if place == axis else _ROWS if n is None else min(n, _ROWS) if few and place < last else n
        for place, n in enumerate(tensor.shape)
    ]
    return (_SAMPLES, *shape[1:]) if shape else ()


def _fault(
    beside: Sequence[Call],
    without: Sequence[Call],
    shapes: Sequence[tuple[tuple[int, ...], str]],
    axis: int,
    count: int,
    split: Sequence[bool],
    dtype: str,
    is_random: Callable[[], bool] = lambda: False,
    kept: Callable[[], Arrays] = list,
) -> str | None:
    """Return what the answers of calls tell of an axis.

    Args:
        beside: calls that are asked beside other positions.
        without: calls that are asked without other positions.
        shapes: of their inputs, and their dtypes.
        axis: about which they are asked.
        count: how many positions there are along it.
        split: which of the inputs have positions along it.
        dtype: in which they compute.
        is_random: whether any call drew random numbers.
        kept: what the last call assigned to variables.
    """
    random = np.random.default_rng(0)
    given = [_made_up(random, *of) for of in shapes]
    others = [3 * x + 1 if x.dtype.kind == "f" else 1 - x.astype("int8") for x in given]
    tolerance = _COARSE if "16" in dtype else _FINE

    def numbers(call: Call, arrays: Arrays, rows: int = count) -> Arrays:
        return _numbers(call(arrays), axis, rows)

    def repeats(call: Call) -> bool:  # else it draws what Keras knows nothing of
        return _alike(numbers(call, given), numbers(call, given), tolerance)

    with backends.current().outside_programs():
        for half in (slice(0, count // 2), slice(count // 2, count)):
            rows = (slice(None),) * axis + (half,)
            part = [x[rows] if cut else x for x, cut in zip(given, split, strict=True)]
            changed = [other.astype(x.dtype) if cut else x for x, other, cut in zip(given, others, split, strict=True)]
            for x, own, cut in zip(changed, part, split, strict=True):
                if cut:
                    x[rows] = own
            for call in filter(repeats, beside):
                answer, state = [y[rows] for y in numbers(call, given)], kept()
                if not _alike(answer, [y[rows] for y in numbers(call, changed)], tolerance):
                    return f"mixes positions along axis {axis}: its values change beside others"
                if not _alike(state, kept(), tolerance):
                    return f"keeps numbers of all positions along axis {axis}, of which each rank would see a part"
            for call in filter(repeats, without):
                answer = [y[rows] for y in numbers(call, given)]
                if not is_random() and not _alike(answer, numbers(call, part, half.stop - half.start), tolerance):
                    return f"needs all positions along axis {axis}: its values change without others"
    return None


def _made_up(random: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if "float" in dtype:
        return np.asarray(random.normal(size=shape), "float32")
    return np.asarray(random.integers(0, 2, shape), dtype)


def _numbers(outputs: Sequence[Any], axis: int, rows: int) -> Arrays:
    """Return what was computed, which must have as many positions as were given."""
    found = [_number(y) for y in outputs]
    if wrong := [y.shape for y in found if y.ndim <= axis or y.shape[axis] != rows]:
        raise ValueError(f"outputs of shape {wrong[0]} for {rows} positions")
    return found


def _number(value: Any) -> np.ndarray:
    """Return a tensor in a form that NumPy knows, whatever its dtype."""
    return np.asarray(backends.current().to_numpy(keras.ops.cast(value, "float32")))


def _alike(found: Arrays, expected: Arrays, tolerance: float) -> bool:
    return all(
        np.allclose(a, b, rtol=0, atol=tolerance * np.abs(a[np.isfinite(a)]).max(initial=0), equal_nan=True)
        for a, b in zip(found, expected, strict=True)
    )
