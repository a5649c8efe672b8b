# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a metric of the user's own says, merged from ranks, what it says on one rank.

A class does not tell what its state is. A sum over samples may be added up; a number of a whole batch, as a distance
between two distributions, may not, and of means of batches one rank counts all alike, whatever their size. So the
metric is tried: on the made-up samples of two ranks, whose states are merged, and on those of both. What it says of
them must be the same, also where a mask of its own leaves out other samples of one rank than of the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.trials import made_up, unchanged

_Change = Callable[[int, np.ndarray], np.ndarray]  # of an argument of `update_state`, by its place

_SECOND = 0.2, 8.0  # what numbers of the second rank are multiplied with, so that ranks have values of their own
_PARTS = (1, 1), (2, 1)  # how many made-up batches each rank has

_LARGEST = 4 << 20  # values of a sample that are made up
_ROUNDING = 1e-5  # of numbers that are nearly 0, where others have cancelled out

# What `update_state` of a metric was called with first: shapes and dtypes instead of tensors.
_given: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


class Answer(NamedTuple):
    """What a metric says of made-up samples.

    Args:
        agrees: whether that is the same on ranks and on one rank.
        merged: a value of it, merged from two ranks.
        whole: the same value on one rank.
        alike: whether the ranks had equally many samples.
    """

    agrees: bool
    merged: float = 0.0
    whole: float = 0.0
    alike: bool = True


@dataclasses.dataclass(frozen=True)
class _Spec:
    shape: tuple[int | None, ...]
    dtype: str


class _UnknownError(Exception):
    """Made-up samples cannot tell."""


def install(patcher: Any) -> None:
    """Notices what metrics of the user's own are given, from when one is made."""

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update_state(self: Any, *args: Any, **kwargs: Any) -> Any:
            if current.active() and self not in _given:
                with contextlib.suppress(TypeError, ValueError):  # what has no shape or dtype of Keras is not tried
                    _given[self] = keras.tree.map_structure(_spec, (args, kwargs))
            return original(self, *args, **kwargs)

        return update_state

    def preparing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for owner in type(self).__mro__:
                if is_own(owner) and "update_state" in vars(owner) and owner not in prepared:
                    prepared.add(owner)
                    patcher.patch(owner, "update_state", noting)
            original(self, *args, **kwargs)

        return __init__

    prepared: set[type] = set()
    patcher.patch(keras.metrics.Metric, "__init__", preparing)


def is_own(owner: type) -> bool:
    """Return whether a class of metrics is the user's own."""
    return issubclass(owner, keras.metrics.Metric) and not owner.__module__.startswith("keras.")


def ask(metric: Any, merge: Callable[[Any, Sequence[np.ndarray]], list[Any]]) -> Answer | None:
    """Try a metric, which stays as it is. Without communication: one that asks other ranks is not tried.

    Args:
        metric: of a class of the user's own.
        merge: gets the metric and, for each of its variables, the values of two ranks in one array, of shape
            (2, *shape); returns the values that ranks make of them.

    Returns:
        What it says, or None if nobody knows: it was given no samples, draws random numbers, asks other ranks, or
        cannot be tried.
    """
    # A model in parts, which a metric may call, exchanges rows with other ranks.
    if not is_own(type(metric)) or metric not in _given or current.job().group is not None:
        return None
    found = None
    with current.alone(), unchanged.attributes(_all(metric)), backends.current().outside_programs():
        for parts, changes in _ranks():
            try:
                answer = _compare(metric, merge, parts, changes)
            except Exception:  # noqa: BLE001  it may refuse made-up samples; what is wrong with it, the step has raised
                continue
            if answer is not None and not answer.agrees:
                return answer
            found = found or answer
    return found


def _ranks() -> Iterator[tuple[tuple[int, int], tuple[_Change, _Change]]]:
    """Yield how many made-up batches two ranks have, and what is done with the samples of each.

    Masks see both signs, and targets that are large or marked as missing: then a rank has fewer samples that count.
    """

    def scaled(scale: float) -> _Change:
        return lambda place, array: array * array.dtype.type(scale) if array.dtype.kind == "f" else array

    def with_signs(signs: Sequence[float], scale: float) -> _Change:
        change = scaled(scale)
        return lambda place, array: change(place, array if place > 1 else made_up.multiplied(signs, (), array))

    def with_targets(change: Callable[[np.ndarray], Any], scale: float) -> _Change:
        other = scaled(scale)
        return lambda place, array: other(place, array) if place else change(array)

    for parts, scale in itertools.product(_PARTS, _SECOND):
        yield parts, (scaled(1.0), scaled(scale))
    # Predictions of the second rank are such that its errors are others than those of the first.
    parts, scale = _PARTS[0], _SECOND[1]
    yield parts, (with_signs(made_up.SIGNS[0], 1.0), with_signs(made_up.SIGNS[1], scale))
    if not made_up.may_be_any():
        return
    first, second = (functools.partial(made_up.multiplied, sizes, ()) for sizes in made_up.SIZES)
    yield parts, (with_targets(first, 1.0), with_targets(second, scale))
    for mark in (0.0, -1.0, *made_up.MISSING):
        yield parts, (scaled(1.0), with_targets(functools.partial(made_up.without_a_value, mark), scale))


