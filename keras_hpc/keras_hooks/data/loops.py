# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a data set for a training loop of the user's own: as many rows or batches on each rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
from keras import tree

from keras_hpc.data import Dataset
from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.state import seeds

_is_tf_dataset = keras_private.adapter(":is_tf_dataset")


def part_of(data: Any, rank: int, size: int) -> Any:
    """Return the part of `rank` of `size`; see `keras_hpc.shard`."""
    if _is_tf_dataset(data):
        return _of_tf_dataset(data, rank, size)
    if isinstance(data, keras.utils.PyDataset):
        return _PyDatasetPart(data, rank, size)
    if hasattr(data, "__next__"):
        return _dealt(data, rank, size)
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if leaves and all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves):
        counts = {int(leaf.shape[0]) for leaf in leaves}
        if len(counts) > 1:
            raise ValueError(f"Arrays that are shared out together must have equally many rows. Received: {counts}")
        rows = counts.pop() // size
        return tree.map_structure(lambda a: None if a is None else a[rank * rows : (rank + 1) * rows], data)
    if hasattr(data, "__iter__") and not isinstance(data, (str, bytes, dict)):
        return _Part(data, rank, size)
    raise TypeError(
        "Only data with rows or batches can be shared out. Expected arrays, a tf.data.Dataset, a PyDataset, a "
        f"DataLoader, or something to iterate over. Received: {type(data)}"
    )


def _dealt(batches: Any, rank: int, size: int) -> Iterator[Any]:
    """Every `size`-th batch, of whole rounds only."""
    source = iter(batches)
    while len(turn := list(itertools.islice(source, size))) == size:
        yield turn[rank]


class _Part:
    def __init__(self, source: Any, rank: int, size: int) -> None:
        self._source, self._rank, self._size = source, rank, size

    def __iter__(self) -> Iterator[Any]:
        return _dealt(self._source, self._rank, self._size)

    def __len__(self) -> int:
        return len(self._source) // self._size


class _PyDatasetPart(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, source: Any, rank: int, size: int) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self._source, self._rank, self._size = source, rank, size

    def __len__(self) -> int:
        return len(self._source) // self._size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index == 0 and isinstance(self._source, Dataset):  # of which the first batch is another rank's
            self._source.begin_pass()
        with seeds.of_next_reader(self._rank):
            return self._source[index * self._size + self._rank]

    def on_epoch_begin(self) -> None:
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._source.on_epoch_end()


def _of_tf_dataset(dataset: Any, rank: int, size: int) -> Any:
    import tensorflow as tf

    from keras_hpc.keras_hooks.data.tf_datasets import in_order

    dataset = in_order(dataset)
    count = int(dataset.cardinality())
    if count == -1 or (count >= 0 and count % size == 0):
        return dataset.shard(size, rank)
    if count >= 0:
        return dataset.take(count - count % size).shard(size, rank)
    # Nobody knows how many: a round is dealt once it is whole.
    structured = isinstance(dataset.element_spec, (tuple, dict))
    rounds = dataset.map(lambda *x: (x,) if structured else x).window(size, drop_remainder=True)

    def mine(*window: Any) -> Any:
        return tf.data.Dataset.zip(window).skip(rank).take(1)

    picked = rounds.flat_map(mine)
    return picked.map(lambda *x: x[0])
