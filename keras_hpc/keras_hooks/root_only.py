# SPDX-License-Identifier: Apache-2.0
"""What only the first rank of a model's team does: printing, logging and writing files."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_hpc.callbacks import LearningRateWarmup, RootOnly
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, running

_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
# Packages whose callbacks report to a service, or print.
_REPORTERS = (
    "aim", "clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "polyaxon", "sacred", "swanlab",
    "tensorboardX", "tqdm", "wandb",
)  # fmt: skip


def drop(model: Any, arguments: dict[str, Any]) -> None:
    """Remove what only one rank does from arguments of `fit`, `evaluate` or `predict`, on the other ranks."""
    if current.team_of(model).rank == 0:
        return
    arguments["verbose"] = 0
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given.callbacks = _for_others(given.callbacks)
    elif given:
        arguments["callbacks"] = _for_others(flat(given))


def flat(given: Any) -> list[Any]:
    """Return the callbacks among an argument `callbacks`."""
    return list(given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given or []))


def saves(callback: Any) -> bool:
    """Return whether a callback, on whatever rank it runs, saves the model."""
    classes = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore, *_orbax())
    return isinstance(getattr(callback, "callback", callback), classes)


def may_stop(callback: Any) -> bool:
    """Return whether a callback has something to do after a batch that could end training, as far as one can see."""
    quiet = (*_writers(), keras.callbacks.SwapEMAWeights, LearningRateWarmup)
    if isinstance(callback, quiet) and type(callback).__module__.startswith(("keras.", "keras_hpc.")):
        return False
    is_default = keras_private.get(keras_private.IS_DEFAULT)
    return any(not is_default(getattr(callback, name)) for name in _BATCH_HOOKS)


def share_best(team: Any, callbacks: Sequence[Any]) -> None:
    """Let each `ModelCheckpoint` know what that of the first rank has found best. Collective.

    Args:
        team: of the model.
        callbacks: all that this rank has given to `fit`. Those of a rank that has others than the first stay.
    """
    if team.size == 1:
        return
    savers = [callback for callback in callbacks if isinstance(callback, keras.callbacks.ModelCheckpoint)]
    found = [None if saver.best is None else float(saver.best) for saver in savers]
    best = team.broadcast_object(found, 0, "Model.fit()")
    if len(best) == len(savers):
        for saver, value in zip(savers, best, strict=True):
            saver.best = value


def _for_others(callbacks: list[Any]) -> list[Any]:
    kept = [callback for callback in callbacks if not _is_root_only(callback)]
    for callback in kept:
        if isinstance(callback, _writers()):
            _switch_writing_off(callback)
    return kept


def _is_root_only(callback: Any) -> bool:
    kind = type(callback)
    if isinstance(callback, RootOnly):
        return True
    if kind.__module__.split(".")[0] in _REPORTERS:
        return True
    if kind in _writers() or (isinstance(callback, _writers()) and kind.__module__.startswith("keras.")):
        return True
    # What the user has made of them may do more than write. These have nothing that could be switched off.
    return isinstance(callback, (keras.callbacks.RemoteMonitor, keras.callbacks.BackupAndRestore, *_orbax()))


def _switch_writing_off(callback: Any) -> None:
    """Lets the user's subclass of a writing callback do all that it does, but for the writing."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.filename = os.devnull
    elif isinstance(callback, keras.callbacks.TensorBoard):
        folder = tempfile.TemporaryDirectory(prefix="keras_hpc-")
        callback.log_dir = folder.name
        callback._keras_hpc_folder = folder  # removed with the callback
    elif isinstance(callback, keras.callbacks.ModelCheckpoint):
        for name in ("on_train_batch_end", "on_epoch_end"):
            setattr(callback, name, _without_writing(getattr(callback, name)))


def _without_writing(method: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(method, "_keras_hpc"):
        return method

    @functools.wraps(method)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        with running.without_writing():
            return method(*args, **kwargs)

    quiet._keras_hpc = True  # type: ignore[attr-defined]
    return quiet


@functools.cache
def _orbax() -> tuple[type, ...]:
    found = keras_private.find(keras_private.ORBAX_CHECKPOINT)
    return () if found is None else (found,)


@functools.cache
def _writers() -> tuple[type, ...]:
    callbacks = keras.callbacks
    return (
        callbacks.ModelCheckpoint,
        callbacks.BackupAndRestore,
        callbacks.CSVLogger,
        callbacks.TensorBoard,
        callbacks.RemoteMonitor,
        callbacks.ProgbarLogger,
        *_orbax(),
    )
