# SPDX-License-Identifier: Apache-2.0
"""All of a sharded optimizer's state: gathered where a model is saved, and shared out where one is loaded.

A file holds what it would hold without sharding, so any number of ranks, or a program without keras_hpc, can load it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.sharded import shards as sharding
from keras_hpc.keras_hooks.sharded.shards import Slot
from keras_hpc.keras_hooks.state import variables as model_variables


class _Gathered(threading.local):
    arrays: dict[int, np.ndarray] | None = None  # all of each slot, by its id


_gathered = _Gathered()


def install(job: Any, patcher: Any) -> None:
    """Hooks how an optimizer saves and loads its variables."""
    if not job.shard_optimizer:
        return
    base = keras_private.get(keras_private.OPTIMIZER)
    patcher.patch(base, "save_own_variables", _save)
    patcher.patch(base, "load_own_variables", _load)
    patcher.patch(base, "set_weights", _set)


def slots_of(owner: Any) -> dict[int, tuple[Any, Slot]]:
    """Return what the optimizers of a model, or one, share out, by id: an optimizer's variable, and how."""
    optimizers = model_variables.optimizers_of(owner) if isinstance(owner, keras.Model) else [owner]
    held = [inner for optimizer in optimizers for inner in model_variables.held_optimizers(optimizer)]
    found: dict[int, tuple[Any, Slot]] = {}
    for optimizer in model_variables.unique([*optimizers, *held]):
        shards = sharding.of(optimizer)
        if shards is not None and optimizer.built:
            shards.complete(optimizer)
            found |= {id(variable): (variable, slot) for variable, slot in shards.slots}
    return found


def gather(team: Any, variable: Any, slot: Slot) -> np.ndarray:
    """Return all of what an optimizer keeps for a variable. Collective on its team."""
    mine = np.asarray(backends.current().view(variable)).reshape(-1)
    whole = team.allgather(
        mine if slot.mine is not None else mine[:0],
        "saving a model whose optimizer is sharded: all ranks save together, without an `if keras_hpc.rank() == 0:`",
    )
    return np.asarray(whole.reshape(slot.shape))


@contextlib.contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Inside, this rank can save a model. Collective on its team, unless it is inside of such a context already."""
    if not isinstance(model, keras.Model) or _gathered.arrays is not None or not current.active():
        yield
        return
    slots = slots_of(model)
    if slots and hasattr(model, "jax_state_sync") and getattr(model, "_jax_state", None) is not None:
        model.jax_state_sync()
    team = current.team_of(model)
    _gathered.arrays = {key: gather(team, variable, slot) for key, (variable, slot) in slots.items()}
    try:
        yield
    finally:
        _gathered.arrays = None


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise unless callbacks can work with a sharded optimizer.

    Raises:
        ValueError: one reads or changes the state of the optimizer on one rank alone.
    """
    if not current.job().shard_optimizer:
        return
    orbax = keras_private.find(keras_private.ORBAX_CHECKPOINT)
    alone = (keras.callbacks.BackupAndRestore, keras.callbacks.SwapEMAWeights, *([] if orbax is None else [orbax]))
    for given in callbacks:
        callback = getattr(given, "callback", given)
        if isinstance(callback, alone):
            received = type(callback).__name__
        elif isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            received = f"ModelCheckpoint(save_freq={callback.save_freq!r})"
        else:
            continue
        raise ValueError(
            "With init(shard_optimizer=True) no rank alone can read or change all that an optimizer keeps. Expected "
            "keras_hpc.callbacks.Checkpoint, or ModelCheckpoint at the end of epochs; or init(shard_optimizer=False). "
            f"Received: {received}"
        )


def check_loaded_alike(model: Any, error: type[Exception] = ValueError) -> None:
    """Raise unless the optimizers of all ranks have loaded, begun with, or been set to the same. Collective.

    Args:
        model: the model, on whose team all ranks call this.
        error: what is raised.

    Raises:
        Exception: of the given kind: a rank has done so alone.
    """
    if not current.job().shard_optimizer:
        return
    shards = [found for o in model_variables.optimizers_of(model) if (found := sharding.of(o)) is not None]
    everyone = current.team_of(model).allgather_object(
        [s.loaded for s in shards], "what sharded optimizers have loaded"
    )
    for one in shards:
        one.loaded = []  # whoever loads the same once more alone goes back alone
    for of_ranks in itertools.zip_longest(*everyone, fillvalue=[]):
        # Of parts, whoever has all of a variable gives a digest of it, and others none.
        if len(set(map(len, of_ranks))) > 1 or any(len(set(each) - {""}) > 1 for each in zip(*of_ranks, strict=True)):
            raise error(
                "With init(shard_optimizer=True) each rank keeps its part of what an optimizer loads, is set to, or "
                "makes of weights when it is built. Expected that all ranks load the same weights, or model, or set "
                "the same, or none does. Received: other contents on other ranks"
            )


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_own_variables(self: Any, store: Any) -> None:
        slots = slots_of(self)
        if not slots:
            original(self, store)
            return
        arrays = _gathered.arrays
        if arrays is None or not slots.keys() <= arrays.keys():
            raise RuntimeError(
                f"The optimizer {self.name!r} is sharded: no rank alone can save it. Expected model.save or "
                "model.save_weights on all ranks, outside of keras_hpc.local(). Received: a call for this rank alone"
            )
        to_numpy = backends.current().to_numpy
        for number, variable in enumerate(self.variables):
            store[str(number)] = arrays[id(variable)] if id(variable) in slots else to_numpy(variable)

    return save_own_variables


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_own_variables(self: Any, store: Any) -> None:
        slots = slots_of(self)
        if not slots or len(store.keys()) != len(self.variables):
            original(self, store)
            return
        digests = []
        for number, variable in enumerate(self.variables):
            value = np.array(store[str(number)])
            digests.append(sharding.digest(value))
            variable.assign(slots[id(variable)][1].part_of(value) if id(variable) in slots else value)
        for shards in filter(None, map(sharding.of, model_variables.with_held(self))):
            shards.loaded = digests

    return load_own_variables


def _set(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_weights(self: Any, weights: Any) -> None:
        slots = slots_of(self) if self.built else {}
        if not slots:
            original(self, weights)
            return
        given = [backends.current().to_numpy(value) for value in weights]
        digests = []
        for number, (variable, value) in enumerate(zip(self._variables, given, strict=False)):
            slot = slots[id(variable)][1] if id(variable) in slots else None
            whole = slot is None or (value.shape == slot.shape and not slot.held_whole)
            digests.append(sharding.digest(value) if whole else "")
            if slot is not None and value.shape == slot.shape:  # of all ranks, and not this rank's part
                given[number] = slot.part_of(value)
        original(self, given)
        shards = sharding.of(self)
        if shards is not None:
            shards.loaded = digests

    return set_weights
