# SPDX-License-Identifier: Apache-2.0
"""What the numbers are that a step gives to its metrics: means over samples, or sums; found in a trial of the step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current, log
from keras_hpc.keras_hooks.trials import made_up

UNKNOWN, MEAN, SUM, NEITHER = range(4)

kinds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of metrics


def tell(model: Any, method: str, metrics: Sequence[Any], found: Sequence[int]) -> None:
    """Remember what the numbers of metrics are; rank 0 names those that nobody can merge.

    Args:
        model: whose metrics they are.
        method: its step that was tried, which may be Keras' own.
        metrics: of `of_model`.
        found: what each was found to get, the same on all ranks.
    """
    for metric, kind in zip(metrics, found, strict=True):
        kinds[metric] = kind
    mixed = [f"`{metric.name}`" for metric, kind in zip(metrics, found, strict=True) if kind == NEITHER]
    if mixed and current.team_of(model).rank == 0:
        name, is_keras_own = type(model).__name__, getattr(type(model), method).__module__.startswith("keras.")
        what = f"A layer or method of `{name}`" if is_keras_own else f"`{name}.{method}()`"
        log.warning(
            f"{what} gives metrics a number of the whole batch that is neither a mean nor a sum over samples, as the "
            "root of a mean. Each rank has a part of the batch, so what they say is not "
            f"what one rank says. Give them a number for each sample, or means. Received: {', '.join(mixed)}"
        )


def of_model(model: Any) -> list[Any]:
    """Return the metrics of a model to which its step may give numbers, in the same order on every rank."""
    wrapped = keras.metrics.MeanMetricWrapper
    given = keras.metrics.Mean, keras.metrics.Sum
    return [metric for metric in model.metrics if isinstance(metric, given) and not isinstance(metric, wrapped)]


def of_layers(model: Any) -> list[Any]:
    """Return those of these metrics that layers, or methods of the model, give numbers to: `compile` was given others.

    None of a model in parts, whose layers give numbers of each part.
    """
    if current.job().group is not None:
        return []
    compiled = [getattr(model, "_loss_tracker", None)]
    for name in ("_compile_loss", "_compile_metrics"):
        compiled += getattr(getattr(model, name, None), "metrics", [])
    return [metric for metric in of_model(model) if not any(metric is one for one in compiled)]


def kind_of(metric: Any, ours: dict[int, Any], theirs: dict[int, Any]) -> int:
    """Return what the numbers are that a metric got in a trial.

    Args:
        metric: one of `of_model`.
        ours: by how much each of its variables, by `id`, has moved in a step on samples of one of two ranks.
        theirs: the same in a step on the samples of both.
    """
    first, second = (_counted(metric, moved) for moved in (ours, theirs))
    if not first or not np.isfinite([first, second]).all():
        return UNKNOWN
    ratio = second / first
    return MEAN if abs(ratio - 1) < 0.2 else SUM if abs(ratio - 2) < 0.4 else UNKNOWN


def checked_in(
    pairs: Sequence[Sequence[dict[int, Any]]], metrics: Sequence[Any], found: Sequence[int], tolerance: float
) -> list[int]:
    """Return the kinds of metrics after `checked` in each pair of halves, the first of which is of plain samples."""
    checked_kinds = []
    for metric, kind in zip(metrics, found, strict=True):
        for number, moved in enumerate(pairs):
            *halves, whole = (_counted(metric, of_part) for of_part in moved)
            if not number or not made_up.is_left_out(whole, halves):
                kind = checked(metric, kind, moved, tolerance)
        checked_kinds.append(kind)
    return checked_kinds


@np.errstate(invalid="ignore")  # made-up samples may give infinities
def checked(metric: Any, kind: int, moved: Sequence[dict[int, Any]], tolerance: float) -> int:
    """Return NEITHER if the number of a batch is not what those of its halves say, as the root of a mean; else `kind`.

    Args:
        metric: one of `of_model`.
        kind: MEAN or SUM, as it seemed, or UNKNOWN, which may be both.
        moved: as for `kind_of`, in steps on two halves that are not alike, and on both together.
        tolerance: how far numbers that are equal, but for rounding, are apart, as a part of them.
    """
    first, second, whole = (_counted(metric, of_part) for of_part in moved)
    totals, counts = np.sum([_total_and_count(metric, of_part) for of_part in moved[:2]], axis=0)
    merged = totals / counts if counts else 0.0  # parts with weights of their own samples have other counts
    expected = {MEAN: [merged], SUM: [first + second], UNKNOWN: [merged, first + second]}.get(kind, [whole])
    limit = tolerance * max(abs(first), abs(second), abs(whole))
    return NEITHER if all(abs(whole - value) > limit for value in expected) else kind


def _counted(metric: Any, moved: dict[int, Any]) -> float:
    total, count = _total_and_count(metric, moved)
    return total / count if count else 0.0


def _total_and_count(metric: Any, moved: dict[int, Any]) -> tuple[float, float]:
    is_sum = isinstance(metric, keras.metrics.Sum)
    return float(moved.get(id(metric.total), 0.0)), 1.0 if is_sum else float(moved.get(id(metric.count), 0.0))
