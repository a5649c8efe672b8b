# SPDX-License-Identifier: Apache-2.0
"""A step of virtual ranks: this rank's parts in turn, the sum of all parts' gradients in a fixed order, one update."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current
from keras_hpc.job.virtual import Virtual
from keras_hpc.keras_hooks import building
from keras_hpc.keras_hooks.state import layer_states
from keras_hpc.keras_hooks.state.variables import seed_generators
from keras_hpc.keras_hooks.step import own_state, zeros
from keras_hpc.keras_hooks.trials import own_steps
from keras_hpc.keras_hooks.virtual import programs, sums
from keras_hpc.keras_hooks.virtual.beginning import Beginning


def function_of(model: Any, kind: str, made: Any) -> Callable[..., Any]:
    """Return the train or test function of a model.

    Args:
        model: the model, which need not be built.
        kind: "train" or "test".
        made: what Keras has made.

    Raises:
        ValueError: it trains in a way that parts cannot.
    """
    check(model, kind)
    reference = weakref.ref(model)  # which holds the function
    key = f"{current.job().known.key_of(model, 'model')}/{kind}"
    held: list[tuple[Any, Any, Any, Beginning, bool]] = []

    def run(*arguments: Any) -> Any:
        owner: Any = reference()
        *rest, source = arguments
        batches = _batches(source, len(_virtual().mine))
        if not held:
            update = programs.update(owner) if kind == "train" else None
            beginning = Beginning(owner.trainable_variables if kind == "train" else ())
            is_summed = kind == "train" and sums.are_early(owner)
            part_of = programs.of_part(owner, kind, key, made)
            held.append((programs.reading(owner), part_of, update, beginning, is_summed))
        return _run(owner, rest[0] if rest else None, batches, *held[0])

    return run


def check(model: Any, kind: str) -> None:
    """Raise ValueError where a model trains in a way that parts cannot."""
    said = f"With init(virtual_ranks=) model `{model.name}` "
    step = getattr(model, f"{kind}_step")
    if not own_steps.has_own(model, f"{kind}_step"):
        raise ValueError(f"{said}trains by `fit` with Keras' own {kind}_step so far. Received: {step!r}")
    if not own_steps.has_keras_loss(model) and current.job().batch == "global":
        raise ValueError(
            f'{said}and batch="global" has a loss of keras.losses, as nobody knows whether one of its own is a mean. '
            "Received: a compute_loss() of its own"
        )
    if model.steps_per_execution != 1:
        raise ValueError(f"{said}runs one step at a time. Received: steps_per_execution={model.steps_per_execution}")
    extremes = [v.path for v in model.trainable_variables if getattr(v, "overwrite_with_gradient", False)]
    if extremes:
        raise ValueError(f"{said}has no float8 scales so far. Received: {extremes[0]}")
    layers = model._flatten_layers() if keras.backend.backend() == "torch" else ()
    buffers = [f"{layer.name}/{name}" for layer in layers for name, _ in layer.named_buffers()]
    if buffers and kind == "train":  # of which parts have none of their own
        raise ValueError(
            f"{said}has no modules of PyTorch that keep more than weights so far. Expected layers of Keras. Received: "
            f"{', '.join(buffers)}"
        )


def _virtual() -> Virtual:
    virtual = current.job().virtual
    assert virtual is not None  # noqa: S101
    return virtual


def _batches(source: Any, count: int) -> list[Any]:
    """Return the batches of this rank's parts in one step."""
    batches = source if isinstance(source, list) else list(itertools.islice(_stream(source), count))
    if len(batches) not in (0, count):
        raise RuntimeError(f"Expected {count} batches, one for each part of this rank. Received: {len(batches)}")
    if not batches:
        raise StopIteration
    return batches


def _stream(source: Any) -> Iterator[Any]:
    if keras.backend.backend() != "tensorflow":
        return iter(source)
    import tensorflow as tf

    optional = tf.experimental.Optional
    plain = lambda batch: keras.tree.map_structure(lambda x: None if isinstance(x, optional) else x, batch)  # noqa: E731
    return map(plain, source)


