# SPDX-License-Identifier: Apache-2.0
"""Metrics of all ranks: their states are merged at the end of an epoch and of `evaluate`.

The state of Keras' metrics is sums and counts, which are added up. Of others a metric may say how to merge it: each
variable by its `aggregation`, or all together by `merge_state(metrics)`. A metric that is not reset goes on with what
its own rank has counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current, log
from keras_hpc.keras_hooks import keras_private, part_losses, running
from keras_hpc.keras_hooks.trials import metric_states

_SAID = "_keras_hpc_aggregation"  # on a variable whose aggregation the user has chosen
_OWN = "_keras_hpc_own"  # on a variable that holds the ranks' merged state: this rank's, and the merged one


def install(job: Any, patcher: Any) -> None:
    """Notices which variables of metrics say how they are to be merged, and what goes on after an epoch."""
    metric_states.install(patcher)

    def noticing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add_variable(self: Any, *args: Any, **kwargs: Any) -> Any:
            variable = original(self, *args, **kwargs)
            if len(args) > 3 or "aggregation" in kwargs:
                setattr(variable, _SAID, True)
            return variable

        return add_variable

    def separating(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reset_metrics(self: Any) -> Any:
            virtual = current.job().virtual
            if virtual is not None and not current.is_local():
                _reset_parts(virtual.states, self, original)
                return
            separate(self)
            original(self)

        return reset_metrics

    patcher.patch(keras.metrics.Metric, "add_variable", noticing)
    patcher.patch(keras_private.get(keras_private.TRAINER), "reset_metrics", separating)


def separate(model: Any) -> None:
    """Give each rank its own states again: what goes on from a merge would count once per rank at the next one.

    That is what a metric does not reset, and the state in which an `evaluate` amid an epoch leaves metrics.
    """
    backend = backends.current()
    for variable in model.metrics_variables:
        own, merged = vars(variable).pop(_OWN, (None, None))
        if own is not None and np.array_equal(backend.to_numpy(variable.value), merged, equal_nan=True):
            backend.assign(variable, own)


def _reset_parts(states: Any, model: Any, reset: Callable[..., Any]) -> None:
    """Reset metrics as each part has them: what a metric does not reset goes on with what each part has."""
    own = [variable for variable in model.metrics_variables if states.has(variable)]
    if not own:
        reset(model)
        return
    backend = backends.current()
    for part in states.parts:
        for variable in own:
            backend.assign(variable, backend.to_numpy(states.get(part, variable, None)))
        reset(model)
        states.put(part, own, [keras.ops.copy(variable.value) for variable in own])


def reduce_logs(model: Any, logs: Any, result_or_logs: Callable[..., Any]) -> Any:
    """Return the logs of all ranks together, the same on each. Collective on the model's team.

    Args:
        model: its metrics are reduced in place.
        logs: what the last step returned. Values that are no metrics, from a custom step, are averaged by samples.
        result_or_logs: Keras' method, which takes metrics where their names match those of `logs`.
    """
    team = current.team_of(model)
    given = logs if isinstance(logs, dict) else {}
    flat = _flat(given)
    scalars = {name: float(number) for name, value in flat.items() if np.ndim(number := _number(value)) == 0}
    local = _flat(model.get_metrics_result())
    # A custom step may log a metric, under its name or another, beside other values: on every rank the same metric.
    virtual = current.job().virtual is not None  # whose logs are those of a part that had samples
    names = {name: [name] * (name in local) if virtual else _named_first(name, local) for name in scalars}
    samples = _samples(model)
    weighted = [value * samples if samples else 0.0 for value in scalars.values()]
    # What zeros gave a rank without samples is no metric.
    votes = [
        float(virtual or not samples or _same(value, local[metric]))
        for name, value in scalars.items()
        for metric in names[name]
    ]
    total, *sums = reduce_metrics(model, team, [samples, *weighted, *votes])
    averages, votes = [value / total if total else value for value in sums[: len(scalars)]], sums[len(scalars) :]
    agreed = iter([count == team.size for count in votes])
    metric_of = {name: [metric for metric in names[name] if next(agreed)] for name in scalars}
    others = [name for name in scalars if not metric_of[name]]
    if virtual and others:
        raise ValueError(
            "With init(virtual_ranks=) logs are those of metrics, which parts can merge. Received: values that are no "
            f"metrics, {', '.join(others)}"
        )
    result = dict(result_or_logs(model, flat))
    final = _flat(model.get_metrics_result())
    if any(map(_counts_in_python, _leaves(model.metrics))):
        final |= _means(team, final)
    if result.keys() == final.keys():
        result = {name: final[name] for name in result}  # Keras knows none of a metric that gives several values
    else:
        for name, average in zip(scalars, averages, strict=True):
            result[name] = final[metric_of[name][0]] if metric_of[name] else float(average)
    return result if flat.keys() == given.keys() else _nested(given, result)


def _named_first(name: str, local: dict[str, Any]) -> list[str]:
    """Return the metrics that a value of logs may be, that of its own name first."""
    numbers = [metric for metric, value in local.items() if np.ndim(_number(value)) == 0]
    return sorted(numbers, key=lambda metric: metric != name)


def _counts_in_python(metric: Any) -> bool:
    """Return whether a metric of the user's own keeps nothing that ranks could merge."""
    return not metric.variables and not type(metric).update_state.__module__.startswith("keras.")


