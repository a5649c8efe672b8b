# SPDX-License-Identifier: Apache-2.0
"""Every update of every optimizer passes `apply`, and there gradients become those of all ranks.

Only the outermost call reduces: `LossScaleOptimizer` and `MultiOptimizer` call `apply` of the optimizers they hold.
Gradients are reduced before the check for finite values, clipping and norms, so that all ranks decide alike.

With `gradient_accumulation_steps` they are reduced once per update. One rank would give each micro-batch the same
weight, so a gradient is first multiplied by n_r / mean(n_r) of its micro-batch: an exchange of one number for each.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec
from keras_hpc.keras_hooks import float8, keras_private, running
from keras_hpc.keras_hooks.gradients import first_update, plans
from keras_hpc.keras_hooks.schedules import delayed, local_steps
from keras_hpc.keras_hooks.state import rows
from keras_hpc.keras_hooks.state import variables as model_variables
from keras_hpc.keras_hooks.virtual import guards


class _Applying(threading.local):
    optimizer: Any = None  # the optimizer whose call is the outermost
    reduce_later: bool = False  # whether reduction waits for the accumulated gradients


_applying = _Applying()


def install(job: Any, patcher: Any) -> None:
    """Wrap every method that applies gradients, also of classes that the user defines later."""
    base = keras_private.get(keras_private.OPTIMIZER)
    loss_scale = keras_private.get(keras_private.LOSS_SCALE_OPTIMIZER)
    wrapped: set[type] = set()

    def wrap_class(owner: type) -> None:
        for cls in owner.__mro__:
            if issubclass(cls, base) and cls not in wrapped:
                wrapped.add(cls)
                for name in ("apply", "stateless_apply"):
                    # The base class' stateless_apply calls apply; that of a loss scale has a condition around it.
                    if name in vars(cls) and (name == "apply" or issubclass(cls, loss_scale)):
                        patcher.patch(cls, name, _reducing)

    def wrap_subclasses(cls: type) -> None:
        wrap_class(cls)
        subclasses: list[type] = cls.__subclasses__()
        for subclass in subclasses:
            wrap_subclasses(subclass)

    def notice_class(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            wrap_class(type(self))
            original(self, *args, **kwargs)

        return __init__

    wrap_subclasses(base)
    patcher.patch(base, "__init__", notice_class)
    patcher.patch(base, "_clip_gradients", _reducing_accumulated)
    patcher.patch(loss_scale, "check_finite", _check_finite)
    if keras.backend.backend() == "jax":
        patcher.patch(base, "finalize_variable_values", _keeping_averages)


def _keeping_averages(original: Callable[..., Any]) -> Callable[..., Any]:
    """Give averages arrays of their own: weights get them after `fit`, and `evaluate` deletes the arrays of weights."""

    @functools.wraps(original)
    def finalize_variable_values(self: Any, var_list: Any) -> Any:
        result = original(self, var_list)
        for average in self._model_variables_moving_average if self.use_ema else ():
            average.assign(keras.ops.copy(average.value))
        return result

    return finalize_variable_values


def accumulates(optimizer: Any) -> bool:
    """Return whether an optimizer, or one that it holds, accumulates gradients."""
    return bool(optimizer.gradient_accumulation_steps) or any(
        map(accumulates, model_variables.held_optimizers(optimizer))
    )


def _reducing(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if running.building():
            return original(self, *args, **kwargs)
        if (trial := running.trial()) is not None:
            given = signature.bind(self, *args, **kwargs).arguments
            extremes = float8.overwriting(model_variables.trained_by(self))
            trial.gradients.append(float8.undone(list(given["grads"]), extremes, running.step()))
            values = tuple(given.get(name) for name in ("trainable_variables", "optimizer_variables"))
            return values if original.__name__ == "stateless_apply" else None
        if not current.active():
            _guard_trace(self, kwargs.get("grads", args[0] if args else ()))
            return original(self, *args, **kwargs)
        if current.job().virtual is not None:
            if not running.is_summed():
                guards.refuse_loops()
            return original(self, *args, **kwargs)
        inside = _applying.optimizer is not None
        pipelined = current.team_of(_applying.optimizer or self).schedule.pipelined
        if inside and not (_applying.reduce_later and _reduces_in_deferral(self, pipelined)):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        gradients = list(map(_as_tensor, bound.arguments["grads"]))
        stateless = original.__name__ == "stateless_apply"  # which is given values instead of variables
        variables = (not stateless and bound.arguments.get("trainable_variables")) or model_variables.trained_by(self)
        for gradient, variable in zip(gradients, variables, strict=False):
            if hasattr(gradient, "set_shape"):  # TensorFlow may not know it when it traces: of a Dense on images
                gradient.set_shape(variable.shape)
        if inside and pipelined:
            return _apply_pipelined(self, original, bound, gradients, variables, None)
        if inside:
            bound.arguments["grads"] = reduce_gradients(self, gradients, variables, None)
            return original(*bound.args, **bound.kwargs)
        first_update.make_equal(self, list(variables), stateless)
        step = running.step()
        count = None if step is None else step.count
        if (step is None or step.model is None) and current.team_of(self).schedule.local is None:
            first_update.warn_of_equal_gradients(current.team_of(self), gradients)
        if current.team_of(self).schedule.local is not None:
            return _apply_local(self, original, bound, gradients, list(variables), count)
        held = bound.arguments["trainable_variables"] if stateless else variables
        if keras.backend.backend() == "jax":
            backends.current().begin_update([w for w, g in zip(held, gradients, strict=False) if g is not None])
        gradients = _reduce_maxima(self, gradients, variables, held, step)
        reduce_later = accumulates(self)
        here = pipelined and (not reduce_later or bool(self.gradient_accumulation_steps))
        if reduce_later or not pipelined:
            prepare = _scale_by_share if reduce_later else reduce_gradients
            bound.arguments["grads"] = gradients = prepare(self, gradients, variables, count)
        _applying.optimizer, _applying.reduce_later = self, reduce_later
        try:
            if here:
                return _apply_pipelined(self, original, bound, gradients, variables, count)
            return original(*bound.args, **bound.kwargs)
        finally:
            _applying.optimizer, _applying.reduce_later = None, False

    # Dynamo would trace into the engine's Python.
    return backends.current().uncompiled(wrapper) if keras.backend.backend() == "torch" else wrapper


def _reduces_in_deferral(optimizer: Any, pipelined: bool) -> bool:
    """Return whether an inner optimizer reduces in `apply` although the outermost did not.

    That is one that does not accumulate beside one that does. In a pipelined team it is every innermost one, as whole
    updates are late there.
    """
    return not model_variables.held_optimizers(optimizer) and (pipelined or not optimizer.gradient_accumulation_steps)


def _apply_pipelined(
    optimizer: Any, original: Callable[..., Any], bound: Any, gradients: list[Any], variables: Sequence[Any], count: Any
) -> Any:
    key = plans.key_of(optimizer)
    team = current.team_of(_applying.optimizer or optimizer)
    if original.__name__ == "stateless_apply":

        def update_state(values: Any, averages: list[Any]) -> Any:
            bound.arguments["grads"] = averages
            bound.arguments["trainable_variables"], bound.arguments["optimizer_variables"] = values
            return original(*bound.args, **bound.kwargs)

        values = (bound.arguments["trainable_variables"], bound.arguments["optimizer_variables"])
        return delayed.apply_stateless(team, optimizer, gradients, count, key, values, update_state)

    def update(averages: list[Any]) -> None:
        bound.arguments["grads"] = averages
        original(*bound.args, **bound.kwargs)

    if optimizer.gradient_accumulation_steps:
        return delayed.apply_accumulated(team, optimizer, gradients, variables, key, update)
    return delayed.apply(team, optimizer, gradients, variables, count, key, update)


def _apply_local(
    optimizer: Any, original: Callable[..., Any], bound: Any, gradients: list[Any], variables: list[Any], count: Any
) -> None:
    def update(own: Sequence[Any]) -> None:
        bound.arguments["grads"] = own
        original(*bound.args, **bound.kwargs)

    def average(active: Any) -> list[Any]:
        return reduce_gradients(optimizer, gradients, variables, count, active)

    _applying.optimizer = optimizer
    try:
        local_steps.apply(
            current.team_of(optimizer), optimizer, gradients, variables, count, plans.key_of(optimizer), average, update
        )
    finally:
        _applying.optimizer = None


def _as_tensor(gradient: Any) -> Any:
    """Return a gradient as the backend's tensor: Keras takes NumPy's arrays, too, and JAX's sparse ones."""
    is_other = isinstance(gradient, np.ndarray) or hasattr(gradient, "todense")
    return keras.ops.convert_to_tensor(gradient, sparse=False) if is_other else gradient


