# SPDX-License-Identifier: Apache-2.0
"""Lets nothing happen by chance, and nothing to a whole batch, while a step is tried on parts of a batch.

A step of two halves of a batch draws other numbers than that of the batch, and normalizes them by other moments. So
what it gives for them would say nothing of its loss. What is drawn by functions that are not named here stays random.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from keras_hpc.keras_hooks import keras_private

Function = Callable[..., Any]
_OF_NORMAL, _OF_UNIFORM = 0.5, 0.5  # what is drawn from N(0, 1) and from [0, 1)


@contextlib.contextmanager
def layers() -> Iterator[None]:
    """Context in which random numbers are constants, and moving statistics are taken for those of batches.

    Those of Keras and of its backend, in layers and in the user's own code. Only in this thread: others may read
    samples.
    """
    functions = {"tensorflow": _of_tensorflow, "jax": _of_jax, "torch": _of_torch}[keras.backend.backend()]
    replaced = [(owner, name, getattr(owner, name), calm) for owner, name, calm in (*_of_keras(), *functions())]
    thread = threading.get_ident()
    for owner, name, original, calm in replaced:
        setattr(owner, name, _in_thread(thread, calm, original))
    try:
        yield
    finally:
        for owner, name, original, _ in replaced:
            setattr(owner, name, original)


def _in_thread(thread: int, calm: Function, original: Function) -> Function:
    @functools.wraps(original)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        return (calm if threading.get_ident() == thread else original)(*args, **kwargs)

    return drawn


def _of_keras() -> list[tuple[Any, str, Function]]:
    random = keras_private.module(keras_private.RANDOM.format(keras.backend.backend()))
    return [
        (random, "normal", _normal),
        (random, "truncated_normal", _normal),
        (random, "uniform", _uniform),
        (random, "randint", _uniform),
        (random, "categorical", _categorical),
        (random, "gamma", lambda shape, alpha, dtype=None, seed=None: _full(shape, alpha, dtype)),
        (random, "beta", lambda shape, alpha, beta, dtype=None, seed=None: _full(shape, alpha / (alpha + beta), dtype)),
        (random, "shuffle", _swapped),
        (random, "dropout", _same),
        (keras.layers.BatchNormalization, "_moments", _moments),
    ]


def _of_tensorflow() -> list[tuple[Any, str, Function]]:
    import tensorflow as tf

    return [
        (tf.random, "normal", _normal),
        (tf.random, "truncated_normal", _normal),
        (tf.random, "uniform", _uniform),
        (tf.random, "shuffle", lambda value, seed=None, name=None: _swapped(value)),
        (tf.nn, "dropout", _same),
    ]


def _of_jax() -> list[tuple[Any, str, Function]]:
    from jax import random

    def uniform(key: Any, shape: Any = (), dtype: Any = None, minval: Any = 0.0, maxval: Any = 1.0, **_: Any) -> Any:
        return _uniform(shape, minval, maxval, dtype)

    def randint(key: Any, shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", **_: Any) -> Any:
        return _uniform(shape, minval, maxval, dtype)

    def permutation(key: Any, x: Any, axis: int = 0, independent: bool = False, **_: Any) -> Any:
        return _swapped(ops.arange(x) if ops.ndim(x) == 0 else x, axis)

    return [
        (random, "normal", lambda key, shape=(), dtype=None, **_: _normal(shape, dtype=dtype)),
        (random, "uniform", uniform),
        (random, "randint", randint),
        (random, "permutation", permutation),
        (random, "bernoulli", _filled(random.bernoulli, True)),
        (random, "categorical", _filled(random.categorical, 0)),
    ]


def _of_torch() -> list[tuple[Any, str, Function]]:
    import torch
    from torch.nn import functional

    randint, batch_norm = torch.randint, functional.batch_norm
    parameters = inspect.signature(batch_norm)

    def middle(*args: Any, **kwargs: Any) -> Any:
        bounds = [value for value in (*args, kwargs.get("low"), kwargs.get("high")) if isinstance(value, int)]
        return torch.full_like(randint(*args, **kwargs), sum(bounds) // 2)

    def by_moving(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        if bound.arguments["running_mean"] is not None:
            bound.arguments["training"] = False
        return batch_norm(*bound.args, **bound.kwargs)

    dropouts = "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"
    return [
        (torch, "rand", _filled(torch.rand, _OF_UNIFORM)),
        (torch, "rand_like", _filled(torch.rand_like, _OF_UNIFORM)),
        (torch, "randn", _filled(torch.randn, _OF_NORMAL)),
        (torch, "randn_like", _filled(torch.randn_like, _OF_NORMAL)),
        (torch, "randint", middle),
        (torch, "randperm", lambda n, **_: _swapped(ops.arange(n, dtype="int64"))),
        (torch, "bernoulli", _filled(torch.bernoulli, 1)),
        (functional, "batch_norm", by_moving),
        *((functional, name, _same) for name in dropouts),
    ]


def _filled(original: Function, value: Any) -> Function:
    """Return a function whose results have the shape and dtype of those of another, and one value everywhere."""

    def filled(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return ops.zeros_like(result) + ops.cast(value, result.dtype)

    return filled


def _full(shape: Any, value: Any, dtype: Any) -> Any:
    dtype = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    return ops.zeros(shape, dtype) + ops.cast(value, dtype)


def _normal(
    shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None, name: Any = None
) -> Any:
    return _full(shape, mean + _OF_NORMAL * stddev, dtype)


def _uniform(
    shape: Any, minval: Any = 0.0, maxval: Any = None, dtype: Any = None, seed: Any = None, name: Any = None
) -> Any:
    low, high = (ops.cast(value, "float32") for value in (minval, 1.0 if maxval is None else maxval))
    return _full(shape, low + _OF_UNIFORM * (high - low), dtype)


def _categorical(logits: Any, num_samples: Any, dtype: Any = "int32", seed: Any = None) -> Any:
    return ops.zeros((ops.shape(logits)[0], num_samples), dtype)


def _swapped(x: Any, axis: int = 0, seed: Any = None) -> Any:
    """Return each place of an axis with its neighbour's: the same in a half of a batch as in the batch."""
    places = ops.arange(ops.shape(x)[axis])
    neighbours = places + 1 - 2 * (places % 2)
    return ops.take(x, ops.where(neighbours < ops.shape(x)[axis], neighbours, places), axis)


def _same(*given: Any, **named: Any) -> Any:
    return given[0] if given else next(named[name] for name in ("inputs", "input", "x") if name in named)


def _moments(layer: Any, inputs: Any, mask: Any) -> Any:
    return tuple(ops.cast(value, inputs.dtype) for value in (layer.moving_mean, layer.moving_variance))
