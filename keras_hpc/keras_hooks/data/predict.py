# SPDX-License-Identifier: Apache-2.0
"""`Model.predict`: each rank computes a block of rows and gets all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from keras.src import tree
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays

from keras_hpc.job import current
from keras_hpc.job.team import Team
from keras_hpc.keras_hooks.data.partition import Place


def sharded(
    job: Any, unshared: Callable[[], AbstractContextManager[None]], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns Keras' `predict`, shared among the ranks.

    It returns on every rank what it returns on one: the outputs for all of `x`, in the order of `x`. Of arrays, each
    rank predicts one contiguous block. For other sources, and for models whose outputs are not one row for each row of
    input, every rank computes everything. Callbacks see this rank's batches only. Collective, except inside
    `keras_hpc.local()`.
    """

    @functools.wraps(original)
    def predict(self: Any, x: Any, batch_size: int | None = None, verbose: Any = "auto", steps: int | None = None,
                callbacks: Any = None) -> Any:  # fmt: skip
        def here(rows: Any, batch_size: int | None, steps: int | None) -> Any:
            with unshared():
                return original(self, rows, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks)

        if (
            job.size == 1
            or not job.shard
            or current.is_local()
            or not can_convert_arrays(x)
            or not (samples := _count(x))
        ):
            return here(x, batch_size, steps)
        if steps:
            batch_size = batch_size or -(-samples // steps)
            samples = min(samples, steps * batch_size)
        team = current.team_of(self)
        start, stop = Place(team.rank, team.size).part(samples)
        # A rank without rows takes the first one, to know what outputs look like, and keeps none of it.
        taken = slice(start, max(stop, start + 1)) if start < samples else slice(0, 1)
        columns = array_slicing.convert_to_sliceable(x)
        outputs = here(tree.map_structure(lambda c: None if c is None else c[taken], columns), batch_size, None)
        if not _can_gather(team, outputs, taken.stop - taken.start):
            return here(x, batch_size, steps)
        return tree.map_structure(lambda a: team.allgather(np.ascontiguousarray(a[: stop - start])), outputs)

    return predict


def _count(x: Any) -> int:
    """Returns the number of samples; 0 where lengths differ, which Keras then reports."""
    counts = {int(a.shape[0]) for a in tree.flatten(x) if a is not None}
    return counts.pop() if len(counts) == 1 else 0


def _can_gather(team: Team, outputs: Any, rows: int) -> bool:
    """Whether all ranks' outputs are arrays with a row for each input and otherwise of the same shape. Collective."""
    leaves = tree.flatten(outputs)
    fits = all(isinstance(a, np.ndarray) and a.ndim and len(a) == rows and a.dtype != object for a in leaves)
    shapes = [[list(a.shape[1:]), str(a.dtype)] for a in leaves] if fits else None
    everyone = team.allgather_object(shapes)
    return shapes is not None and all(other == shapes for other in everyone)
