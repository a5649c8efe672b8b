# SPDX-License-Identifier: Apache-2.0
"""Functions of PyTorch and TensorFlow that clip gradients, before an optimizer gets them, are given those of all ranks.

One rank clips the gradient of the whole batch. So ranks must clip the mean of theirs, and not take the mean of what
each has clipped. PyTorch's functions for it get parameters. TensorFlow's get tensors: gradients of variables
(tape_gradients.py), or something else that is left alone. A norm that PyTorch has computed of parameters' gradients
becomes that of their means when it is given to the function that clips these. PyTorch's `GradScaler`, too, looks for
infinities in the gradients of all ranks: a rank that skipped a step alone would leave the others waiting.

The optimizer then averages what it is given, as ever: of values that are equal on all ranks the mean changes nothing.

In a trial of a step (own_steps.py) nothing is communicated, and these functions limit nothing. What else limits
gradients there is seen by making them large where they are computed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.gradients import first_update, optimizer, tape_gradients, torch_optim
from keras_hpc.keras_hooks.state.variables import trained_by


class _Differentiated(threading.local):
    values: Sequence[Any] = ()  # JAX: of the variables that the tried step trains


_differentiated = _Differentiated()


class _Clipping(threading.local):
    averaged = False  # PyTorch: a function that has averaged gradients calls others of these


_clipping = _Clipping()


class _Owner:
    """Stands for an optimizer, whose gradients these variables' are."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = [weakref.ref(variable) for variable in variables]

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Return whether it was made for these objects, and not for others of which these have the ids."""
        return all(known() is variable for known, variable in zip(self._variables, variables, strict=True))


def install(job: Any, patcher: Any) -> None:
    """Wraps the functions, also where a script has imported them by name."""
    if job.size == 1:
        return
    if keras.backend.backend() == "torch":
        from torch import amp
        from torch.nn import utils

        clipping: dict[Any, Any] = dict.fromkeys((utils.clip_grad_norm_, utils.clip_grad_value_), _clipping_parameters)
        if hasattr(utils, "get_total_norm"):  # from PyTorch 2.6 on
            clipping |= {utils.get_total_norm: _remembering_norm, utils.clip_grads_with_norm_: _clipping_with_norm}
        _patch_everywhere(patcher, clipping)
        # The second one is called where the optimizer itself takes the scale out (`fused=True`).
        for name in ("unscale_", "_check_inf_per_device"):
            if hasattr(amp.GradScaler, name):
                patcher.patch(amp.GradScaler, name, _looking_for_infinities)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        patcher.patch(tf.GradientTape, "gradient", _remembering)
        of_one = dict.fromkeys((tf.clip_by_norm, tf.clip_by_value), _clipping_one_tensor)
        _patch_everywhere(patcher, {tf.clip_by_global_norm: _clipping_tensors, **of_one})
    else:
        import jax

        _patch_everywhere(patcher, dict.fromkeys((jax.grad, jax.value_and_grad), _multiplying))


def _patch_everywhere(patcher: Any, replacements: Mapping[Any, Callable[[Any], Any]]) -> None:
    """Replace functions in every module that has them.

    Args:
        patcher: remembers what was there.
        replacements: what makes the new function of the old one.
    """
    makers = {id(function): make for function, make in replacements.items()}
    for module in list(sys.modules.values()):
        names = dict(getattr(module, "__dict__", {}))
        if makers.keys().isdisjoint(map(id, names.values())):  # as in nearly all of thousands: without a loop of Python
            continue
        for name, value in names.items():
            if id(value) in makers:
                patcher.patch(module, name, makers[id(value)])


@contextlib.contextmanager
def multiplied(variables: Sequence[Any]) -> Iterator[None]:
    """Context in which gradients of variables are multiplied by the factor of the trial where they are computed.

    Args:
        variables: those that the step trains; on JAX their values, as the step gets them.
    """
    factor = _factor()
    handles = []
    if factor != 1.0 and keras.backend.backend() == "torch":
        parameters = [variable.value for variable in variables if variable.value.requires_grad]
        handles = [parameter.register_hook(lambda gradient: gradient * factor) for parameter in parameters]
    _differentiated.values = variables
    try:
        yield
    finally:
        _differentiated.values = ()
        for handle in handles:
            handle.remove()


def _factor() -> float:
    trial = running.trial()
    return 1.0 if trial is None else trial.factor


def _may_average() -> bool:
    return current.active() and running.trial() is None and not running.building() and current.job().virtual is None


def _begin(owner: Any, gradients: Sequence[Any]) -> bool:
    """Return whether the optimizer will be given means. Collective."""
    team = current.team_of(owner)
    if team.size == 1 or team.schedule.kind != "synchronous":
        return False
    step = running.step()
    if step is None or step.model is None:
        first_update.warn_of_equal_gradients(team, gradients)
    return True


def _count() -> Any:
    step = running.step()
    return None if step is None else step.count


def _owner_of(variables: Sequence[Any]) -> _Owner:
    known = current.job().known
    key = tuple(map(id, variables))
    owner: _Owner | None = known.clipped.get(key)
    if owner is None or not owner.is_of(variables):
        owner = known.clipped[key] = _Owner(variables)
        weakref.finalize(variables[0], known.clipped.pop, key, None).atexit = False
        for assigned, number in list(known.teams.items()):
            if any(variables[0] is variable for variable in _trained_by(assigned)):
                known.teams[owner] = number
    return owner


def _trained_by(model_or_optimizer: Any) -> list[Any]:
    """Return the variables of a model, or an optimizer of Keras, and what holds their values."""
    if isinstance(model_or_optimizer, _Owner):
        return []
    is_optimizer = isinstance(model_or_optimizer, keras.optimizers.Optimizer)
    variables = trained_by(model_or_optimizer) if is_optimizer else model_or_optimizer.trainable_variables
    return [*variables, *(variable.value for variable in variables)]


# ---- PyTorch


def _clipping_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if running.trial() is not None:
            args, kwargs = _without_limit(args, kwargs)
        else:
            _average(parameters)
        _clipping.averaged = True
        try:
            return original(parameters, *args, **kwargs)
        finally:
            _clipping.averaged = False

    return _uncompiled(clip)


def _average(parameters: list[Any]) -> bool:
    """Give parameters the mean over ranks of their gradients, and return whether that was done. Collective."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not _may_average():
        return False
    owner = _owner_of(trained)
    if not _begin(owner, [parameter.grad for parameter in trained]):
        return False
    torch_optim.average(owner, trained, _count())
    return True


