# SPDX-License-Identifier: Apache-2.0
"""Local steps: ranks apply their own gradients, and after a period of steps their weights become the mean.

The engine (native/engine/local_steps.hpp) counts steps and decides at run time what each has to do. So one traced step
serves the whole training, and all ranks, which begin equally many steps, decide alike. What is still apart at the end,
or before ranks look at a model together, `average` brings together, with what optimizers keep.

A rank without samples in a step leaves weights and momenta as they are, and counts the step.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.local_plan import ANCHOR, EXCHANGE, LAST, SYNCHRONOUS, LocalPlan, State
from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.schedule import Schedule
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.schedules import local_states
from keras_hpc.keras_hooks.state import layer_states, replicas
from keras_hpc.keras_hooks.state import variables as model_variables


@dataclasses.dataclass
class LocalWeights:
    """The weights that an optimizer trains, each rank its own.

    Attributes:
        optimizer: it.
        plan: averages them.
        weights: they, variables of Keras or parameters of PyTorch.
        slots: what the optimizer keeps for them.
        tensors: what the plan averages.
        slots_plan: averages slots before synchronous steps; None where the plan does, or no such steps follow.
        synchronous: whether some steps are.
        settled_at: how many local steps there were when all was made equal.
        expected: whether a checkpoint is about to give them values that are apart.
    """

    optimizer: Any
    plan: LocalPlan
    weights: Sequence[Any]
    slots: Sequence[Any]
    tensors: Sequence[Any]
    slots_plan: Any
    synchronous: bool
    settled_at: int = 0
    expected: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether ranks may hold different values. The same on all ranks, between steps."""
        return self.plan.taken() != self.settled_at


Gradients = Sequence[Any]


def begin(
    team: Any, optimizer: Any, gradients: Gradients, weights: Sequence[Any], count: Any, key: str
) -> tuple[LocalWeights, list[Any], Any]:
    """Begin a step of an optimizer. Collective in effect: all ranks begin as many.

    Args:
        team: the team that averages.
        optimizer: of Keras and built, or of PyTorch.
        gradients: this rank's; those that are None stay None.
        weights: what it trains.
        count: samples of this rank in this step, a number or a scalar tensor; None if every rank counts alike.
        key: names the plan, the same on every rank.

    Returns:
        The weights' line, the gradients, and what the step has to do.
    """
    line = _line_of(team, optimizer, weights, key)
    gradients = list(gradients)
    there = [number for number, gradient in enumerate(gradients) if gradient is not None]
    first = min(there, key=lambda number: hasattr(gradients[number], "dense_shape"))  # rather a dense one
    local = backends.local_steps()
    gradients[first], mode = local.begin(line.plan, 1.0 if count is None else count, gradients[first])
    if line.plan.options.outer is not None:
        mode = local.set_anchors(
            line.plan, mode, _has(mode, ANCHOR), lambda: [model_variables.value_of(w) for w in line.weights]
        )
    return line, gradients, mode


def end(line: LocalWeights, mode: Any) -> None:
    """End a step after its update. Collective where the mode says so."""
    local = backends.local_steps()
    if line.slots_plan is not None:
        local.average(line.slots_plan, _has(mode, LAST), line.slots)
    local.average(line.plan.plan, _has(mode, EXCHANGE), line.tensors)


def apply(
    team: Any,
    optimizer: Any,
    gradients: Gradients,
    weights: Sequence[Any],
    count: Any,
    key: str,
    average_gradients: Callable[[Any], Gradients],
    update: Callable[[Gradients], None],
) -> None:
    """Let an optimizer of Keras make the update of this step, and average weights if it is time to.

    Args:
        team: the team that averages.
        optimizer: it.
        gradients: this rank's; those that are None stay None.
        weights: theirs.
        count: samples of this rank in this step, a number or a scalar tensor; None if every rank counts alike.
        key: names the plan, the same on every rank.
        average_gradients: the gradients' mean over ranks; gets whether to communicate, on JAX, else None.
        update: makes one update: `update(gradients)`.
    """
    if not optimizer.built:
        optimizer.build([*weights])
    line, gradients, mode = begin(team, optimizer, gradients, model_variables.trained_by(optimizer), count, key)
    local = backends.local_steps()
    together = _has(mode, SYNCHRONOUS)
    if line.synchronous:
        gradients = local.choose(together, average_gradients, gradients)

    def whole() -> None:
        update(gradients)

    def nothing() -> None:
        for one in model_variables.with_held(optimizer):
            one._iterations.assign(one._iterations + 1)

    is_known = count is None or isinstance(count, (int, float))
    if is_known and (count is None or count > 0):
        whole()
    elif is_known and not line.synchronous:
        nothing()
    else:
        due = keras.ops.logical_or(keras.ops.cast(count, "float32") > 0, together) if line.synchronous else count > 0
        local.update_if(due, whole, nothing, [*line.weights, *line.slots])
    end(line, mode)


