# SPDX-License-Identifier: Apache-2.0
"""Pipelined teams: a step applies the average of the gradients of the step before, which had a whole step's time.

The engine (native/engine/pipeline.hpp) decides at run time what a step gets back, the average before or its own, and
how many updates it makes: none, one, or two where training becomes synchronous again. So one traced step serves the
whole training. An average that is still outstanding is applied by `drain`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.schedule import Schedule
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.state import variables as model_variables


@dataclasses.dataclass
class DelayedAverage:
    """An optimizer whose averages come a step late."""

    optimizer: Any
    plan: Any
    variables: Sequence[Any]  # those with a gradient, in the optimizer's order
    scaled: bool  # whether the plan ends with the loss scale under which the gradients were computed


def say_what_is_late() -> None:
    """Tells the user of averages that no step has applied."""
    states = [state for _, state in current.job().known.optimizers()]
    late = sum(line.plan.outstanding() for state in states for line in state.delayed)
    if late:
        current.notice(
            f"{late} average{'s' * (late > 1)} of pipelined teams not applied: in loops around train_on_batch, call "
            "keras_hpc.drain(model) at the end"
        )


def apply(
    team: Any,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    count: Any,
    key: str,
    update: Callable[..., Any],
) -> None:
    """Lets an optimizer take the updates of this step. Collective.

    Args:
        team: the team that reduces.
        optimizer: it does not accumulate.
        gradients: this rank's; those that are None stay None.
        variables: theirs.
        count: samples of this rank in this step, a number or a scalar tensor; None if every rank counts alike.
        key: names the plan, the same on every rank.
        update: makes one update: `update(gradients)`.
    """
    line, tensors = _line_of(team, optimizer, gradients, variables, key)
    if not optimizer.built:
        optimizer.build([*variables])
    full = functools.partial(_with_nones, gradients)
    backend = backends.current()
    reduced, updates = backend.turn(line.plan, tensors, weight=count)

    def one(values: Sequence[Any]) -> None:
        update(full(_rescaled(line, values)))

    _repeat(line, updates, reduced, [*variables, *_variables_of(optimizer)], one)


def apply_stateless(
    team: Any,
    optimizer: Any,
    gradients: Sequence[Any],
    count: Any,
    key: str,
    state_values: Any,
    update: Callable[..., Any],
) -> Any:
    """The same for `stateless_apply` of JAX: `update(state, gradients)` returns the state after one update."""

    def scale_of(values: Any) -> Any:
        found = [v for o, v in zip(optimizer.variables, values[1], strict=True) if o is optimizer.dynamic_scale]
        return found[0]

    trained = model_variables.trained_by(optimizer)
    line, tensors = _line_of(team, optimizer, gradients, trained, key, scale_of(state_values))
    backend = backends.current()
    reduced, updates = backend.turn(line.plan, tensors, weight=count)

    def one(values: Any, averages: Sequence[Any]) -> Any:
        return update(values, _with_nones(gradients, _rescaled(line, averages, scale_of(values))))

    return backend.repeat(line.plan, updates, reduced, state_values, one)


def apply_accumulated(
    team: Any,
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    key: str,
    update: Callable[..., Any],
) -> None:
    """The same for an optimizer that accumulates gradients: its updates, not its micro-batches, are a step late.

    Args:
        team: the team that reduces.
        optimizer: with `gradient_accumulation_steps`.
        gradients: this rank's of a micro-batch, scaled by its share of the samples.
        variables: theirs.
        key: names the plan, the same on every rank.
        update: makes one update, as the optimizer does without accumulation.
    """
    line, _ = _line_of(team, optimizer, gradients, variables, key)
    steps = optimizer.gradient_accumulation_steps
    kept = [index for index, gradient in enumerate(gradients) if gradient is not None]
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(variables[index])] for index in kept]
    backend = backends.current()
    before = keras.ops.copy(optimizer._iterations)  # of micro-batches; not the variable, which changes
    due = keras.ops.equal((before + 1) % steps, 0)
    own = [gradients[index] + accumulated for index, accumulated in zip(kept, sums, strict=True)]

    def micro_batch() -> None:
        for accumulated, value in zip(sums, own, strict=True):
            accumulated.assign(value)

    def whole() -> None:
        reduced, updates = backend.turn(line.plan, [value / steps for value in own], active=due)

        def one(values: Sequence[Any]) -> None:
            # What depends on the number of updates (Adam's bias, schedules) must see that, not of micro-batches.
            optimizer._iterations.assign(before // steps)
            with _not_accumulating(optimizer):
                update(_with_nones(gradients, values))

        _repeat(line, updates, reduced, [*variables, *_variables_of(optimizer)], one)

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def reset() -> Any:
            whole()
            for accumulated in sums:
                accumulated.assign(keras.ops.zeros_like(accumulated))
            return tf.constant(True)

        def wait() -> Any:
            micro_batch()
            return tf.constant(False)

        tf.cond(due, reset, wait)
    else:
        whole()
        for accumulated, value in zip(sums, own, strict=True):
            accumulated.assign(keras.ops.where(due, keras.ops.zeros_like(value), value))
    optimizer._iterations.assign(before + 1)


def set_window(model: Any, schedule: Schedule, steps: int | None, done: int) -> None:
    """Tell the engine which of a training's updates are pipelined; see `Schedule.window`."""
    accumulation = _accumulation(model.optimizer)
    window = schedule.window(None if steps is None else steps // accumulation, done // accumulation)
    known = current.job().known
    for optimizer in _with_held(model.optimizer):
        known.optimizer(optimizer).window = window
    for line in _lines_of(model):
        line.plan.set_schedule(*window)


def drain(model: Any) -> None:
    """Apply every average that a model's variables wait for. Collective on the teams of their optimizers."""
    for line in _outstanding_lines(model):
        _apply_outstanding(line, keep=False)


@contextlib.contextmanager
def drained(model: Any) -> Iterator[None]:
    """Inside, a model's variables are as `drain` would leave them; afterwards they are as before.

    For what one rank does alone, as saving. It waits for nobody who is not on the way.
    """
    lines = _outstanding_lines(model)
    if not lines:
        yield
        return
    backend = backends.current()
    variables = [v for line in lines for v in (*line.variables, *_variables_of(line.optimizer))]
    before = [backend.to_numpy(variable.value) for variable in variables]
    for line in lines:
        _apply_outstanding(line, keep=True)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            backend.assign(variable, value)


def outstanding(models: Sequence[Any]) -> list[tuple[int, int, list[np.ndarray]]]:
    """Return the averages that models' variables wait for; they go on waiting. Collective in effect.

    Returns:
        Of each, the number of its optimizer and line, and its arrays, as `restore` takes them.
    """
    late = {id(line) for model in models for line in _outstanding_lines(model)}
    return [
        (number, place, line.plan.take(keep=True))
        for number, optimizer in enumerate(_optimizers_of(models))
        for place, line in enumerate(current.job().known.optimizer(optimizer).delayed)
        if id(line) in late
    ]


def restore(models: Sequence[Any], averages: Sequence[tuple[int, int, list[np.ndarray]]]) -> None:
    """Make averages outstanding that an earlier process held. On every rank of the models' teams."""
    optimizers = _optimizers_of(models)
    for number, place, arrays in averages:
        known = current.job().known.optimizer(optimizers[number])
        if place < len(known.delayed):
            known.delayed[place].plan.put(arrays)
        else:
            known.restored[place] = arrays


def _line_of(
    team: Any, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], key: str, scale: Any = None
) -> tuple[DelayedAverage, list[Any]]:
    """Return the line of an optimizer, and what it reduces in this step."""
    kept = [index for index, gradient in enumerate(gradients) if gradient is not None]
    for index in kept:
        if hasattr(gradients[index], "dense_shape") or getattr(variables[index], "overwrite_with_gradient", False):
            raise ValueError(
                "A pipelined team averages dense gradients only. Expected a synchronous schedule for this model. "
                f"Received: a sparse gradient, or a float8 scale, of `{variables[index].path}`"
            )
    tensors = [gradients[index] for index in kept]
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled:
        scale = _loss_scale(optimizer) if scale is None else scale
        tensors.append(keras.ops.reshape(keras.ops.cast(scale, "float32"), (1,)))
    known = current.job().known.optimizer(optimizer)
    own = [variables[index] for index in kept]
    for line in known.delayed:
        if len(line.variables) == len(own) and all(a is b for a, b in zip(line.variables, own, strict=True)):
            return line, tensors
    names = [f"{index}: {running.plain_name(variables[index])}" for index in kept] + ["loss scale"] * scaled
    specs = [
        TensorSpec(name, tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))
        for name, tensor in zip(names, tensors, strict=True)
    ]
    # An optimizer may be given other variables in turn: each choice of them is late by itself.
    name = f"{key}/{len(known.delayed)}" if known.delayed else key
    device = backends.current().device_of(tensors, pipelined=True)
    plan = team.plan(name, specs, wire_dtype=team.wire_dtype, pipelined=True, device=device)
    average = known.restored.pop(len(known.delayed), None)
    if average is not None:
        plan.put(average)
    line = DelayedAverage(weakref.proxy(optimizer), plan, own, scaled)
    known.delayed.append(line)
    # Without a fit: of as many steps as the user has said.
    plan.set_schedule(*(known.window or team.schedule.window(team.schedule.max_steps)))
    return line, tensors