def _means(team: Any, values: dict[str, Any]) -> dict[str, float]:
    """Return the means over ranks of those of the values that are numbers. Collective."""
    numbers = {name: float(number) for name, value in values.items() if np.ndim(number := _number(value)) == 0}
    means = np.array(list(numbers.values()), np.float64)
    team.allreduce(means, op="mean")
    return dict(zip(numbers, means.tolist(), strict=True))


def _samples(model: Any) -> float:
    """Return how many samples this rank had in the last step, or 1 where that is not known."""
    call = running.call()
    kind = "test" if call is not None and call.kind == "evaluate" else "train"
    samples = current.job().known.model(model).samples.get(kind)
    return 1.0 if samples is None else float(_number(samples))


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Return logs as Keras flattens them: the metrics of `compile` are a dictionary of their own in `self.metrics`."""
    flat: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat


def _nested(like: dict[str, Any], flat: dict[str, Any]) -> dict[str, Any]:
    """Undo `_flat`: Keras 3.10 gives the user logs as they are nested."""
    return {name: _nested(value, flat) if isinstance(value, dict) else flat[name] for name, value in like.items()}


def reduce_metrics(model: Any, team: Any, extra: list[float]) -> np.ndarray:
    """Merge the metrics of all ranks in place, in one message. Collective.

    The sum is in float64, which holds float32 sums and integers up to 2^53 exactly.

    Args:
        model: the model whose `metrics` are merged.
        team: its team.
        extra: numbers that travel along.

    Returns:
        The sums of `extra`.
    """
    separate(model)
    backend = backends.current()
    merging = [metric for metric in _leaves(model.metrics) if callable(getattr(metric, "merge_state", None))]
    merged = {id(v) for metric in merging for v in metric.variables}
    everything = {id(v): v for v in model.metrics_variables}
    if (virtual := current.job().virtual) is not None:
        _merge_virtual(virtual.states, team, list(everything.values()), merging)
        _warn_of_unknown(model, merging)
        sums = np.asarray(extra, np.float64)
        team.allreduce(sums, op="sum")
        return sums
    own = {key: backend.to_numpy(variable.value) for key, variable in everything.items()}
    variables = [variable for key, variable in everything.items() if key not in merged]
    _warn_of_unknown(model, merging)
    arrays = [own[id(variable)] for variable in variables]
    values_of = [array.reshape(-1).astype(np.float64) for array in arrays]
    counting = part_losses.counting_ranks(model, team)
    for variable, part in zip(variables, values_of, strict=True):
        if team.rank not in counting or (variable.aggregation == "only_first_replica" and team.rank > 0):
            part[:] = 0
    buffer = np.concatenate([*values_of, np.asarray(extra, np.float64)])
    team.allreduce(buffer, op="sum", what="states of metrics")
    start = 0
    for variable, array in zip(variables, arrays, strict=True):
        value = buffer[start : start + array.size].reshape(array.shape)
        start += array.size
        if variable.aggregation == "mean":
            value = value / len(counting)
        backend.assign(variable, value.astype(array.dtype))
    for metric in merging:
        _merge(metric, team, counting)
    for key, variable in everything.items():
        setattr(variable, _OWN, (own[key], backend.to_numpy(variable.value)))
    return buffer[start:]


def _merge(metric: Any, team: Any, counting: Sequence[int]) -> None:
    """Lets a metric merge the states of ranks, in rank order, the same on each. Collective."""
    backend = backends.current()
    arrays = [backend.to_numpy(variable.value) for variable in metric.variables]
    others = [_twin(metric) for _ in counting[1:]]
    _merge_states(metric, others, [team.allgather(array[None]) for array in arrays], counting)


def _merge_states(metric: Any, others: Sequence[Any], everyone: Sequence[np.ndarray], counting: Sequence[int]) -> None:
    """Lets a metric merge states, of each of its variables those of all ranks or parts, which its twins hold."""
    backend = backends.current()
    for rank, holder in zip(counting, [metric, *others], strict=True):
        for variable, values in zip(holder.variables, everyone, strict=True):
            backend.assign(variable, values[rank])
    metric.merge_state(others)


def _merge_virtual(states: Any, team: Any, variables: Sequence[Any], merging: list[Any]) -> None:
    """Merge the metrics of all parts in place, in the order of the parts. Collective."""
    backend = backends.current()
    gathered = dict(zip(map(id, variables), states.gather(team, variables), strict=True))
    for metric in merging:
        everyone = [gathered.pop(id(variable)) for variable in metric.variables]
        counting = range(len(everyone[0])) if everyone else [0]
        _merge_states(metric, [_twin(metric) for _ in counting[1:]], everyone, counting)
    for variable in variables:
        if id(variable) not in gathered:
            continue
        backend.assign(variable, _aggregated(variable, gathered[id(variable)]))


def _aggregated(variable: Any, values: np.ndarray) -> np.ndarray:
    """Return what the values of a metric's variable of all ranks or parts make together."""
    total = np.sum(values.astype(np.float64), axis=0)
    if variable.aggregation == "mean":
        total = total / len(values)
    elif variable.aggregation == "only_first_replica":
        total = values[0]
    return np.asarray(total, values.dtype)


