# SPDX-License-Identifier: Apache-2.0
"""Puts the hooks into Keras and takes them out again, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_hpc.keras_hooks import (
    batch_logs,
    building,
    earlier_traces,
    fit,
    loss_calls,
    losses,
    metric_numbers,
    metrics,
    part_losses,
    parts,
    saving,
    single_samples,
)
from keras_hpc.keras_hooks.checkpoint.loops import Checkpoints
from keras_hpc.keras_hooks.data import streams, tf_caches
from keras_hpc.keras_hooks.gradients import clipping, optimizer, torch_optim
from keras_hpc.keras_hooks.sharded import opaque
from keras_hpc.keras_hooks.sharded import update as sharded_update
from keras_hpc.keras_hooks.sharded import whole as sharded_whole
from keras_hpc.keras_hooks.state import normalization, replicas, seeds
from keras_hpc.keras_hooks.virtual import beginning
from keras_hpc.keras_hooks.virtual.states import States

_MISSING = object()


class Patcher:
    """Replaces attributes of classes and modules, and remembers what was there."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._undo: list[Callable[[], Any]] = []

    def patch(self, owner: Any, name: str, make_replacement: Callable[[Any], Any]) -> None:
        """Set `owner.name` to `make_replacement(original)` until `restore()`.

        Args:
            owner: class or module. An inherited attribute is shadowed, its definition stays untouched.
            name: the attribute.
            make_replacement: gets the present value, as `getattr` returns it.
        """
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, make_replacement(getattr(owner, name)))

    def at_end(self, undo: Callable[[], Any]) -> None:
        """Call `undo` in `restore()`."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put back every replaced attribute, the last one first."""
        while self._undo:
            self._undo.pop()()
        while self._replaced:
            owner, name, original = self._replaced.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_patcher = Patcher()


def install(job: Any) -> None:
    """Hooks into Keras for a running job.

    Args:
        job: the `Job`.
    """
    try:
        for part in (
            seeds,
            replicas,
            building,
            losses,
            loss_calls,
            metric_numbers,
            normalization,
            opaque,
            sharded_update,
            sharded_whole,
            optimizer,
            torch_optim,
            clipping,
            single_samples,
            metrics,
            saving,
            parts,
            part_losses,
            streams,
            tf_caches,
            fit,
            batch_logs,
            beginning,
        ):
            part.install(job, _patcher)
    except BaseException:  # whatever it was, Keras must not stay half changed; raised again
        uninstall(job)
        raise


def begin(job: Any) -> None:
    """Let the ranks agree on what they need before anything else. Collective."""
    earlier_traces.forget(job)
    if job.size > 1 or job.virtual is not None:
        seeds.share(job.teams[0])
    saving.begin(job)
    job.checkpoints = Checkpoints()
    if job.virtual is not None:
        job.virtual.states = States(job.virtual)


def uninstall(job: Any) -> None:
    """Take every hook out. Keras is then as before `install`, and compiled steps that held hooks are forgotten."""
    _patcher.restore()
    fit.uninstall(job)
    saving.uninstall(job)
