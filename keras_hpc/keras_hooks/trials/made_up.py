# SPDX-License-Identifier: Apache-2.0
"""Made-up samples, on which losses, metrics and steps of the user's own are tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current

ROWS = 4
TOLERANCE = 0.02  # of what is equal but for rounding
_FINE_TOLERANCE = 1e-3  # likewise, on a CPU, in 32 or 64 bits
# What numbers of rows are multiplied with, in two parts, so that a mask leaves others of each: a sign, or a threshold.
SIGNS = (1, -1, 1, 1), (1, -1, -1, 1)
SIZES = (1, 100, 1, 1), (1000, 1, 1000, 1)
MISSING = np.nan, -999.0, -9999.0, -100.0, 255.0  # what else than 0 and -1 marks targets without a value
# The same for numbers and for integers, which may be classes; those of numbers are for one sample each.
MISSING_OF = (MISSING[:1], -1), (MISSING[1:], -100), (MISSING[1:2], 255)
_UNKNOWN_LENGTH = 8  # of axes whose length is not known


def batch(like: Any, seed: int = 0) -> Any:
    """Return samples like those of each part of a batch. Those of one say nothing about those of the next.

    Else what a step computes of the difference of two of them would always be 0.
    """
    leaves = (samples(leaf, seed, place % 2 + 1, place) for place, leaf in enumerate(keras.tree.flatten(like)))
    return keras.tree.pack_sequence_as(like, list(leaves))


def samples(leaf: Any, seed: int = 0, repeats: int = 1, place: int = 0) -> Any:
    """Return samples like those of a batch, or of the specification of one: arrays, or None."""
    if leaf is None or type(leaf).__name__ == "OptionalSpec":
        return None
    dtype = np.dtype(keras.backend.standardize_dtype(leaf.dtype).replace("bfloat16", "float32").replace("string", "U1"))
    shape = [_UNKNOWN_LENGTH if length is None else length for length in leaf.shape]
    if not shape:
        return np.ones((), dtype)
    shape[0] = ROWS
    if dtype.kind == "f":
        return np.random.default_rng([seed, place]).uniform(0.1, 0.9, shape).astype(dtype)
    rows = np.arange(1, ROWS + 1) // repeats
    numbers = rows.reshape(-1, *[1] * (len(shape) - 1)) % (seed + 2) > 0  # may be a class or a mask
    return np.broadcast_to(numbers, shape).astype(dtype)


def multiplied(factors: Sequence[float], marks: Sequence[float], array: Any) -> Any:
    """Return numbers with rows that are multiplied, of which some are then something else.

    Args:
        factors: of each row.
        marks: what the first rows are instead.
        array: the numbers, as made up.
    """
    if array is None or array.dtype.kind != "f" or not array.ndim:
        return array
    made = array * np.array(factors, array.dtype).reshape(-1, *[1] * (array.ndim - 1))
    for row, mark in enumerate(marks):
        made[row] = mark
    return made


def nudged(batch: Any) -> Any:
    """Return a batch that differs from another one by rounding only, and has the same marks and signs."""

    def nudge(array: Any) -> Any:
        if array is None or array.dtype.kind != "f":
            return array
        return np.where(abs(array) < 1, array * array.dtype.type(1 + 4 * np.finfo(array.dtype).eps), array)

    return keras.tree.map_structure(nudge, batch)


def may_be_any() -> bool:
    """Return whether targets may be any number, and not only such as users give.

    They may be classes, written as numbers. A GPU that is given one which is out of range takes no more programs.
    """
    return current.job().device is None


def without_a_value(mark: float | None, array: Any) -> Any:
    """Return targets of which the first sample is marked as having none, if the mark is of their kind.

    Classes out of range may end a program on a GPU, so integers are not marked there.
    """
    if mark is None or array is None or not array.ndim or array.dtype.kind not in ("fiu" if may_be_any() else "f"):
        return array
    if array.dtype.kind != "f" and (np.isnan(mark) or not np.can_cast(np.min_scalar_type(int(mark)), array.dtype)):
        return array
    marked = array.copy()
    marked[0] = mark
    return marked


def marked(of_numbers: Sequence[float], of_integers: int, array: Any) -> Any:
    """Return targets of which the first samples are marked as having no value, by marks of their kind."""
    is_number = array is not None and array.dtype.kind == "f"
    return multiplied((1,) * ROWS, of_numbers, array) if is_number else without_a_value(of_integers, array)


def doubled(array: Any) -> Any:
    """Return integers that are twice as large, as other words or classes."""
    return array if array is None or array.dtype.kind not in "iu" else array * array.dtype.type(2)


def is_left_out(whole: Any, halves: Sequence[Any]) -> bool:
    """Return whether a batch has nothing but zeros, and so has one of its halves, but not the other one.

    So it is where a step or a loss of the user's own leaves out what is no number, or too large for its dtype: of data
    that users give there is none, and made-up samples with signs, sizes and marks say nothing about the others.
    """
    return not np.any(whole) and sorted(bool(np.any(half)) for half in halves) == [False, True]


def tolerance_of(dtypes: Iterable[Any], fine: float = _FINE_TOLERANCE) -> float:
    """Return how far numbers that are equal, but for rounding, are apart, as a part of them.

    Args:
        dtypes: what they were computed in.
        fine: what it is on a CPU, in 32 or 64 bits.
    """
    coarse = current.job().device is not None or any("16" in str(dtype) or "float8" in str(dtype) for dtype in dtypes)
    return TOLERANCE if coarse else fine
