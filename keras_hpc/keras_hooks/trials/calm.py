# SPDX-License-Identifier: Apache-2.0
"""Lets layers do nothing by chance, and nothing to a whole batch, while a step is tried on parts of a batch.

A step of two halves of a batch draws other numbers than that of the batch, and normalizes them by other moments. So
what it gives for them would say nothing of its loss.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from keras_hpc.keras_hooks import keras_private


@contextlib.contextmanager
def layers() -> Iterator[None]:
    """Context in which numbers that Keras draws are constants, and moving statistics are taken for those of batches.

    Only in this thread: others may read samples.
    """
    random = keras_private.module(keras_private.RANDOM.format(keras.backend.backend()))
    thread = threading.get_ident()
    owners: list[tuple[Any, str, Callable[..., Any]]] = [
        (random, "normal", _normal),
        (random, "truncated_normal", _normal),
        (random, "uniform", _uniform),
        (random, "dropout", _dropout),
        (keras.layers.BatchNormalization, "_moments", _moments),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in owners]
    for owner, name, constant in owners:
        setattr(owner, name, _in_thread(thread, constant, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _in_thread(thread: int, constant: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        return (constant if threading.get_ident() == thread else original)(*args, **kwargs)

    return drawn


def _full(shape: Any, value: Any, dtype: Any) -> Any:
    dtype = dtype or keras.config.floatx()
    return ops.zeros(shape, dtype) + ops.cast(value, dtype)


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _full(shape, mean + 0.5 * stddev, dtype)


def _uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _full(shape, 0.5 * (minval + maxval), dtype)


def _dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
    return inputs


def _moments(layer: Any, inputs: Any, mask: Any) -> Any:
    return tuple(ops.cast(value, inputs.dtype) for value in (layer.moving_mean, layer.moving_variance))
