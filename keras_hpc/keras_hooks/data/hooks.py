# SPDX-License-Identifier: Apache-2.0
"""Where sharding sits in Keras: every `fit`, validation and `evaluate` makes an `EpochIterator`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator

from keras_hpc.job import current
from keras_hpc.job.current import Job
from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data import predict, sharding


class _Scope(threading.local):
    model: Any = None  # whose data are opened
    announce = False  # whether rank 0 says how they are shared out
    unshared = False  # whether they are used as they are


_scope = _Scope()


def install(job: Job, patcher: Any) -> None:
    """See `keras_hooks.data.install`."""
    patcher.patch(EpochIterator, "__init__", functools.partial(_epoch_iterator, job))
    trainer = keras_private.backend_trainer()
    patcher.patch(trainer, "fit", functools.partial(_entered, announce=True))
    patcher.patch(trainer, "evaluate", functools.partial(_entered, announce=False))
    patcher.patch(trainer, "predict", functools.partial(predict.sharded, job, unshared))


def unshared() -> contextlib.AbstractContextManager[None]:
    """Context in which data are used as they are, while all other hooks stay."""
    return _during(unshared=True)


@contextlib.contextmanager
def _during(**values: Any) -> Iterator[None]:
    before = {name: getattr(_scope, name) for name in values}
    vars(_scope).update(values)
    try:
        yield
    finally:
        vars(_scope).update(before)


def _entered(original: Callable[..., Any], announce: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _during(model=self, announce=announce):
            return original(self, *args, **kwargs)

    return wrapper


def _epoch_iterator(job: Job, original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        if job.shard and not current.is_local() and not _scope.unshared:
            team = job.teams[0] if _scope.model is None else current.team_of(_scope.model)
            adapter = sharding.adapter_for(job, team, bound.arguments, _scope.announce)
            _scope.announce = False  # fit makes its own iterator first, then that of the validation data
            if adapter is not None:
                shared = ("y", "sample_weight", "class_weight", "batch_size")
                bound.arguments.update(dict.fromkeys(shared), x=adapter, shuffle=False)
        original(*bound.args, **bound.kwargs)

    return __init__
