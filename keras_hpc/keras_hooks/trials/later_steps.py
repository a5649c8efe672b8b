# SPDX-License-Identifier: Apache-2.0
"""Lets a step that is tried before training do what it will do later: a term of its loss may begin with weight zero.

So begin the divergence of an autoencoder that is annealed and the loss of targets without labels. Their weight is a
number that the model keeps, or is computed of the steps so far. Before training it is zero, and such a term has no
gradients, whatever it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.keras_hooks.state import layer_states, variables

_STEPS = 1_000_000  # after which what begins slowly has begun


@contextlib.contextmanager
def state(model: Any, *trials: Any) -> Iterator[list[str]]:
    """Context in which numbers that are zero have grown: weights to 1, flags are set, counters have many steps more.

    Args:
        model: the model that is tried.
        trials: its `Tries` that go on in this context. On JAX they hold the state.

    Yields:
        Names of the numbers.
    """
    counters = [optimizer.iterations for optimizer in variables.optimizers_of(model) if optimizer.built]
    numbers = variables.unique([*layer_states.numbers(model), *counters])
    if keras.backend.backend() == "jax":
        names, put_back = _in_states(model, trials, numbers)
    else:
        kept = [*((variable.path, variable) for variable in numbers if _is_zero(variable)), *_tensors(model)]
        names, put_back = [name for name, _ in kept], [_grow(number) for _, number in kept]
    try:
        yield names
    finally:
        for put in put_back:
            put()


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is no variable of Keras among the attributes of layers, and can be set, if it is a number and zero."""
    for layer in model._flatten_layers():
        for name, value in vars(layer).items():
            is_tensor = keras.ops.is_tensor(value) and not isinstance(value, keras.Variable)
            settable = is_tensor and (keras.backend.backend() == "torch" or hasattr(value, "assign"))
            if settable and _is_zero(value):
                yield f"{layer.name}.{name}", value


def _is_zero(number: Any) -> bool:
    return len(number.shape) == 0 and not backends.current().to_numpy(number).any()


def _later(zero: np.ndarray) -> np.ndarray:
    whole = zero.dtype.kind in "iu"
    return np.array(min(_STEPS, np.iinfo(zero.dtype).max) if whole else 1, zero.dtype)


def _grow(number: Any) -> Callable[[], Any]:
    """Let a number grow; return a function that puts it back."""
    zero = backends.current().to_numpy(number)
    _assign(number, _later(zero))
    return lambda: _assign(number, zero)


def _assign(number: Any, value: np.ndarray) -> None:
    if keras.backend.backend() == "torch" and keras.ops.is_tensor(number):
        number.data.fill_(value.item())
    else:
        number.assign(value)


def _in_states(model: Any, trials: Iterable[Any], numbers: list[Any]) -> tuple[list[str], list[Callable[[], Any]]]:
    """Do the same on JAX, where variables have no values while a model trains. Return the names, too."""
    names: list[str] = []
    put_back: list[Callable[[], Any]] = []
    ids = set(map(id, numbers))

    def with_grown(variables: Iterable[Any], values: Iterable[Any]) -> Iterator[Any]:
        for variable, value in zip(variables, values, strict=True):
            grows = id(variable) in ids and _is_zero(value)
            if grows:
                names.append(variable.path)
            yield keras.ops.convert_to_tensor(_later(np.asarray(value))) if grows else value

    for trial in trials:
        put_back.append(functools.partial(setattr, trial, "rest", trial.rest))
        ((trainable, others, optimizer, metrics),) = trial.rest
        others = list(with_grown(model.non_trainable_variables, others))
        optimizer = list(with_grown(model.optimizer.variables, optimizer))
        trial.rest = [(trainable, others, optimizer, metrics)]
    return list(dict.fromkeys(names)), put_back