def _gradients(parameters: list[Any]) -> list[Any]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _remembering_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        norm = original(tensors, *args, **kwargs)
        if not _clipping.averaged:
            key, again = id(norm), lambda others: original(others, *args, **kwargs)
            # Not the tensors: a script may keep norms.
            _norms[key] = weakref.ref(norm, lambda _: _norms.pop(key, None)), frozenset(map(id, tensors)), again
        return norm

    return _uncompiled(get_total_norm)


_norms: dict[int, tuple[Any, frozenset[int], Callable[[Any], Any]]] = {}  # by their ids: a norm, weak, and of what


def _clipping_with_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if running.trial() is not None:
            max_norm = float("inf")
        elif not _clipping.averaged:
            known = _norms.get(id(total_norm))
            own = frozenset(map(id, _gradients(parameters)))
            if known is not None and known[1] == own and _average(parameters):
                total_norm.copy_(known[2](_gradients(parameters)))
        return original(parameters, max_norm, total_norm, *args, **kwargs)

    return _uncompiled(clip)


def _without_limit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (float("inf"), *args[1:]), kwargs
    return args, {name: float("inf") if name in ("max_norm", "clip_value") else v for name, v in kwargs.items()}


def _looking_for_infinities(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def look(self: Any, own: Any) -> Any:
        if self.is_enabled() and _may_average():
            parameters = torch_optim.parameters_of(own)
            if _begin(own, [parameter.grad for parameter in parameters]):
                torch_optim.average(own, parameters, _count())
        return original(self, own)

    return _uncompiled(look)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = backends.current().uncompiled(function)
    return found


# ---- TensorFlow


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    import tensorflow as tf

    @functools.wraps(original)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, target, sources, *args, **kwargs)
        if not (_may_average() or running.trial() is not None):
            return result
        variables, gradients = tf.nest.flatten(sources), tf.nest.flatten(result)
        given = [
            index
            for index, (variable, found) in enumerate(zip(variables, gradients, strict=True))
            if found is not None and isinstance(variable, (tf.Variable, keras.Variable))
        ]
        if _factor() != 1.0:
            for index in given:
                gradients[index] = _factor() * tf.convert_to_tensor(gradients[index])
        tape_gradients.remember([gradients[index] for index in given], [variables[index] for index in given])
        return tf.nest.pack_sequence_as(result, gradients)

    return gradient