def _reducing_accumulated(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _clip_gradients(self: Any, grads: Any) -> Any:
        if _applying.reduce_later and self.gradient_accumulation_steps and current.active():
            due = None
            if keras.backend.backend() == "jax":  # others call this only when an update is due
                due = (self._iterations + 1) % self.gradient_accumulation_steps == 0
            grads = reduce_gradients(self, list(grads), (), None, due)
        return original(self, grads)

    return _clip_gradients


def _check_finite(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if not (_applying.reduce_later and current.active()):
            return finite
        flag = keras.ops.reshape(keras.ops.cast(finite, "int32"), (1,))
        return _exchange(self, "finite", flag, "min")[0] > 0

    return check_finite


def reduce_gradients(
    optimizer: Any, gradients: list[Any], variables: Sequence[Any], count: Any, due: Any = None
) -> list[Any]:
    """Return the mean of the gradients over all ranks, weighted by their samples. Collective.

    Args:
        optimizer: the optimizer that applies them.
        gradients: this rank's; those that are None stay None.
        variables: theirs; empty where Keras does not say.
        count: samples of this rank in this step, a number or a scalar tensor; None if every rank counts alike.
        due: JAX: a scalar tensor, whether to reduce at all in this step.
    """
    result = list(gradients)
    # Backward computes the last variable's gradient first.
    local = model_variables.known_local()
    order = [
        index
        for index in reversed(range(len(gradients)))
        if gradients[index] is not None and not (local and variables and id(variables[index]) in local)
    ]
    extremes = float8.overwriting(variables)
    sparse = [index for index in order if hasattr(gradients[index], "dense_shape")]
    means = [index for index in order if index not in extremes and index not in sparse]
    team = current.team_of(_applying.optimizer or optimizer)
    if keras.backend.backend() == "torch":
        plan, means = plans.in_segment(team, optimizer, gradients, variables)
        _replace(result, means, backends.current().gradients_of(plan).reduce([gradients[i] for i in means], count))
    elif means:
        plan = plans.of_means(team, optimizer, gradients, variables, means)
        _replace(result, means, backends.current().reduce(plan, [gradients[i] for i in means], count, due))
    if sparse:
        share = _share(optimizer, count) / team.size
        for index in sparse:
            result[index] = rows.gather(team, gradients[index], share)
            owner = (variables or model_variables.trained_by(optimizer))[index]
            rows.note(_applying.optimizer or optimizer, owner.shape)
    return result


def _replace(values: list[Any], indices: Sequence[int], new: Sequence[Any]) -> None:
    for index, value in zip(indices, new, strict=True):
        values[index] = value


def _reduce_maxima(optimizer: Any, gradients: list[Any], variables: Any, values: Any, step: Any) -> list[Any]:
    """Return gradients with those that overwrite variables being the maximum over all ranks. Collective."""
    extremes, local = float8.overwriting(variables), model_variables.known_local()
    maxima = [i for i in sorted(extremes, reverse=True) if gradients[i] is not None and id(variables[i]) not in local]
    own = {index: values[index] for index in extremes if id(variables[index]) in local}
    result = float8.undone(gradients, extremes, step, own)
    if not maxima:
        return result
    specs = [plans.spec_of(i, gradients[i], variables) for i in maxima]
    plan = current.team_of(optimizer).plan(f"{plans.key_of(optimizer)}/maximum", specs, op="max", weighted=False)
    _replace(result, maxima, backends.current().reduce(plan, [result[i] for i in maxima]))
    return result


def _scale_by_share(optimizer: Any, gradients: list[Any], variables: Sequence[Any], count: Any) -> list[Any]:
    """Multiplies gradients by n_r / mean(n_r); those of a rank without samples become zero, whatever they were."""
    if count is None:
        return gradients
    share = _share(optimizer, count)

    def scale(values: Any) -> Any:
        zero = keras.ops.zeros_like(values)
        return keras.ops.where(share > 0, values * keras.ops.cast(share, values.dtype), zero)

    extremes = float8.overwriting(variables)
    result = list(gradients)
    for index, gradient in enumerate(gradients):
        if gradient is None or index in extremes:
            continue
        if hasattr(gradient, "dense_shape"):
            result[index] = type(gradient)(scale(gradient.values), gradient.indices, gradient.dense_shape)
        else:
            result[index] = scale(gradient)
    return result


def _share(optimizer: Any, count: Any) -> Any:
    """Return n_r / mean(n_r), a scalar tensor."""
    if count is None:
        return keras.ops.convert_to_tensor(1.0, "float32")
    mine = keras.ops.reshape(keras.ops.cast(count, "float32"), (1,))
    return (mine / _exchange(optimizer, "count", mine, "mean"))[0]


def _exchange(optimizer: Any, name: str, tensor: Any, op: str) -> Any:
    team = current.team_of(_applying.optimizer or optimizer)
    specs = [TensorSpec(name, tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))]
    plan = team.plan(f"{plans.key_of(optimizer)}/{name}", specs, op=op, weighted=False)
    return backends.current().reduce(plan, [tensor])[0]


def _guard_trace(optimizer: Any, gradients: Any) -> None:
    """Make a step that is traced in `local()` fail where it runs outside: it would never communicate again."""
    is_asked = current.is_local() and current.job().size > 1 and running.call() is None
    if is_asked and any(g is not None and backends.current().is_traced(g) for g in gradients or ()):
        backends.current().check_when_run(_refuse_outside_of_local)


def _refuse_outside_of_local() -> None:
    if current.is_initialized() and not current.anyone_is_local():
        raise RuntimeError(
            "A training step that was traced inside keras_hpc.local() runs outside of it. It would not average "
            "gradients. Trace it outside first, or make another tf.function or jax.jit of it for local()."
        )
