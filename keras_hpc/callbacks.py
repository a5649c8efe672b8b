# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks for training on several ranks."""

from __future__ import annotations

import math
import os
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current, meter, trace


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves all that training depends on, and lets the same script go on from there when it is started again.

    On as many ranks, a run that was killed and started again ends with the bits of one that was not: weights,
    optimizer, history. That is with arrays, a `PyDataset` or a `DataLoader`, in the middle of an epoch too. Saved are
    all variables; each rank's seeds, statistics, metrics and waiting gradients; averages that pipelined teams hold
    back, and the position in their schedules; the random states of Python, NumPy, Keras and PyTorch; the order of the
    data and the position in it; the history; and what EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and
    SwapEMAWeights remember, or a callback of your own with `get_state()`, for JSON, and `set_state(state)`. The keys of
    a dictionary that it returns are always the same: a file that holds others is refused.

    Of `tf.data`, whose order its seeds fix, the batches that were trained on are read again and dropped; so are those
    of data that a rank reads itself (`init(shard=False)`), whatever they hold then. Not saved is what only your code
    knows: random generators of your own and of workers, and what a PyDataset did in `on_epoch_end`. CSVLogger needs
    `append=True`. `on_epoch_begin` of other callbacks is called again for an epoch that goes on. `every_steps` counts
    but waits for the end of an epoch whose length is not known, and so does a signal that comes during validation.

    Only to copy the values into memory makes training wait; a thread of each rank writes them then, and only the next
    save waits for it, or the end of `fit`. Where all ranks see the folder, each writes a part of it; else those of each
    node write a whole one there, and training goes on from the newest that a node has. Files are in the safetensors
    format, with digests.

    On another number of ranks, training goes on after as many samples, rounded down to whole steps, and says what
    changed. SIGTERM and SIGUSR1 make all ranks save and exit with status 0; a file `interrupted` in the folder then
    tells the job script to start again (docs/howto/checkpoints.md). A handler of your own for them stays. Each `fit`
    needs a path of its own; one that has ended does not train again unless `epochs` grows.

    In a loop of your own it is no callback: call `save` and `restore`.

    Collective: every rank needs it.

    Args:
        path: a folder for this `fit` or loop alone.
        every_steps: save after so many steps, and at the end of training. None: after each epoch. Not for loops.
        keep: how many checkpoints stay.

    Raises:
        OSError: from `fit`, on all ranks: nothing can be written there, or the disk is too full, before training if
            that is known then, else within about a second. A checkpoint that could not be written leaves those before.
        ValueError: from `fit`, on all ranks: the checkpoint is of another model, optimizer or backend, or in a newer
            format.

    Example:
    ```python
    model.fit(x, y, epochs=20, callbacks=[keras_hpc.callbacks.Checkpoint("checkpoints/run", every_steps=200)])
    ```

    ```python
    checkpoint = keras_hpc.callbacks.Checkpoint("checkpoints/loop")
    state = checkpoint.restore(model) or {"step": 0}
    for step in range(state["step"], 100):
        model.train_on_batch(*batch_of(step))
        if (step + 1) % 20 == 0:
            checkpoint.save(model, step=step + 1, state={"step": step + 1})
    ```
    """

    def __init__(self, path: str | os.PathLike[str], every_steps: int | None = None, keep: int = 3) -> None:
        super().__init__()
        for name, value in (("every_steps", every_steps), ("keep", keep)):
            if (value is not None or name == "keep") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` is a number. Expected an integer >= 1. Received: {name}={value!r}")
        self.path = os.fspath(path)
        self.every_steps = every_steps
        self.keep = keep

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuses to train where nothing would be saved. All else is called from `keras_hooks.fit`."""
        current.job()
        if current.is_local():
            raise RuntimeError(
                "Checkpoint saves what all ranks hold. Expected a `fit` outside of `keras_hpc.local()`, where "
                "BackupAndRestore of Keras works. Received: a `fit` inside"
            )

    def restore(self, *models: Any) -> Any:
        """Give models what the newest checkpoint of a loop holds. Collective.

        Weights, optimizers, seeds, each rank's statistics and waiting gradients, averages that pipelined teams hold
        back, and the random states of Python, NumPy, Keras and PyTorch. Not what metrics have counted.

        Args:
            models: the same, in the same order, as `save` gets. Built ones; an optimizer that is not built gets all
                trainable variables of its model.

        Returns:
            the `state` that `save` was given, or None where there is no checkpoint: then nothing is changed.

        Raises:
            OSError: on all ranks: nothing can be written in the folder, or all checkpoints are damaged.
            ValueError: on all ranks: the checkpoint is of other models or optimizers, of a `fit`, or in a newer format.
        """
        return current.job().checkpoints.restore(self, models)

    def save(self, *models: Any, step: int, state: Any = None) -> None:
        """Save models and all that their training depends on, while the loop goes on. Collective.

        Between steps. The call waits for the one before to be written; `wait` does, too, and the end of the job.

        Args:
            models: compiled ones, on teams of the same ranks; they may share layers.
            step: numbers the checkpoint; the largest number is the newest. The same on all ranks.
            state: what else your loop has to know, for JSON: the first rank's counts.

        Raises:
            OSError: on all ranks: the checkpoint before could not be written, or nothing can be written there.
        """
        current.job().checkpoints.save(self, models, step, state)

    def wait(self) -> None:
        """Wait until what `save` has begun is written. Collective.

        Raises:
            OSError: on all ranks: it could not be written.
        """
        current.job().checkpoints.wait(self)


