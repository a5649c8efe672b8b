# SPDX-License-Identifier: Apache-2.0
"""What layers of the user's own keep besides weights, as counters: after each step it is that of all ranks.

A layer may count its calls, keep a mean of losses, or lower a temperature, and use what it keeps in the next step. One
rank would have made one step from the same state with all samples. So where a state moves on rank r, of n_r samples, by
d_r, all ranks move it by

    sum(n_r d_r) / sum(n_r)

which is exact where it moves by a mean over samples, and where it moves by the same whatever the samples are: a rank
without samples is told by how much. With `aggregation="sum"` it moves by sum(d_r).

This concerns numbers, integers and flags, and what has the aggregation "mean" or "sum". Other arrays, as moving
statistics or features of earlier batches, are each rank's own until they are averaged (replicas.py): they may be large,
and need not be means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.keras_hooks.state.variables import known_local, seed_generators, standard_dtype, unique

StepFunction = Callable[..., Any]


def shared(model: Any) -> list[Any]:
    """Return the variables that move as those of all ranks."""
    return [variable for variable in _kept(model) if _is_shared(variable)]


def averaged(model: Any) -> list[Any]:
    """Return the others of which nobody has said what they are: each rank's own until they are averaged."""
    return [v for v in _kept(model) if v.aggregation == "none" and standard_dtype(v) != "string" and not _is_shared(v)]


def numbers(model: Any) -> list[Any]:
    """Return those that are a number, whatever has been said of them."""
    return [variable for variable in _kept(model) if len(variable.shape) == 0 and standard_dtype(variable) != "string"]


def _kept(model: Any) -> list[Any]:
    others = known_local() | set(map(id, model.metrics_variables))
    others |= {id(generator.state) for generator in seed_generators(model)}
    layers = [layer for layer in model._flatten_layers() if not type(layer).__module__.startswith(keras_private.LAYERS)]
    kept = unique(variable for layer in layers for variable in layer._non_trainable_variables)
    return [variable for variable in kept if id(variable) not in others]


def _is_shared(variable: Any) -> bool:
    if variable.aggregation in ("mean", "sum"):
        return True
    is_number = len(variable.shape) == 0 or not keras.backend.is_float_dtype(standard_dtype(variable))
    return bool(is_number and variable.aggregation == "none" and standard_dtype(variable) != "string")


def together(step: StepFunction) -> StepFunction:
    """Return a training step after which the states are those of all ranks; inside of `running_step`."""

    def on_jax(state: Any, data: Any) -> Any:
        logs, (trainable, others, *rest) = step(state, data)
        model = _running().model
        known = {id(variable): i for i, variable in enumerate(model.non_trainable_variables)}
        variables = [variable for variable in shared(model) if id(variable) in known]
        places = [known[id(variable)] for variable in variables]
        others = list(others)
        moved = _of_all(variables, [state[1][i] for i in places], [others[i] for i in places])
        for place, value in zip(places, moved, strict=True):
            others[place] = value
        return logs, (trainable, others, *rest)

    def in_place(data: Any) -> Any:
        variables = shared(_running().model)
        before = [ops.copy(variable.value) for variable in variables]
        logs = step(data)
        for variable, value in zip(variables, _of_all(variables, before, [v.value for v in variables]), strict=True):
            variable.assign(value)
        return logs

    return on_jax if keras.backend.backend() == "jax" else in_place


def _running() -> running.Step:
    step = running.step()
    assert step is not None  # noqa: S101
    return step


def _of_all(variables: Sequence[Any], before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    """Return the values after the step of all ranks. Collective, if there are variables.

    Args:
        variables: whose values they are.
        before: the values, the same on all ranks.
        now: what this rank's step has made of them.
    """
    step = _running()
    team = current.team_of(step.model)
    if not variables or team.size == 1:
        return list(now)
    wide = any(standard_dtype(variable) == "float64" for variable in variables)
    dtype = "float64" if wide else "float32"
    samples = ops.cast(1 if step.count is None else step.count, dtype)
    moves = [
        _moved(ops.convert_to_tensor(a), ops.convert_to_tensor(b), dtype) for a, b in zip(before, now, strict=True)
    ]
    # Products of whole numbers are exact, and so is what a counter moves by.
    weighted = [
        ops.reshape(m if v.aggregation == "sum" else samples * m, (-1,)) for v, m in zip(variables, moves, strict=True)
    ]
    packed = ops.concatenate([*weighted, ops.reshape(samples, (1,))])
    packed = ops.where(samples > 0, packed, ops.zeros_like(packed))
    specs = [TensorSpec("moves of states", tuple(packed.shape), dtype)]
    plan = team.plan(f"{step.key}/states", specs, op="sum", weighted=False)
    (total,) = backends.current().reduce(plan, [ops.stop_gradient(packed)])
    result, start = [], 0
    for variable, old in zip(variables, before, strict=True):
        end = start + math.prod(variable.shape)
        move = ops.reshape(total[start:end], tuple(variable.shape))
        divisor = 1.0 if variable.aggregation == "sum" else ops.maximum(total[-1], 1)
        result.append(_after(old, move / divisor))
        start = end
    return result


def of_parts(variable: Any, before: Any, after: np.ndarray, samples: np.ndarray) -> Any:
    """Return the value of a state after the step of all virtual ranks, whatever rank has computed which of them.

    Args:
        variable: whose value it is.
        before: its value, the same for all parts.
        after: what the step of each part has made of it, (parts, ...).
        samples: of each part.
    """
    before = ops.convert_to_tensor(before)
    dtype = "float64" if standard_dtype(variable) == "float64" else "float32"
    with_samples = samples > 0
    moves = _moved(before, backends.current().from_numpy(after[with_samples], before), dtype)
    if variable.aggregation == "sum":
        return _after(before, ops.sum(moves, axis=0))
    weights = samples[with_samples].reshape(-1, *[1] * len(variable.shape))
    move = ops.sum(ops.convert_to_tensor(weights, dtype) * moves, axis=0)
    return _after(before, move / max(int(samples.sum()), 1))


def _is_float(value: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)))


def _moved(before: Any, after: Any, dtype: str) -> Any:
    """Return by how much a state has moved; from infinity, where it has come to."""
    if _is_float(before):
        return ops.cast(after, dtype) - _origin(ops.cast(before, dtype))
    if keras.backend.standardize_dtype(before.dtype) == "bool":
        return ops.cast(after, dtype) - ops.cast(before, dtype)
    up = after > before  # of integers without a sign no difference is negative
    return ops.where(up, ops.cast(after - before, dtype), -ops.cast(before - after, dtype))


def _origin(before: Any) -> Any:
    return ops.where(ops.isfinite(before), before, ops.zeros_like(before))


def _after(before: Any, move: Any) -> Any:
    """Return the state that has moved."""
    kind = before.dtype
    if _is_float(before):
        return ops.cast(_origin(ops.cast(before, move.dtype)) + move, kind)
    if keras.backend.standardize_dtype(kind) == "bool":
        return ops.cast(before, move.dtype) + move > 0.5
    steps = ops.round(move)
    return ops.where(steps < 0, before - ops.cast(-steps, kind), before + ops.cast(steps, kind))