def _mean(tensors: list[Any], variables: list[Any]) -> list[Any]:
    """Return the mean over ranks of gradients of variables. Collective."""
    owner = _owner_of(variables)
    if not _begin(owner, tensors):
        return tensors
    means: list[Any] = optimizer.reduce_gradients(owner, tensors, variables, _count())
    return means


def _tensor(value: Any) -> Any:
    """Return what a variable, in which a script has added up gradients, holds; else the same."""
    import tensorflow as tf

    return tf.convert_to_tensor(value) if isinstance(value, (tf.Variable, keras.Variable)) else value


def _clipping_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    import tensorflow as tf

    @functools.wraps(original)
    def clip(t_list: Any, clip_norm: Any, use_norm: Any = None, name: Any = None) -> Any:
        is_trial = running.trial() is not None
        if isinstance(t_list, (list, tuple)) and tape_gradients.any_known() and (is_trial or _may_average()):
            given = [index for index, tensor in enumerate(t_list) if tensor is not None]
            gradients = [_tensor(t_list[index]) for index in given]
            variables = tape_gradients.variables_of(gradients)
            if variables is not None and is_trial:
                return t_list, tf.linalg.global_norm(t_list)
            means = gradients if variables is None else _mean(gradients, variables)
            if means is not gradients:  # else there is no mean, or nothing to take it of
                t_list, use_norm = list(t_list), None  # that norm is of this rank's gradients
                for index, mean in zip(given, means, strict=True):
                    t_list[index] = mean
        return original(t_list, clip_norm, use_norm, name)

    return clip


def _clipping_one_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(t: Any, *args: Any, **kwargs: Any) -> Any:
        variable = tape_gradients.variable_of(t)
        if variable is not None and running.trial() is not None:
            return t
        if variable is not None and _may_average():
            (t,) = _mean([t], [variable])
        return original(t, *args, **kwargs)

    return clip


# ---- JAX: only in trials


def _multiplying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(fun: Any, argnums: Any = 0, has_aux: bool = False, *more: Any, **options: Any) -> Any:
        differentiate = original(fun, argnums, has_aux, *more, **options)
        if _factor() == 1.0 or not isinstance(argnums, int):
            return differentiate

        @functools.wraps(differentiate)
        def with_large_gradients(*args: Any, **kwargs: Any) -> Any:
            import jax

            result = differentiate(*args, **kwargs)
            leaves = jax.tree.leaves(args[argnums]) if argnums < len(args) else ()
            if not leaves or all(leaves[0] is not value for value in _differentiated.values):
                return result
            factor = _factor()

            def multiply(gradients: Any) -> Any:
                return jax.tree.map(lambda gradient: gradient * factor, gradients)

            if original.__name__ == "value_and_grad":
                return result[0], multiply(result[1])
            return (multiply(result[0]), result[1]) if has_aux else multiply(result)

        return with_large_gradients

    return make