class CommunicationReport(keras.callbacks.Callback):  # type: ignore[misc]
    """Puts what the reductions of each epoch cost into `logs`, so into the history, CSV files and TensorBoard.

    For the model's team, say team 0: `communication/team0_ms`, time of the reductions of a step; `..._exposed_ms`, how
    much of it the step waited; `..._hidden`, the share that it did not; `..._mb`, megabytes a step; `..._gb_per_s`.
    Means over the ranks. Put it before callbacks that write logs. Collective: every rank needs it.

    Example:
    ```python
    model.fit(x, y, callbacks=[keras_hpc.callbacks.CommunicationReport(), keras.callbacks.TensorBoard()])
    ```
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count."""
        self._team = current.team_of(self.model) if current.is_initialized() else None
        self._meter = None if self._team is None else meter.Meter(self._team)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the figures of the epoch to `logs`."""
        if logs is not None and self._team is not None and self._meter is not None:
            own = self._meter.read().logs(self._team.index)
            values = np.array(list(own.values()), np.float64)
            self._team.allreduce(values, "mean")
            logs.update(zip(own, values.tolist(), strict=True))


class Trace(keras.callbacks.Callback):  # type: ignore[misc]
    """Records some steps of a `fit` in the file of `keras_hpc.init(trace=path, trace_from="demand")`.

    A trace of a whole training is long, and its first steps compile. Every rank needs it; nothing is communicated. With
    `compile(steps_per_execution=n)` whole executions are recorded, from the first that begins at `first_step` or later.

    Args:
        first_step: how many steps of this `fit` come before.
        steps: how many are recorded.

    Raises:
        RuntimeError: from `fit`: `init` was not given `trace`.

    Example:
    ```python
    keras_hpc.init(trace="trace.json", trace_from="demand")
    model.fit(x, y, callbacks=[keras_hpc.callbacks.Trace(first_step=100, steps=20)])
    ```
    """

    def __init__(self, first_step: int = 10, steps: int = 20) -> None:
        super().__init__()
        for name, value, least in (("first_step", first_step, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"`{name}` is a number of steps, at least {least}. Received: {name}={value!r}")
        self.first_step, self.steps = first_step, steps

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count."""
        if trace.recording() is None:
            raise RuntimeError("There is no file for the trace: call keras_hpc.init(trace=PATH, trace_from='demand').")
        self._before, self._last, self._records, self._over = 0, -1, False, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin to record, if the first step has come."""
        if not (self._records or self._over) and self._before + batch >= self.first_step:
            self._record(True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop, if the last step is over."""
        self._last = batch
        if self._records and self._before + batch + 1 >= self.first_step + self.steps:
            self._record(False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count its steps."""
        self._before, self._last = self._before + self._last + 1, -1

    def on_train_end(self, logs: Any = None) -> None:
        """Stop, if training ends before."""
        if self._records:
            self._record(False)

    def _record(self, on: bool) -> None:
        writer = trace.recording()
        self._records, self._over = on, not on
        if writer is not None:
            writer.record(on)


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate linearly from the one compiled to `scale` times that over the first epochs.

    With `batch="local"`, `n` ranks make one step where one rank makes `n`, so the rate is multiplied by `n`; at once
    that would diverge (Goyal et al., 2017, arXiv:1706.02677). After the warm-up this callback leaves the rate alone.

    Args:
        epochs: length of the warm-up, may be a fraction. 0 sets the scaled rate at once.
        scale: factor of the learning rate. Defaults to `keras_hpc.group_count()`, and to 1 before `init()`.

    Example:
    ```python
    model.fit(x, y, epochs=12, callbacks=[keras_hpc.callbacks.LearningRateWarmup(epochs=3)])
    ```
    """

    def __init__(self, epochs: float, scale: float | None = None) -> None:
        super().__init__()
        if not 0 <= epochs < math.inf:
            raise ValueError(f"`epochs` is a number, not negative. Received: epochs={epochs}")
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"`scale` is a positive number. Received: scale={scale}")
        self.epochs = epochs
        self.scale = scale
        self._rate = float("nan")
        self._epoch = 0
        self._done = False

    def set_model(self, model: Any) -> None:
        """Keep the compiled learning rate, before another callback restores a later one."""
        super().set_model(model)
        optimizer = model.optimizer
        schedule = getattr(optimizer, "_learning_rate", None)
        schedule = getattr(getattr(optimizer, "inner_optimizer", None), "_learning_rate", schedule)
        if not isinstance(schedule, keras.Variable):
            raise ValueError(
                "LearningRateWarmup needs an optimizer with one settable learning rate. Use a number, or put the "
                f"warm-up into the schedule. Received: {type(optimizer).__name__} with learning_rate={schedule}"
            )
        if math.isnan(self._rate):
            self._rate = float(schedule)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the rate of the epoch; one that lies past the warm-up is not touched."""
        self._epoch = epoch
        if epoch == 0 or epoch < self.epochs:
            self._set(epoch)
        self._done = epoch >= self.epochs

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the step."""
        steps = self.params.get("steps")
        if steps and not self._done:
            self._set(self._epoch + (batch + 1) / steps)

    def _set(self, progress: float) -> None:
        scale = self.scale if self.scale is not None else current.replicas()
        share = min(1.0, progress / self.epochs) if self.epochs else 1.0
        if hasattr(self.model, "jax_state_sync"):
            # During an epoch JAX keeps the values elsewhere. This brings them back, and Keras takes them from there.
            self.model.jax_state_sync()
        self.model.optimizer.learning_rate = self._rate * (1 + (scale - 1) * share)


class RootOnly(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets a callback run on the first rank of the model's team only: one that prints, plots, logs or writes files.

    What Keras' own writing callbacks, Weights & Biases, MLflow, Comet, DVC and tqdm do is left to that rank without
    it. A callback that changes the model, the learning rate or the training must run on every rank.

    Args:
        callback: the callback.

    Example:
    ```python
    plot = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs))
    model.fit(x, y, callbacks=[keras_hpc.callbacks.RootOnly(plot)])
    ```
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(f"`callback` runs on one rank. Expected a Keras callback. Received: {callback!r}")
        self.callback = callback

    def set_params(self, params: Any) -> None:
        """Pass them on."""
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Pass it on."""
        super().set_model(model)
        self.callback.set_model(model)


def _passed_on(name: str) -> Any:
    def method(self: RootOnly, *args: Any, **kwargs: Any) -> None:
        alone = current.is_local() or not current.is_initialized()
        if alone or current.team_of(self._model).rank == 0:
            getattr(self.callback, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, "Calls the callback's, on the first rank."
    return method


for _name in dir(keras.callbacks.Callback):
    if _name.startswith("on_"):
        setattr(RootOnly, _name, _passed_on(_name))
