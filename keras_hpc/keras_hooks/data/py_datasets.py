# SPDX-License-Identifier: Apache-2.0
"""`keras.utils.PyDataset`: its batches are dealt to the ranks, or each is cut among them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_hpc.data import Dataset
from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data import rows
from keras_hpc.keras_hooks.data.arrays import digest
from keras_hpc.keras_hooks.data.partition import Partition, Passes, Shard
from keras_hpc.keras_hooks.state import seeds

OrderedEnqueuer = keras_private.adapter("py_dataset_adapter:OrderedEnqueuer")
PyDatasetAdapter = keras_private.adapter("py_dataset_adapter:PyDatasetAdapter")


class _Pass(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's batches of one pass, by step, and of a step by turn. Worker processes get a copy.

    Args:
        source: the user's data set.
        shard: where this rank stands.
        order: the order of the batches, the same on every rank; `None` leaves them as they are.
        first: the step that the pass begins with.
        key: names the pass, where what is read draws random numbers of each rank's own; None: it does not.
    """

    def __init__(
        self,
        source: Any,
        shard: Shard,
        order: np.ndarray | None = None,
        first: int = 0,
        key: tuple[int, int] | None = None,
    ) -> None:
        if isinstance(source, Dataset):
            super().__init__(source.readers, False, source.ahead)
        else:
            super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self.source = source
        self.shard = shard
        self.order = order
        self.first = first
        self.key = key

    @property
    def num_batches(self) -> int | None:
        batches = self.source.num_batches
        return None if batches is None else (self.shard.steps(batches) - self.first) * self.shard.turns

    def __getitem__(self, index: int) -> Any:
        step, turn = divmod(index, self.shard.turns)
        step += self.first
        shard = self.shard.each[turn]
        with contextlib.nullcontext() if self.key is None else seeds.of_reader(*self.key, step, shard.rank):
            return self._part(step, shard)

    def _part(self, step: int, shard: Shard) -> Any:
        if isinstance(self.source, Dataset):
            return _of_files(self.source, step, shard)
        if shard.batch == "global":
            return rows.mine(self._batch(step), shard)
        number = step * shard.size + shard.rank
        if self.source.num_batches is None or number < self.source.num_batches:
            return self._batch(number)
        # No batch left for this rank: one more is read for its shape, while the other ranks read theirs.
        return rows.empty_like(self._batch(0))

    def _batch(self, number: int) -> Any:
        return self.source[number if self.order is None else int(self.order[number])]

    def on_epoch_begin(self) -> None:
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.source.on_epoch_end()


def _of_files(source: Dataset, step: int, shard: Shard) -> Any:
    """Read only what is a rank's."""
    if shard.batch == "global":
        start, stop = shard.part(source.count(step))
        # What has no samples is made of one, because `decode` need not understand an empty list.
        return source.rows(step, start, stop) if start < stop else rows.empty_like(source.rows(step, 0, 1))
    number = step * shard.size + shard.rank
    return source[number] if number < len(source) else rows.empty_like(source.rows(0, 0, 1))


class ShardedPyDataset(PyDatasetAdapter):  # type: ignore[misc, valid-type]
    """This rank's part of a `PyDataset`; its workers, processes and queue size are kept."""

    def __init__(
        self,
        shard: Shard,
        source: Any,
        class_weight: Any = None,
        shuffle: bool | str = False,
        agree_on_randomness: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.agree_on_randomness = agree_on_randomness
        batches = source.num_batches
        if batches == 0:
            raise ValueError(f"Cannot share out an empty data set. Received: {source} of length 0.")
        super().__init__(_Pass(source, shard), class_weight=class_weight, shuffle=False)
        # Each pass starts workers of its own, so that those of an abandoned pass never feed the next one.
        self.enqueuer = None
        self.shuffle = shuffle and batches is not None and not isinstance(source, Dataset)  # which has its own order
        self.seed = 0
        self.draws = False  # whether it draws random numbers while it is read
        # Of a batch that all ranks read and cut, they need the same ones.
        self.reads_alone = shard.batch == "local" or isinstance(source, Dataset)
        self.passes = Passes()
        self.step_size = shard.steps_apart
        self.turns = shard.turns
        dealt_evenly = batches is None or batches % shard.size == 0
        self.may_be_empty = shard.size > 1 and (shard.batch == "global" or not dealt_evenly)
        self.fingerprint = ["PyDataset", batches, str(shuffle), type(source).__name__]

    @property
    def summary(self) -> str:
        """What was decided, in a few words."""
        batches, steps = self.py_dataset.source.num_batches, self.num_batches
        how = "dealt to ranks one by one" if self.py_dataset.shard.batch == "local" else "each cut among the ranks"
        return f"PyDataset, {batches or 'endless'} batches, {how}, steps an epoch: {steps or 'unknown'}"

    def content(self) -> str:
        """Return a digest of the first batch, to find out whether ranks hold the same data."""
        source = self.py_dataset.source
        return digest(source.rows(0, 0, 1) if isinstance(source, Dataset) else source[0])

    @property
    def num_batches(self) -> int | None:
        """Steps in a pass; None: it is endless."""
        batches = self.py_dataset.num_batches
        return None if batches is None else batches // self.turns

    def on_epoch_begin(self) -> None:
        """Keras calls it. A data set that draws its order does so from the same random numbers on all ranks."""
        self.agree_on_randomness("PyDataset.on_epoch_begin()")
        super().on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Keras calls it. A data set that draws its order does so from the same random numbers on all ranks."""
        self.agree_on_randomness("PyDataset.on_epoch_end()")
        super().on_epoch_end()
        self.passes.end()

    def _get_iterator(self) -> Iterator[Any]:
        source, shard = self.py_dataset.source, self.py_dataset.shard
        epoch, first = self.passes.begin()
        order = None
        ahead: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(source, Dataset):
            source = source.of_epoch(epoch)  # whoever else reads it, as an `evaluate` amid the pass
            ahead = source.read_ahead()
        if self.shuffle:
            batches = Partition(source.num_batches, 1, shard)
            order = batches.order(True, self.seed, epoch)
        key = (self.seed, epoch) if self.draws and self.reads_alone else None
        with ahead:
            for batch in _read(_Pass(source, shard, order, first, key)):
                yield self._standardize_batch(batch)
                self.passes.next = epoch + 1  # Not before: see `arrays.ShardedArrays`.


def _read(part: _Pass) -> Iterator[Any]:
    """Yield a pass's batches, read ahead by its workers if it has any."""
    steps = itertools.count() if part.num_batches is None else range(part.num_batches)
    if not (part.workers > 1 or (part.workers > 0 and part.use_multiprocessing)):
        yield from (part[step] for step in steps)
        return
    if part.key is not None and not part.use_multiprocessing:  # threads, which draw from the same generators at a time
        seeds.begin_reading(*part.key, part.shard.rank)
        part.key = None
    enqueuer = OrderedEnqueuer(part, part.workers, part.use_multiprocessing, part.max_queue_size)
    enqueuer.start()
    try:
        for _, batch in zip(steps, enqueuer.get(), strict=False):
            yield batch
    finally:
        enqueuer.stop()