def _run(
    model: Any,
    state: Any,
    batches: list[Any],
    read: Callable[[Sequence[Any]], list[Any]],
    part_of: programs.Program,
    update: Any,
    beginning: Beginning,
    is_summed: bool,
) -> Any:
    virtual, team = _virtual(), current.team_of(model)
    counts = list(map(_count, batches))
    own = programs.own_variables(model)
    seeds = {id(generator.state) for generator in seed_generators(model)}
    of_samples = set(map(id, own_state(model, shares_states=False))) - seeds
    at_first = read(own) if state is None else [*state[1], *state[-1]]
    statistics = len(model.non_trainable_variables)  # behind them are metrics, which others change with their parts'
    assigned = list(map(virtual.states.was_assigned, own[:statistics], at_first[:statistics]))
    total = np.array([sum(counts), *assigned], np.int64)
    team.allreduce(total, op="sum", what="the samples of all virtual ranks")
    virtual.states.forget(variable for variable, changed in zip(own, total[1:], strict=False) if changed)
    gradients = sums.Gradients(virtual, model.trainable_variables, is_summed)
    logs: Any = None
    values = left = at_first
    for part, batch, count in zip(virtual.mine, batches, counts, strict=True):
        beginning.again(part, virtual.mine)
        before = [virtual.states.get(part, v, value) for v, value in zip(own, at_first, strict=True)]
        data = batch if count else zeros(batch, building.fixed_batch(model) or 1)
        given = programs.Part(part, int(total[0]), count / int(total[0]), is_summed)
        with beginning.watched():
            found, new_logs, values = part_of(state, data, given, before)
        left = values
        logs = new_logs if count or logs is None else logs
        if count == 0:  # what zeros have done is forgotten, but not how far the seeds have come
            values = [old if id(v) in of_samples else new for v, new, old in zip(own, values, before, strict=True)]
        mine = [(v, value) for v, value in zip(own, values, strict=True) if id(v) not in seeds]
        virtual.states.put(part, [v for v, _ in mine], [value for _, value in mine])
        if update is not None:
            gradients.add(part, found, given.share)
    if update is not None:
        values = _together(virtual, team, layer_states.shared(model), own, at_first, values, counts)
    virtual.states.leave(own, values)
    state = _with_values(model, state, own, values, left)
    if update is not None:
        state = update(state, gradients.mean(team))
    return logs if state is None else (logs, state)


def _together(
    virtual: Virtual,
    team: Any,
    shared: Sequence[Any],
    own: Sequence[Any],
    at_first: Sequence[Any],
    values: Sequence[Any],
    counts: Sequence[int],
) -> list[Any]:
    """Return the values that a step leaves, of what layers of the user's own keep those of all parts. Collective then.

    Args:
        virtual: the parts.
        team: of all ranks.
        shared: what moves as on one rank; see layer_states.py.
        own: the variables that a step changes by itself.
        at_first: their values before the step.
        values: those that this rank's last part has made of them.
        counts: samples of this rank's parts.
    """
    result = list(values)
    if shared:
        samples = team.allgather(np.array(counts, np.int64), "samples of each virtual rank")
        places = {id(variable): place for place, variable in enumerate(own)}
        for variable, of_parts in zip(shared, virtual.states.gather(team, shared), strict=True):
            place = places[id(variable)]
            result[place] = layer_states.of_parts(variable, at_first[place], of_parts, samples)
        virtual.states.forget(shared)
    return result


def _count(batch: Any) -> int:
    leaf = next((leaf for leaf in keras.tree.flatten(batch) if leaf is not None), None)
    if leaf is None or len(leaf.shape) == 0:
        raise ValueError(f"With init(virtual_ranks=) data have samples. Expected an axis of them. Received: {batch!r}")
    return int(leaf.shape[0])


def _with_values(model: Any, state: Any, own: Sequence[Any], values: Sequence[Any], left: Sequence[Any]) -> Any:
    """Let the model have values in its state, which JAX hands on, where its last part has left others."""
    if state is None:
        for variable, value, last in zip(own, values, left, strict=True):
            if value is not last:
                variable.assign(value)
        return None
    statistics = len(model.non_trainable_variables)
    return (state[0], list(values[:statistics]), *state[2:-1], list(values[statistics:]))