def _lines_of(model: Any) -> list[DelayedAverage]:
    """The lines that change variables of a model, in the order in which they began."""
    own = set(map(id, model.variables))
    lines = [line for _, known in current.job().known.optimizers() for line in known.delayed]
    return [line for line in lines if not own.isdisjoint(map(id, line.variables))]


def _outstanding_lines(model: Any) -> list[DelayedAverage]:
    """The lines that hold an average back. Their variables are those after the last step, which has ended."""
    lines = _lines_of(model)
    if lines and getattr(model, "_jax_state", None) is not None and not model._jax_state_synced:
        model.jax_state_sync()
    for line in lines:
        keras.ops.convert_to_numpy(line.optimizer._iterations)  # JAX may be computing it still
    return [line for line in lines if line.plan.outstanding()]


def _optimizers_of(models: Sequence[Any]) -> list[Any]:
    return model_variables.unique(optimizer for model in models for optimizer in model_variables.optimizers_of(model))


def _with_held(optimizer: Any) -> list[Any]:
    """The optimizer and those that it holds."""
    return [optimizer, *(inner for held in model_variables.held_optimizers(optimizer) for inner in _with_held(held))]


def _variables_of(optimizer: Any) -> list[Any]:
    return [variable for one in _with_held(optimizer) for variable in one.variables]


