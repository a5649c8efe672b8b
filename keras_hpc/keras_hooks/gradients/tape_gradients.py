# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: which tensors are gradients, and of which variables.

Known are those that a `tf.GradientTape` has given. A script may scale them or add them up before it clips them, and
tensors do not say of what they were made: so a list that has the dtypes and shapes of variables in a row, for which a
tape has given gradients, is taken for gradients of these.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

_origins: dict[int, tuple[Any, Any]] = {}  # id of a gradient: the gradient and its variable, both weak
_differentiated: dict[tuple[Any, ...], list[Any]] = {}  # dtypes and shapes: the last such variables of a tape, weak


def remember(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Remember what a tape has given.

    Args:
        gradients: tensors.
        variables: their variables, as many.
    """
    for gradient, variable in zip(gradients, variables, strict=True):
        key = id(gradient)
        _origins[key] = weakref.ref(gradient, functools.partial(_drop, key)), weakref.ref(variable)
    if variables:
        row = _row(variables)
        _differentiated[row] = [weakref.ref(variable, functools.partial(_forget, row)) for variable in variables]


def _drop(key: int, _: Any) -> None:
    _origins.pop(key, None)


def _forget(row: tuple[Any, ...], variable: Any) -> None:
    if any(variable is known for known in _differentiated.get(row, ())):  # and not later ones
        del _differentiated[row]


def any_known() -> bool:
    """Return whether a tape has given any gradient."""
    return bool(_differentiated)


def variable_of(tensor: Any) -> Any:
    """Return the variable whose gradient a tape has given as this tensor; None: it is something else."""
    gradient, variable = _origins.get(id(tensor), (None, None))
    return variable() if gradient is not None and gradient() is tensor else None


def variables_of(tensors: Sequence[Any]) -> list[Any] | None:
    """Return the variables whose gradients these tensors, or variables of a script, are; None: they are none."""
    variables = [variable_of(tensor) for tensor in tensors]
    if all(variable is not None for variable in variables):
        return variables
    known = _differentiated.get(_row([t if v is None else v for t, v in zip(tensors, variables, strict=True)]), ())
    return [variable() for variable in known] or None


def _row(arrays: Sequence[Any]) -> tuple[Any, ...]:
    import keras

    return tuple((keras.backend.standardize_dtype(array.dtype), _lengths(array)) for array in arrays)


def _lengths(array: Any) -> tuple[int | None, ...] | None:
    import tensorflow as tf

    shape = tf.TensorShape(array.shape)
    return None if shape.rank is None else tuple(shape.as_list())
