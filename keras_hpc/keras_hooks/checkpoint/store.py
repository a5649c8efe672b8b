# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints of some models: what `fit` and loops of the user's own do with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keras_hpc.job import log
from keras_hpc.job.plan import bytes_of, dtype_of
from keras_hpc.keras_hooks.checkpoint import places as places_of
from keras_hpc.keras_hooks.checkpoint import snapshot, storage
from keras_hpc.keras_hooks.checkpoint.memory import Memory
from keras_hpc.keras_hooks.checkpoint.writer import Writer


class Store:
    """A folder of checkpoints. All methods but `say` and `let_finish` are collective.

    Args:
        trained: what to save.
        path: the folder.
        keep: so many checkpoints stay.

    Attributes:
        folder: the same.
        team: of the models.
        newest: the step of the newest checkpoint, -1 without any.
        found: facts and arrays of the checkpoint that training goes on from, the arrays on the first rank; else None.
    """

    def __init__(self, trained: snapshot.Trained, path: str, keep: int) -> None:
        self.trained = trained
        self.team = trained.team
        self.folder = Path(path)
        self.keep = keep
        self.newest = -1
        self.found: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None
        self._memory = Memory()
        self._places: places_of.Places | None = None
        self._writer: Writer | None = None

    def open(self, kind: str) -> str | None:
        """Prepare the folder, find the newest checkpoint, and return its name, or None. Sets `found`.

        Args:
            kind: of what must have been saved there: "fit" or "loop".

        Raises:
            OSError: on all ranks: nothing can be written there, the disk is too full, all checkpoints are damaged.
            ValueError: on all ranks: the checkpoint is of another kind or of other models, or in a newer format.
        """
        error = ""
        if self.team.rank == 0:
            try:
                storage.check(self.folder, snapshot.nbytes(self.trained), self.keep)
                (self.folder / storage.INTERRUPTED).unlink(missing_ok=True)
            except OSError as why:
                error = str(why)
        error = snapshot.share_object(self.team, error)
        if error:
            raise OSError(f"No checkpoint can be kept in {self.folder}. Received: {error}")
        places = places_of.find(self.team, self.folder, snapshot.nbytes(self.trained), self.keep)
        if not places.together:
            several = (
                "so the ranks of each node write a whole one" if len(places.groups) > 1 else "so not all ranks write"
            )
            self.say(f"not all ranks see {self.folder} as the first does, {several}")
        self._places = places
        self._writer = Writer(self.team, self.folder, places, self.keep)
        snapshot.prepare(self.trained, places, self._memory)
        outcome, arrays = self._newest()
        if "facts" not in outcome:
            return None
        facts = outcome["facts"]
        saved = facts.get("kind", "fit")
        if saved != kind:
            raise ValueError(
                f"{self.folder} holds checkpoints of another program. Expected a {kind}. Received: {saved}"
            )
        with self.team.telling("Checkpoint: is it of this model"):
            said = snapshot.check(self.trained, facts["model"])
        self.team.meet("Checkpoint: is it of this model")
        if said:
            self.say(said)
        self.found, self.newest = (facts, arrays), facts["done"]
        path = outcome["path"]
        return str(path)

    def _newest(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return what is known of the newest checkpoint of all groups, and its arrays, on the first rank. Collective.

        Raises:
            OSError: on all ranks: all that there are are damaged.
            ValueError: on all ranks: one is in a newer format.
        """
        assert self._places is not None  # noqa: S101
        outcome: dict[str, Any] = {"done": -1}
        arrays: dict[str, np.ndarray] = {}
        if self._places.leads:
            try:
                found = storage.newest(self.folder)
                if found is not None:
                    path, facts, arrays, said = found
                    if not isinstance(facts.get("done"), int):
                        raise OSError(f"the manifest of {path} does not say the step")
                    outcome = {"done": facts["done"], "facts": facts, "said": said, "path": str(path)}
            except storage.NewerError as error:
                outcome["newer"] = str(error)
            except OSError as error:
                outcome["error"] = str(error)
        everyone = self.team.allgather_object(
            {key: value for key, value in outcome.items() if key in ("done", "error", "newer")},
            "Checkpoint: the newest",
        )
        newer = [one["newer"] for one in everyone if "newer" in one]
        if newer:
            raise ValueError(newer[0])
        steps = [one["done"] for one in everyone]
        root = steps.index(max(steps))
        errors = [one["error"] for one in everyone if "error" in one]
        if errors and steps[root] < 0:
            raise OSError(f"No checkpoint can be kept in {self.folder}. Received: {errors[0]}")
        with self.team.telling("Checkpoint: damaged ones"):
            if "error" in outcome:
                storage.put_aside(self.folder)
        self.team.meet("Checkpoint: damaged ones")
        outcome = self.team.broadcast_object(outcome, root, "Checkpoint: the newest")
        for text in outcome.get("said", ()):
            self.say(text)
        if root > 0 and "facts" in outcome:
            outcome["path"] += f" of rank {root}"
            arrays = self._sent_to_first(root, arrays)
        return outcome, arrays if self.team.rank == 0 else {}

    def _sent_to_first(self, root: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays of another rank, on the first. Collective."""
        described = [[name, a.dtype.name, list(a.shape)] for name, a in arrays.items()]
        received = {}
        for name, dtype, shape in self.team.broadcast_object(described, root, "Checkpoint: the newest"):
            mine = bytes_of(np.ascontiguousarray(arrays[name])) if self.team.rank == root else None
            raw = snapshot.share(self.team, mine, root)
            if self.team.rank == 0:
                received[name] = raw.view(dtype_of(dtype)).reshape(shape)
        return received

    def put_back(self) -> None:
        """Give models, optimizers and random generators what `found` holds."""
        assert self.found is not None  # noqa: S101
        facts, arrays = self.found
        snapshot.put_back(self.trained, facts["model"], arrays)

    def callback_arrays(self) -> list[np.ndarray]:
        """Return the arrays of callbacks in `found`."""
        assert self.found is not None  # noqa: S101
        facts, arrays = self.found
        found = []
        for i, (name, shape) in enumerate(facts["callback_arrays"]):
            raw = snapshot.share(self.team, arrays.get(f"callback{i}"))
            found.append(raw.copy().view(dtype_of(name)).reshape(shape))
        return found

    def save(self, step: int, facts: Callable[[], tuple[dict[str, Any], list[np.ndarray]]]) -> None:
        """Begin to write a checkpoint, once the one before is written. Only to copy the values takes time here.

        Args:
            step: its number.
            facts: called on the first rank; returns what JSON can hold, and arrays of callbacks.

        Raises:
            OSError: on all ranks: the checkpoint before could not be written.
        """
        assert self._writer is not None and self._places is not None  # noqa: S101, PT018
        self._writer.agree(wait=True)
        for model in self.trained.models:
            if hasattr(model, "jax_state_sync"):
                model.jax_state_sync()
        text, more = "", dict[str, np.ndarray]()
        with self.team.telling("Checkpoint: what is saved"):
            if self.team.rank == 0:
                said, kept = facts()
                said["callback_arrays"] = [[a.dtype.name, list(a.shape)] for a in kept]
                text = json.dumps(said)
                more = {f"callback{i}": bytes_of(a) for i, a in enumerate(kept)}
        self.team.meet("Checkpoint: what is saved")
        described, arrays = snapshot.take(self.trained, self._places, self._memory)
        if len(self._places.groups) > 1:
            text = snapshot.share_object(self.team, text)
            count = len(json.loads(text)["callback_arrays"])
            more = {f"callback{i}": snapshot.share(self.team, more.get(f"callback{i}")) for i in range(count)}
        if self._places.leads:
            text = json.dumps(json.loads(text) | {"model": described})
            arrays |= more
        self.newest = step
        self._writer.start(step, text, arrays)

    def agree(self, wait: bool = False) -> None:
        """Learn how the checkpoint on its way does.

        Args:
            wait: until it is written.

        Raises:
            OSError: on all ranks: it could not be written.
        """
        if self._writer is not None:
            self._writer.agree(wait)

    def let_finish(self) -> None:
        """Give the checkpoint on its way a moment to become whole. Of this rank alone, where an exception passes."""
        if self._writer is not None:
            self._writer.let_finish()

    def say(self, text: str) -> None:
        """Tell the user, on the first rank."""
        if self.team.rank == 0:
            log.info(f"Checkpoint: {text}")