def _accumulation(optimizer: Any) -> int:
    return max(one.gradient_accumulation_steps or 1 for one in _with_held(optimizer))


@contextlib.contextmanager
def _not_accumulating(optimizer: Any) -> Iterator[None]:
    steps, optimizer.gradient_accumulation_steps = optimizer.gradient_accumulation_steps, None
    try:
        yield
    finally:
        optimizer.gradient_accumulation_steps = steps


def _with_nones(gradients: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    following = iter(values)
    return [None if gradient is None else next(following) for gradient in gradients]


def _loss_scale(optimizer: Any) -> Any:
    return optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale


def _rescaled(line: DelayedAverage, values: Sequence[Any], scale: Any = None) -> list[Any]:
    """Turn averages of gradients of the loss with an earlier scale into those with the present one: powers of two."""
    if not line.scaled:
        return list(values)
    present = keras.ops.cast(_loss_scale(line.optimizer) if scale is None else scale, "float32")
    factor = present / values[-1][0]
    return [value * keras.ops.cast(factor, value.dtype) for value in values[:-1]]


def _repeat(
    line: DelayedAverage,
    updates: Any,
    reduced: Sequence[Any],
    variables: Sequence[Any],
    one: Callable[[Sequence[Any]], None],
) -> None:
    """Make the updates of a step, in place."""
    backend = backends.current()
    if keras.backend.backend() != "jax":
        backend.repeat(line.plan, updates, reduced, one)
        return
    variables = list({id(variable): variable for variable in variables}.values())

    def functional(values: Any, averages: Sequence[Any]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as inner:
            one(averages)
        return [inner.get_current_value(variable) for variable in variables]

    before = [variable.value for variable in variables]
    for variable, value in zip(variables, backend.repeat(line.plan, updates, reduced, before, functional), strict=True):
        variable.assign(value)


def _apply_outstanding(line: DelayedAverage, *, keep: bool) -> None:
    """Make the outstanding update outside of a step."""
    arrays = line.plan.take(keep=keep)
    optimizer = line.optimizer
    values = _rescaled(line, [keras.ops.convert_to_tensor(array) for array in arrays])
    with current.unhooked():
        if not optimizer.gradient_accumulation_steps:
            optimizer.apply(values, line.variables)
            return
        before = np.array(keras.ops.convert_to_numpy(optimizer._iterations))
        optimizer._iterations.assign(before // optimizer.gradient_accumulation_steps)
        with _not_accumulating(optimizer):
            optimizer.apply(values, line.variables)
        optimizer._iterations.assign(before)