def is_synchronous(mode: Any) -> Any:
    """Return whether a step averages gradients."""
    return _has(mode, SYNCHRONOUS)


def _has(mode: Any, bit: int) -> Any:
    return mode // bit % 2 > 0


def _line_of(team: Any, optimizer: Any, weights: Sequence[Any], key: str) -> LocalWeights:
    known = current.job().known.optimizer(optimizer)
    line: LocalWeights | None = None if isinstance(known.local, local_states.Restored) else known.local
    local = model_variables.known_local()
    weights = [weight for weight in weights if id(weight) not in local]
    if line is not None and list(map(id, line.weights)) == list(map(id, weights)):
        return line
    if line is not None:
        raise ValueError(
            "An optimizer with local steps trains the same weights as long as it lives. Expected another optimizer "
            f"for others. Received: {len(weights)} weights, were {len(line.weights)}"
        )
    _refuse(optimizer, weights)
    schedule = team.schedule
    window = known.window or _window(schedule, optimizer, schedule.max_steps)
    slots = [slot for slot in model_variables.slots_of(optimizer) if id(slot) not in local]
    tensors = [*weights, *slots] if schedule.local.average_optimizer else weights
    period = 0 if schedule.local.every == "epoch" else schedule.local.every * _accumulation(optimizer)
    plan = LocalPlan(team, f"{key}/weights", _specs(tensors), len(weights), schedule.local, period)
    apart = slots and tensors is weights and schedule.cooldown_steps
    slots_plan = team.plan(f"{key}/slots", _specs(slots), weighted=False) if apart else None
    synchronous = bool(schedule.synchronous_steps or schedule.cooldown_steps)
    restored = known.local  # an earlier process has left it
    line = LocalWeights(weakref.proxy(optimizer), plan, weights, slots, tensors, slots_plan, synchronous)
    if restored is not None:
        local_states.put(line, restored.state, restored.memory, is_apart=restored.is_apart)
    plan.set_schedule(*window)
    known.local = line
    return line


def _refuse(optimizer: Any, weights: Sequence[Any]) -> None:
    """Raise ValueError where ranks could not decide alike."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "With local steps each rank would scale its loss by itself. Expected an optimizer without loss scaling: a "
            "dtype policy of bfloat16 or float32. Received: a LossScaleOptimizer"
        )
    strange = [w for w in weights if getattr(w, "overwrite_with_gradient", False) or not _is_float(w)]
    if strange:
        raise ValueError(
            "Local steps average weights of floating-point numbers. Received: a float8 scale, or integers: "
            f"`{getattr(strange[0], 'path', strange[0].dtype)}`"
        )


def _is_float(value: Any) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)))


def _specs(tensors: Sequence[Any]) -> list[TensorSpec]:
    return [
        TensorSpec(f"{n}: {running.plain_name(t)}", tuple(t.shape), model_variables.standard_dtype(t))
        for n, t in enumerate(tensors)
    ]


def _accumulation(optimizer: Any) -> int:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return 1
    return max(one.gradient_accumulation_steps or 1 for one in model_variables.with_held(optimizer))


def _window(schedule: Schedule, optimizer: Any, steps: int | None, done: int = 0) -> tuple[int, int]:
    accumulation = _accumulation(optimizer)
    if accumulation > 1 and (schedule.synchronous_steps or schedule.cooldown_steps):
        raise ValueError(
            "With gradient accumulation all steps of a local schedule are local. Expected no synchronous_steps and no "
            f"cooldown_steps. Received: gradient_accumulation_steps={accumulation}"
        )
    return schedule.window(steps, done)


# ---- what `fit` and its like do


def set_window(model: Any, schedule: Schedule, steps: int | None, done: int) -> None:
    """Tell the engine which of a training's steps are local; see `Schedule.window`."""
    _say_what_falls_behind(model)
    known = current.job().known.optimizer(model.optimizer)
    known.window = _window(schedule, model.optimizer, steps, done)
    if isinstance(known.local, LocalWeights):
        known.local.plan.set_schedule(*known.window)


def _say_what_falls_behind(model: Any) -> None:
    """Tells the user of what layers keep that is no statistic: to move as on one rank it would be sent in each step."""
    job, names = current.job(), [variable.path for variable in layer_states.shared(model)]
    if names and current.team_of(model).size > 1 and f"states of {model.name}" not in job.said:
        job.said.add(f"states of {model.name}")
        current.notice(
            f"with local steps what layers of model `{model.name}` keep is each rank's own, and the mean of all at the "
            "end of an epoch: counts of a rank that has no samples in a step fall behind, and what adds up samples has "
            f"those of one rank. Received: {', '.join(names)}"
        )


