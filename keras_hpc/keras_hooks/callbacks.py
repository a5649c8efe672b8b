# SPDX-License-Identifier: Apache-2.0
"""Which callbacks run on which rank, and what the ranks agree on after they ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current, meter
from keras_hpc.keras_hooks import delayed, keras_private, losses, scope, state

_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def install(job: Any, patcher: Any) -> None:
    """Hooks the list through which Keras calls callbacks."""
    patcher.patch(keras.callbacks.CallbackList, "on_train_begin", _beginning)
    patcher.patch(keras.callbacks.CallbackList, "on_epoch_end", _agreeing)
    patcher.patch(keras.callbacks.CallbackList, "on_train_batch_end", _agreeing_if_needed)


def only_mine(model: Any, arguments: dict[str, Any]) -> None:
    """Removes what only one rank does, printing and writing files, from arguments of `fit`, `evaluate` or `predict`.

    That rank is the first of the model's team.
    """
    if current.team_of(model).rank == 0:
        return
    arguments["verbose"] = 0
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks = [
            callback for callback in callbacks.callbacks if not isinstance(callback, _rank_0_classes())
        ]
    elif callbacks:
        flat = keras.tree.flatten(callbacks)
        arguments["callbacks"] = [callback for callback in flat if not isinstance(callback, _rank_0_classes())]


def saves(arguments: dict[str, Any]) -> bool:
    """Returns whether a callback among the arguments of `fit`, on whatever rank it runs, saves the model."""
    given = arguments.get("callbacks")
    flat = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given or [])
    orbax = keras_private.find("keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint")
    classes = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore, *([orbax] if orbax else []))
    return any(isinstance(callback, classes) for callback in flat)


@functools.cache
def _rank_0_classes() -> tuple[type, ...]:
    callbacks = keras.callbacks
    orbax = keras_private.find("keras.src.callbacks.orbax_checkpoint:OrbaxCheckpoint")
    classes = [
        callbacks.ModelCheckpoint,
        callbacks.BackupAndRestore,
        callbacks.CSVLogger,
        callbacks.TensorBoard,
        callbacks.RemoteMonitor,
        callbacks.ProgbarLogger,
    ]
    return (*classes, *([orbax] if orbax is not None else []))


def may_stop(callback: Any) -> bool:
    """Returns whether a callback has something to do after a batch that could end training, as far as one can see."""
    from keras_hpc import callbacks as ours

    quiet = (*_rank_0_classes(), keras.callbacks.SwapEMAWeights, ours.LearningRateWarmup)
    if isinstance(callback, quiet) and type(callback).__module__.startswith(("keras.", "keras_hpc.")):
        return False
    is_default = keras_private.get("keras.src.utils.python_utils:is_default")
    return any(not is_default(getattr(callback, name)) for name in _BATCH_HOOKS)


def _running_fit(callbacks: Any) -> scope.Fit | None:
    fit = scope.fit()
    return fit if fit is not None and current.active() and getattr(callbacks, "model", None) is fit.model else None


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        original(self, logs)
        fit = _running_fit(self)
        if fit is None:
            return
        model, team = fit.model, current.team_of(fit.model)
        losses.check_exact(model)
        steps = self.params.get("steps")
        fit.epochs = self.params.get("epochs", 0)
        # A callback may have restored weights and the epoch to go on with, on the root alone.
        epoch = -1 if model._initial_epoch is None or team.rank > 0 else model._initial_epoch
        message = np.array([not is_built(model), any(map(may_stop, self.callbacks)), epoch], np.int64)
        team.allreduce(message, op="max")
        fit.agree_each_batch = bool(message[1])
        model._initial_epoch = None if message[2] < 0 else int(message[2])
        left = fit.epochs - max(model._initial_epoch or 0, fit.initial_epoch)
        delayed.plan_schedule(model, None if steps is None else steps * max(left, 0))
        if not message[0]:
            state.synchronize(model)

    return on_train_begin


def is_built(model: Any) -> bool:
    """Returns whether a model and the optimizer it was compiled with have all their variables."""
    optimizer = getattr(model, "optimizer", None)
    return all(layer.built for layer in model._flatten_layers()) and (optimizer is None or optimizer.built)


def _agree(fit: scope.Fit) -> None:
    stop = np.array([bool(fit.model.stop_training)], np.int64)
    current.team_of(fit.model).allreduce(stop, op="max")
    fit.model.stop_training = bool(stop[0])


def _agreeing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        fit = _running_fit(self)
        if fit is not None and (fit.saves or epoch + 1 >= fit.epochs):
            delayed.drain(fit.model)
        original(self, epoch, logs)
        if fit is not None:
            meter.after_step()  # JAX may have been ahead of its steps
            _agree(fit)
            if fit.model.stop_training:
                delayed.drain(fit.model)

    return on_epoch_end


def _agreeing_if_needed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        original(self, batch, logs)
        fit = _running_fit(self)
        if fit is not None and fit.agree_each_batch:
            _agree(fit)

    return on_train_batch_end
