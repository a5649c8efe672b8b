# SPDX-License-Identifier: Apache-2.0
"""What `callbacks.Checkpoint` does in training loops of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc.job import current
from keras_hpc.keras_hooks.checkpoint import snapshot
from keras_hpc.keras_hooks.checkpoint.store import Store


class Checkpoints:
    """The checkpoints that loops of a job keep, by their folders."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}

    def restore(self, given: Any, models: Sequence[Any]) -> Any:
        """Give models what the newest checkpoint holds, and return its `state`; None where there is none. Collective.

        Args:
            given: the `Checkpoint`.
            models: built ones. Optimizers that are not built get all trainable variables of their models.
        """
        store = self._open(given, models)
        if store.found is None:
            return None
        store.put_back()
        facts, _ = store.found
        store.found = None
        return copy.deepcopy(facts["state"])

    def save(self, given: Any, models: Sequence[Any], step: int, state: Any) -> None:
        """Begin to write a checkpoint. Collective."""
        store = self._stores.get(given.path)
        if store is None or list(map(id, store.trained.models)) != list(map(id, models)):
            store = self._open(given, models)
        store.found = None

        def facts() -> tuple[dict[str, Any], list[np.ndarray]]:
            return {"kind": "loop", "state": state, "done": step}, []

        with store.team.telling("Checkpoint.save()"):
            if not isinstance(step, int) or step < 0:
                raise ValueError(f"`step` numbers the checkpoint. Expected an integer >= 0. Received: step={step!r}")
        store.team.agree("Checkpoint.save()", [f"step={step}"])
        if step <= store.newest:
            raise ValueError(
                f"{given.path} has a checkpoint of step {store.newest}. Expected a later step, after `restore`, or "
                f"another folder. Received: step={step}"
            )
        store.save(step, facts)

    def wait(self, given: Any) -> None:
        """Wait until what `save` has begun is written. Collective."""
        store = self._stores.get(given.path)
        if store is not None:
            store.agree(wait=True)

    def finish(self) -> None:
        """Wait for all of them, at the end of a job. Collective."""
        for store in self._stores.values():
            store.agree(wait=True)

    def _open(self, given: Any, models: Sequence[Any]) -> Store:
        team = current.team_of(_first(models))
        old = self._stores.pop(given.path, None)
        if old is not None:
            old.agree(wait=True)
        with team.telling("Checkpoint of a loop"):
            others = [model.name for model in models if current.team_of(model).ranks != team.ranks]
            if others:
                raise ValueError(
                    f"Models of one checkpoint are on teams of the same ranks. Received: {others} on others"
                )
        team.agree("Checkpoint of a loop", [f"{len(models)} models", f"keep={given.keep}"])
        for model in models:
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
        # What `train_on_batch` returns are means since the metrics were reset. Before its first call there are none.
        store = Store(snapshot.Trained(models, metrics=False), given.path, given.keep)
        store.open("loop")
        self._stores[given.path] = store
        return store


def _first(models: Sequence[Any]) -> Any:
    if not models:
        raise ValueError("A checkpoint is of one model or several. Received: none")
    return models[0]