def is_apart(model: Any) -> bool:
    """Return whether ranks may hold different weights of a model. The same on all ranks of its team."""
    return any(line.is_apart for line in _finished_lines(model))


def average(model: Any, *, statistics: bool = False) -> None:
    """Make equal what ranks hold of a model and of the optimizers that train it. Collective on their teams.

    Args:
        model: it.
        statistics: average those of its layers, too.
    """
    for line in _finished_lines(model):
        if line.is_apart:
            _make_equal(line)
    if statistics and isinstance(model, keras.Model) and current.team_of(model).schedule.local is not None:
        replicas.average_statistics(model)


def forget_period(model: Any) -> None:
    """End a period without an average, where weights of a model were loaded and become the root's. Collective."""
    for line in _finished_lines(model):
        line.plan.state()  # waits for an average that is on its way
        line.plan.restore(State())
        line.settled_at = line.plan.taken()


def say_what_is_apart() -> None:
    """Tells the user of weights that no average has brought together."""
    lines = [known.local for _, known in current.job().known.optimizers() if isinstance(known.local, LocalWeights)]
    apart = sum(line.is_apart for line in lines)
    if apart:
        current.notice(
            f"weights of {apart} optimizer{'s' * (apart > 1)} with local steps are each rank's own: in loops around "
            "train_on_batch, call keras_hpc.drain(model) at the end"
        )


def _make_equal(line: LocalWeights) -> None:
    if line.plan.finish():
        _exchange_weights(line)
    line.settled_at = line.plan.taken()
    if not isinstance(line.optimizer, keras.optimizers.Optimizer):
        return
    team = line.plan.plan.team
    if line.tensors is line.weights:
        model_variables.average(team, line.slots)
    kept = set(map(id, [*line.tensors, *line.slots])) | model_variables.known_local()
    kept |= {id(v) for one in model_variables.with_held(line.optimizer) for v in model_variables.waiting(one)}
    rest = [v for one in model_variables.with_held(line.optimizer) for v in one.variables if id(v) not in kept]
    model_variables.broadcast_variables(team, model_variables.unique(rest))


def _exchange_weights(line: LocalWeights) -> None:
    backend = backends.current()
    arrays = [backend.to_numpy(model_variables.value_of(tensor)) for tensor in line.tensors]
    line.plan.exchange(arrays)
    for tensor, array in zip(line.tensors, arrays, strict=True):
        if isinstance(tensor, keras.Variable):
            backend.assign(tensor, array)
        else:
            tensor.data.copy_(backend.from_numpy(array, tensor))


def _lines_of(model: Any) -> list[LocalWeights]:
    """The lines that change variables of a model, in the order in which their optimizers became known."""
    own = set(map(id, getattr(model, "variables", ())))
    if keras.backend.backend() == "torch":  # whose own optimizers train parameters
        own |= set(map(id, model.parameters()))
    lines = []
    for optimizer, known in current.job().known.optimizers():
        if known.local is None or own.isdisjoint(map(id, known.local.weights)):
            continue
        if isinstance(known.local, local_states.Restored):  # no step has followed
            if not known.local.is_apart:
                continue
            key = current.job().known.key_of(optimizer, "optimizer")
            _line_of(current.team_of(optimizer), optimizer, known.local.weights, key)
        lines.append(known.local)
    return lines


def _finished_lines(model: Any) -> list[LocalWeights]:
    """The same, when the last step has ended and variables are those after it."""
    lines = _lines_of(model)
    if lines and getattr(model, "_jax_state", None) is not None and not model._jax_state_synced:
        model.jax_state_sync()
    for line in lines:
        if isinstance(line.optimizer, keras.optimizers.Optimizer):
            keras.ops.convert_to_numpy(line.optimizer._iterations)  # JAX may be computing it still
    return lines


def check_callbacks(call: Any, callbacks: Sequence[Any]) -> None:
    """Refuse callbacks of a `fit` that cannot work with local steps, and note what others need.

    Raises:
        ValueError: a callback saves the model in the middle of a period.
    """
    schedule = current.team_of(call.model).schedule
    if schedule.local is None:
        return
    call.settles |= schedule.local.every == "epoch"
    for callback in callbacks:
        inner = getattr(callback, "callback", callback)
        often = getattr(inner, "save_freq", "epoch")
        if isinstance(inner, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)) and often != "epoch":
            raise ValueError(
                "With local steps each rank has other weights in the middle of a period, and this callback runs on one "
                "rank. Expected save_freq='epoch', or keras_hpc.callbacks.Checkpoint(every_steps=...). Received: "
                f"{type(inner).__name__}(save_freq={often!r})"
            )
