# SPDX-License-Identifier: Apache-2.0
"""What objects of the user's own keep is as it was, after their step or loss was tried."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

_LIBRARIES = {"keras", "keras_hpc", "tensorflow", "torch", "jax", "jaxlib", "numpy"}  # whose objects are no user's own


@contextlib.contextmanager
def attributes(owners: Iterable[Any]) -> Iterator[None]:
    """Context after which numbers, tensors, lists and dictionaries among the attributes of objects are as they were.

    So are the tensors in these lists and dictionaries, as those in which a step adds up gradients, and the attributes
    of objects of the user's own there, as one that anneals a weight.
    """
    owners = _with_helpers(owners)
    kept = [(vars(one), {name: v for name, v in vars(one).items() if _may_change(v)}) for one in owners]
    put_back = [_to_put_back(value) for _, found in kept for value in found.values()]
    put_back += [_to_put_back(value) for one in owners for value in _tensors_in(list(vars(one).values()))]
    try:
        with numbers(owners):
            yield
    finally:
        for now, before in kept:
            now.update(before)
        for put in put_back:
            put()


@contextlib.contextmanager
def numbers(owners: Iterable[Any]) -> Iterator[None]:
    """Context after which numbers and tensors among the attributes of objects are what they were.

    Flags, and lists of what was built, may change. Tensors that were made in it, where there was nothing, are gone: a
    program that was only traced has none.
    """
    kept = [(vars(one), dict(vars(one))) for one in owners]
    try:
        yield
    finally:
        for now, before in kept:
            for name, value in list(now.items()):
                if name not in before:
                    if _is_made(value):
                        del now[name]
                elif value is not before[name] and (_is_number(before[name]) or _is_made(value)):
                    now[name] = before[name]


@contextlib.contextmanager
def loss(of_user: Any) -> Iterator[None]:
    """Context after which a loss, and variables of Keras, are as they were."""
    with keras.StatelessScope() as scope, attributes([of_user]):
        if scope.original_scope is not None:  # on JAX, with the values of a step
            scope.state_mapping.update(scope.original_scope.state_mapping)
        yield


def _may_change(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or _holds(value) or bool(keras.ops.is_tensor(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_made(value: Any) -> bool:
    """Return whether a value is a tensor, and not a variable or a module."""
    return bool(keras.ops.is_tensor(value)) and not hasattr(value, "assign")


def _holds(value: Any) -> bool:
    """Return whether a value is a list or a dictionary: Keras' own too, not TensorFlow's, which note changes."""
    plain = type(value) in (list, dict) or type(value).__module__.startswith("keras.")
    return plain and isinstance(value, (list, dict))


def _with_helpers(owners: Iterable[Any]) -> list[Any]:
    """Return the objects, and those of classes of the user's own that they keep, also in lists and dictionaries."""
    found = {id(one): one for one in owners}
    left = list(found.values())
    while left:
        more = [one for one in _items_of(list(vars(left.pop()).values())) if _is_helper(one) and id(one) not in found]
        found.update((id(one), one) for one in more)
        left += more
    return list(found.values())


def _is_helper(value: Any) -> bool:
    package = type(value).__module__.split(".")[0]
    is_known = package in sys.stdlib_module_names or package in _LIBRARIES
    of_keras = isinstance(value, (keras.Layer, keras.Variable, keras.optimizers.Optimizer))  # others look after these
    return not (is_known or of_keras) and isinstance(getattr(value, "__dict__", None), dict)


def _items_of(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and what is in those that are lists, dictionaries and tuples, also in those within."""
    left, seen = [*values], set()
    while left:
        value = left.pop()
        if not isinstance(value, (list, tuple, dict)):
            yield value
        elif id(value) not in seen:  # one may be in itself
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value


def _tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors, and variables of the backend, in lists, dictionaries and tuples."""
    holders = [value for value in values if isinstance(value, (list, tuple, dict))]
    yield from (x for x in _items_of(holders) if keras.ops.is_tensor(x) and not isinstance(x, keras.Variable))


def _fill(value: Any, items: Any) -> None:
    if isinstance(value, list):
        list.__setitem__(value, slice(None), items)
    else:
        dict.clear(value)
        dict.update(value, items)


def _to_put_back(value: Any) -> Callable[[], Any]:
    """Return a function that lets a list, a dictionary, or a tensor of the backend hold what it holds now."""
    if _holds(value):  # past what Keras' own lists of layers and variables would note of it
        return functools.partial(_fill, value, value.copy())
    if keras.backend.backend() == "torch" and keras.ops.is_tensor(value):
        from keras_hpc.backends import torch_buffers

        put_back: Callable[[], Any] = torch_buffers.to_put_back(value)
        return put_back
    if keras.backend.backend() == "tensorflow" and hasattr(value, "assign"):
        copy = keras.ops.copy(value)
        return lambda: value.assign(copy)
    return lambda: None
