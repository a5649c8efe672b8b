# SPDX-License-Identifier: Apache-2.0
"""Rows of ready-made batches: nested structures of arrays or tensors with a common first axis."""

from __future__ import annotations

from typing import Any

from keras import tree

from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data.partition import Shard

_is_tensorflow_sparse = keras_private.adapter("data_adapter_utils:is_tensorflow_sparse")

UNEQUAL_ROWS = (
    "Ranks share out the samples of each batch by rows. Expected arrays with a row for each sample, as many in all. "
    "Graphs that are merged into one, for example, or batches of two sizes side by side, cannot be shared out so: with "
    'init(batch="local") each rank takes whole batches.'
)


def count(batch: Any) -> int:
    """Return the number of rows.

    Raises:
        ValueError: arrays have different numbers of them.
    """
    lengths = [int(a.shape[0]) for a in tree.flatten(batch) if a is not None]
    if any(length != lengths[0] for length in lengths):
        raise ValueError(f"{UNEQUAL_ROWS} Received: arrays of {', '.join(map(str, lengths))} rows")
    return lengths[0]


def take(batch: Any, start: int, stop: int) -> Any:
    """Return the rows from `start` to `stop`."""

    def one(array: Any) -> Any:
        if array is None:
            return None
        if _is_tensorflow_sparse(array):
            import tensorflow as tf

            rest = array.shape[1:]
            return tf.sparse.slice(array, [start, *(0 for _ in rest)], [stop - start, *rest])
        return array[start:stop]

    return tree.map_structure(one, batch)


def empty_like(batch: Any) -> Any:
    """Return a batch of the same kind without rows."""
    return take(batch, 0, 0)


def mine(batch: Any, shard: Shard) -> Any:
    """Return this rank's part of a batch that all ranks hold."""
    return take(batch, *shard.part(count(batch)))