def _compare(
    metric: Any, merge: Callable[..., list[Any]], parts: tuple[int, int], changes: tuple[_Change, _Change]
) -> Answer | None:
    first = _samples(metric, parts[0], 0, changes[0])
    second = _samples(metric, parts[1], 2 * parts[0], changes[1])
    total = made_up.ROWS * sum(parts)
    states = []
    for samples, count in zip((first, second), parts, strict=True):
        step = running.Step(None, "trial", in_lockstep=True, count=made_up.ROWS * count, total=[total], twin=True)
        states.append(_counted(metric, samples, step))
    whole, again = (_counted(metric, _joined(first, second), None) for _ in range(2))
    if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(whole, again, strict=True)):
        raise _UnknownError  # random
    merged = merge(metric, [np.stack(values) for values in zip(*states, strict=True)])
    ours, theirs, *halves = (np.array(_result(metric, values), np.float64) for values in (merged, whole, *states))
    if not np.isfinite([ours, theirs]).all() or made_up.is_left_out(theirs, halves):
        return None
    tolerance = made_up.tolerance_of([metric.dtype, *(variable.dtype for variable in metric.variables)])
    apart = abs(ours - theirs) - tolerance * np.maximum(abs(ours), abs(theirs)) - _ROUNDING
    worst = int(np.argmax(apart))
    return Answer(bool(apart[worst] <= 0), ours[worst], theirs[worst], alike=parts[0] == parts[1])


def _counted(metric: Any, samples: tuple[Any, Any], step: running.Step | None) -> list[np.ndarray]:
    """Return what a metric has counted in one step."""
    args, kwargs = samples
    states = []
    for update in (True, False):
        with keras.StatelessScope() as scope, running.running_step(step):
            metric.reset_state()
            if update:
                metric.update_state(*args, **kwargs)
            states.append([backends.current().to_numpy(variable.value) for variable in metric.variables])
        if not scope.state_mapping.keys() <= set(map(id, metric.variables)):
            raise _UnknownError  # as the seeds of random numbers
    if step is not None and step.uses:
        raise _UnknownError  # a loss in it has asked what the samples of all ranks weigh
    counted, reset = states
    if all(np.array_equal(x, y) for x, y in zip(counted, reset, strict=True)):
        raise _UnknownError  # it has counted nothing, or cannot be reset
    return counted


def _result(metric: Any, values: Sequence[Any]) -> list[float]:
    """Return the numbers that a metric says with these values of its variables."""
    with keras.StatelessScope(state_mapping=list(zip(metric.variables, values, strict=True))):
        result = keras.tree.flatten(metric.result())
        return [float(x) for value in result for x in np.ravel(backends.current().to_numpy(value))]


def _samples(metric: Any, batches: int, seed: int, change: _Change) -> tuple[Any, Any]:
    """Return what a metric may be given, for some made-up batches."""
    specs = [leaf for leaf in keras.tree.flatten(_given[metric]) if isinstance(leaf, _Spec)]
    lengths = {spec.shape[:1] for spec in specs}
    if not lengths or () in lengths or len(lengths - {(None,)}) > 1:
        raise _UnknownError  # numbers, or not as many of each
    if sum(math.prod(length or 1 for length in spec.shape[1:]) for spec in specs) > _LARGEST:
        raise _UnknownError

    def make(leaf: Any) -> Any:
        if not isinstance(leaf, _Spec):
            return leaf
        place = next(places)  # targets and predictions are not to be equal
        parts = [made_up.samples(leaf, seed + 2 * number, place=place) for number in range(batches)]
        made = change(place, np.concatenate(parts))
        return keras.ops.convert_to_tensor(made, dtype=leaf.dtype)

    places = itertools.count()
    made: tuple[Any, Any] = keras.tree.map_structure(make, _given[metric])
    return made


def _joined(first: Any, second: Any) -> Any:
    tensors = keras.ops.is_tensor
    return keras.tree.map_structure(lambda x, y: keras.ops.concatenate([x, y]) if tensors(x) else x, first, second)


def _spec(value: Any) -> Any:
    if not keras.ops.is_tensor(value) and not isinstance(value, (np.ndarray, keras.Variable)):
        return value
    shape = getattr(value, "shape", ())
    return _Spec(tuple(shape), keras.backend.standardize_dtype(value.dtype))


def _all(metric: Any) -> list[Any]:
    return [metric, *(one for inner in metric._metrics for one in _all(inner))]
