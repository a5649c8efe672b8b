# SPDX-License-Identifier: Apache-2.0
"""What objects of the user's own keep is as it was, after their step or loss was tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras


@contextlib.contextmanager
def attributes(owners: Iterable[Any]) -> Iterator[None]:
    """Context after which numbers and tensors of the backend among the attributes of objects are as they were."""
    kept = [(vars(one), {name: v for name, v in vars(one).items() if _may_change(v)}) for one in owners]
    put_back = [_to_put_back(value) for _, found in kept for value in found.values()]
    try:
        yield
    finally:
        for now, before in kept:
            now.update(before)
        for put in put_back:
            put()


@contextlib.contextmanager
def loss(of_user: Any) -> Iterator[None]:
    """Context after which a loss, and variables of Keras, are as they were."""
    with keras.StatelessScope() as scope, attributes([of_user]):
        if scope.original_scope is not None:  # on JAX, with the values of a step
            scope.state_mapping.update(scope.original_scope.state_mapping)
        yield


def _may_change(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or bool(keras.ops.is_tensor(value))


def _to_put_back(value: Any) -> Callable[[], Any]:
    """Return a function that gives a tensor or variable of the backend the numbers that it has now."""
    if keras.backend.backend() == "torch" and keras.ops.is_tensor(value):
        from keras_hpc.backends import torch_buffers

        put_back: Callable[[], Any] = torch_buffers.to_put_back(value)
        return put_back
    if keras.backend.backend() == "tensorflow" and hasattr(value, "assign"):
        copy = keras.ops.copy(value)
        return lambda: value.assign(copy)
    return lambda: None
