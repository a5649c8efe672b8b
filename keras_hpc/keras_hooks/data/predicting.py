# SPDX-License-Identifier: Apache-2.0
"""`Model.predict`: each rank computes a block of rows and gets all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import tree

from keras_hpc.job import current
from keras_hpc.keras_hooks import building, keras_private
from keras_hpc.keras_hooks.data.arrays import digest
from keras_hpc.keras_hooks.data.partition import Shard

_can_convert_arrays = keras_private.adapter("array_data_adapter:can_convert_arrays")
_to_sliceable = keras_private.adapter("array_slicing:convert_to_sliceable")


def predict(original: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> Any:
    """Return on every rank the outputs for all of `x`, in the order of `x`. Collective.

    Of arrays that are the same on all ranks, each computes one contiguous block. Where they are not, each rank gets
    the outputs for its own. So it does of other sources, of models whose outputs are not one row for each row of
    input, and of those that keep states from batch to batch. Callbacks see this rank's batches only.

    Args:
        original: Keras' `predict`.
        model: the model.
        arguments: of the call, with `self`.
    """
    x, batch_size, steps = (arguments.get(name) for name in ("x", "batch_size", "steps"))
    job, team = current.job(), current.team_of(model)

    def here() -> Any:
        return original(**arguments)

    if team.size == 1 or not job.shard:
        return here()
    samples = _count(x) if _can_convert_arrays(x) else 0
    if steps and samples:
        batch_size = batch_size or -(-samples // steps)
        together = model.steps_per_execution  # Keras runs whole executions, also where `steps` ends within one
        samples = min(samples, -(-steps // together) * together * batch_size)
    mine = [samples, batch_size, digest(x) if samples else ""]
    everyone = team.allgather_object(mine, "Model.predict()")
    differ = any(theirs != everyone[0] for theirs in everyone)
    if differ and team.parts > 1:
        raise ValueError(
            "With init(spatial=) the ranks of a group compute the same samples, so predict needs the same data on all "
            "ranks. Received: other data, or another batch_size, on some ranks"
        )
    if not samples or differ or building.keeps_states(model):
        return here()
    fixed = building.fixed_batch(model)
    start, stop = Shard(team.replica, team.replicas, fixed=fixed).part(samples)
    # A rank without rows takes the first ones, to know what outputs look like, and keeps none of it.
    taken = slice(start, max(stop, start + 1)) if start < samples else slice(0, fixed or 1)
    columns = _to_sliceable(x)
    block = tree.map_structure(lambda c: None if c is None else c[taken], columns)
    outputs = original(**arguments | {"x": block, "batch_size": batch_size, "steps": None})
    if not _can_gather(team, outputs, taken.stop - taken.start):
        return here()
    mine_of = stop - start if team.rank % team.parts == 0 else 0  # the other ranks of a group have the same
    return tree.map_structure(lambda a: team.allgather(np.ascontiguousarray(a[:mine_of])), outputs)


def _count(x: Any) -> int:
    """Return the number of samples; 0 where lengths differ, which Keras then reports."""
    counts = {int(a.shape[0]) for a in tree.flatten(x) if a is not None}
    return counts.pop() if len(counts) == 1 else 0


def _can_gather(team: Any, outputs: Any, rows: int) -> bool:
    """Whether all ranks' outputs are arrays with a row for each input and otherwise of the same shape. Collective."""
    leaves = tree.flatten(outputs)
    fits = all(isinstance(a, np.ndarray) and a.ndim and len(a) == rows and a.dtype != object for a in leaves)
    shapes = [[list(a.shape[1:]), str(a.dtype)] for a in leaves] if fits else None
    everyone = team.allgather_object(shapes, "the outputs of Model.predict()")
    return shapes is not None and all(other == shapes for other in everyone)