def _merged(metric: Any, everyone: Sequence[np.ndarray]) -> list[Any]:
    """Return the merged values of a metric's variables, which stay as they are."""
    if not callable(getattr(metric, "merge_state", None)):
        return list(map(_aggregated, metric.variables, everyone))
    others = [_twin(metric) for _ in everyone[0][1:]]
    with keras.StatelessScope():
        _merge_states(metric, others, everyone, range(len(everyone[0])))
        return [backends.current().to_numpy(variable.value) for variable in metric.variables]


def _twin(metric: Any) -> Any:
    """Return a metric with variables of its own, whatever arguments its class wants."""
    # A copy: on PyTorch a variable takes the tensor that it is given, and an assignment writes into it.
    fresh: dict[int, Any] = {
        id(v): keras.Variable(keras.ops.copy(v.value), dtype=v.dtype, trainable=False, name=v.name)
        for v in metric.variables
    }

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if isinstance(value, keras.metrics.Metric) and id(value) not in fresh:  # one inside has the same twin each time
            fresh[id(value)] = twin = object.__new__(type(value))
            vars(twin).update({name: replaced(held) for name, held in vars(value).items()})
        return fresh.get(id(value), value)

    return replaced(metric)


def _leaves(metrics: Iterable[Any]) -> Iterator[Any]:
    """The metrics that the user knows: those of `compile` are inside one of Keras' own."""
    for metric in metrics:
        inner = getattr(metric, "metrics", None) if type(metric).__module__.startswith("keras.") else None
        if inner:
            yield from _leaves(inner)
        else:
            yield metric


def _warn_of_unknown(model: Any, merging: list[Any]) -> None:
    """Names metrics of which nobody can know whether adding up their states is right, once."""
    said = current.job().said
    for metric in _leaves(model.metrics):
        name = f"{type(metric).__name__} `{metric.name}`"
        if name in said or current.team_of(model).rank > 0:
            continue
        said.add(name)
        if _counts_in_python(metric):
            log.warning(
                f"The metric {name} counts in attributes of Python, which keras_hpc cannot merge: its value is the "
                "mean of what each rank has of its own samples. Let it count in variables: "
                '`self.total = self.add_variable((), "zeros")`.'
            )
            continue
        answer = metric_states.ask(metric, _merged) if current.job().shares_samples else None
        if answer is not None and not answer.agrees:
            sizes = "" if answer.alike else " where their parts of a batch have other sizes"
            log.warning(
                f"The metric {name} does not say of the samples of all ranks what one rank says{sizes}: its state is "
                "no sum over samples, as where it keeps a number of a whole batch, or counts batches. Let it add up "
                "numbers of samples and count samples, or say how its state is merged, by the `aggregation` of "
                "`add_variable` or a method `merge_state(self, metrics)`. Received: "
                f"{answer.merged:.4g} for made-up samples, on one rank {answer.whole:.4g}"
            )
        elif answer is None and metric not in merging and not _adds_up(metric):
            log.warning(
                f"The metric {name} keeps a state of its own, which keras_hpc adds up over the ranks. If its state is "
                'no sum, its value is wrong. Say so: `add_variable(..., aggregation="sum")`, "mean" or '
                '"only_first_replica", or give the class a method `merge_state(self, metrics)` that merges the '
                "states of other metrics of its kind into its own."
            )


def _adds_up(metric: Any) -> bool:
    """Whether the state of a metric is sums, as far as one can see."""
    update = type(metric).update_state
    if update.__module__.startswith("keras."):
        return True
    if metric._metrics and not metric._variables:  # of others alone, as an F score of precision and recall
        return all(map(_adds_up, metric._metrics))
    if all(hasattr(variable, _SAID) for variable in metric.variables):
        return True
    names = keras_private.names_in(update)
    return "assign_add" in names and "assign" not in names


def _number(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value


def copied(value: Any) -> Any:
    """Return a value of logs as a number, or an array, that does not change any more."""
    array = np.array(_number(value))
    return array.item() if array.ndim == 0 else array


def _same(value: float, metric: Any) -> bool:
    return bool(np.isclose(value, float(metric), rtol=1e-6, atol=0, equal_nan=True))
