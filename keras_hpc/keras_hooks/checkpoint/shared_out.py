# SPDX-License-Identifier: Apache-2.0
"""What optimizers that are sharded keep: each rank saves its pieces, under the names of pieces of large variables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_hpc import backends
from keras_hpc.job.plan import bytes_of
from keras_hpc.keras_hooks.checkpoint import tensors
from keras_hpc.keras_hooks.sharded import whole
from keras_hpc.keras_hooks.sharded.shards import Slot

Slots = dict[int, tuple[Any, Slot]]


def slots_of(models: Sequence[Any]) -> Slots:
    """Return which variables of models' optimizers are shared out among the ranks, and how, by their ids."""
    return {key: slot for model in models for key, slot in whole.slots_of(model).items()}


def pieces(common: Sequence[Any], slots: Slots, team: Any, shared: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what this rank keeps of sharded variables, or, where one rank writes alone, all. Then it is collective."""
    for index, variable in enumerate(common):
        if id(variable) not in slots:
            continue
        slot = slots[id(variable)][1]
        value = np.asarray(backends.current().view(variable)) if shared else whole.gather(team, variable, slot)
        if not tensors.holds(value.dtype.name):
            value = bytes_of(np.asarray(value, order="C")).reshape(value.shape[0] if value.ndim else 1, -1)
        if not shared or (slot.mine is not None and len(slot.pieces) == 1):
            yield f"variable{index} {variable.path}", value
        elif slot.mine is not None:
            yield f"variable{index}[{slot.mine.start}:{slot.mine.stop}] {variable.path}", value


def joined(found: list[np.ndarray]) -> np.ndarray:
    """Return a variable of its pieces, in order."""
    return np.ascontiguousarray(found[0] if len(found) == 1 else np.concatenate(found))
