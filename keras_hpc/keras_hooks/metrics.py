# SPDX-License-Identifier: Apache-2.0
"""Metrics of all ranks: their sums and counts are added up at the end of an epoch and of `evaluate`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, state


def install(job: Any, patcher: Any) -> None:
    """Hooks the method through which `fit` and `evaluate` get their final logs."""

    def reduced(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
            if not current.active():
                return original(self, logs)
            state.average_moved(self)
            return reduce_logs(self, logs, original)

        return _get_metrics_result_or_logs

    patcher.patch(keras_private.get("keras.src.trainers.trainer:Trainer"), "_get_metrics_result_or_logs", reduced)


def reduce_logs(model: Any, logs: Any, result_or_logs: Callable[..., Any]) -> Any:
    """Returns the logs of all ranks together, the same on each. Collective on the model's team.

    Args:
        model: its metrics are reduced in place.
        logs: what the last step returned. Values that are no metrics, from a custom step, are averaged.
        result_or_logs: Keras' method, which takes metrics where their names match those of `logs`.
    """
    team = current.team_of(model)
    logs = logs if isinstance(logs, dict) else {}
    scalars = {name: float(value) for name, value in logs.items() if np.ndim(_number(value)) == 0}
    local = model.get_metrics_result()
    # A custom step may log a metric under its name, beside other values. On every rank it must be the same metric.
    is_metric = [name in local and _same(scalars[name], local[name]) for name in scalars]
    sums = reduce_metrics(model, team, [*scalars.values(), *map(float, is_metric)])
    averages, votes = sums[: len(scalars)] / team.size, sums[len(scalars) :]
    result = dict(result_or_logs(model, logs))
    final = model.get_metrics_result()
    if result.keys() == final.keys():
        return result
    for name, average, count in zip(scalars, averages, votes, strict=True):
        result[name] = final[name] if count == team.size else float(average)
    return result


def reduce_metrics(model: Any, team: Any, extra: list[float]) -> np.ndarray:
    """Adds up the metric variables of all ranks in place, in one message. Collective.

    The sum is in float64, which holds float32 sums and integers up to 2^53 exactly.

    Args:
        model: the model whose `metrics` are reduced.
        team: its team.
        extra: numbers that travel along.

    Returns:
        The sums of `extra`.
    """
    backend = backends.current()
    variables = list({id(v): v for v in model.metrics_variables}.values())
    arrays = [backend.to_numpy(variable.value) for variable in variables]
    parts = [array.reshape(-1).astype(np.float64) for array in arrays]
    for variable, part in zip(variables, parts, strict=True):
        if variable.aggregation == "only_first_replica" and team.rank > 0:
            part[:] = 0
    buffer = np.concatenate([*parts, np.asarray(extra, np.float64)])
    team.allreduce(buffer, op="sum")
    start = 0
    for variable, array in zip(variables, arrays, strict=True):
        value = buffer[start : start + array.size].reshape(array.shape)
        start += array.size
        if variable.aggregation == "mean":
            value = value / team.size
        backend.assign(variable, value.astype(array.dtype))
    return buffer[start:]


def _number(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value


def _same(value: float, metric: Any) -> bool:
    return bool(np.isclose(value, float(metric), rtol=1e-6, atol=0, equal_nan=True))
