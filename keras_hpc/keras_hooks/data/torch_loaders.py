# SPDX-License-Identifier: Apache-2.0
"""`torch.utils.data.DataLoader`, on any backend: its batches are dealt to the ranks, or each is cut among them."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data import rows
from keras_hpc.keras_hooks.data.arrays import digest
from keras_hpc.keras_hooks.data.partition import Passes, Shard, deal
from keras_hpc.keras_hooks.state import seeds

TorchDataLoaderAdapter = keras_private.adapter("torch_data_loader_adapter:TorchDataLoaderAdapter")


class ShardedDataLoader(TorchDataLoaderAdapter):  # type: ignore[misc, valid-type]
    """This rank's part of a `DataLoader`."""

    shuffle = True  # it may: then the ranks need a common seed
    _num_batches: int | None

    def __init__(self, shard: Shard, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        batches = self._num_batches
        if batches == 0:
            raise ValueError(f"Cannot share out an empty data set. Received: {loader} of length 0.")
        self._dataloader = _Part(loader, shard)
        self._num_batches = None if batches is None else shard.steps(batches)
        self.shard = shard
        self.passes = self._dataloader.passes
        self.step_size = shard.steps_apart
        self.turns = shard.turns
        self._batches = batches
        dealt_evenly = batches is not None and batches % shard.size == 0
        self.may_be_empty = shard.size > 1 and (shard.batch == "global" or not dealt_evenly)
        self.fingerprint = ["DataLoader", batches, loader.batch_size, type(loader.sampler).__name__]

    @property
    def seed(self) -> int:
        """The seed that the ranks agreed on."""
        return self._dataloader.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._dataloader.seed = seed

    @property
    def draws(self) -> bool:
        """Whether samples draw random numbers while they are read."""
        return self._dataloader.draws

    @draws.setter
    def draws(self, draws: bool) -> None:
        self._dataloader.draws = draws

    @property
    def summary(self) -> str:
        """What was decided, in a few words."""
        how = "dealt to ranks one by one" if self.shard.batch == "local" else "each cut among the ranks"
        known = "unknown"
        return f"DataLoader, {self._batches or known} batches, {how}, steps an epoch: {self._num_batches or known}"

    def content(self) -> str:
        """Return a digest of the first sample, to find out whether ranks hold the same data."""
        loader = self._dataloader.loader
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            return ""
        try:
            return digest(loader.dataset[0])
        except (IndexError, KeyError, TypeError):  # the user's sampler knows other keys
            return ""

    def collates_together(self) -> bool:
        """Return whether the user's `collate_fn` makes other numbers of two samples than of each alone.

        Those that draw random numbers are not asked. Nor are numbers that come in other shapes, as padded ones.
        """
        loader = self._dataloader.loader
        streams = loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)
        if self.shard.batch == "local" or self.shard.size == 1 or streams or loader.collate_fn is default_collate:
            return False
        try:
            with seeds.kept(), current.alone():
                samples = [loader.dataset[0], loader.dataset[1]]
            with seeds.kept() as have_moved, current.alone():
                together, one, other = (
                    [np.asarray(leaf) for leaf in keras.tree.flatten(loader.collate_fn(copy.deepcopy(given)))]
                    for given in (samples, samples[:1], samples[1:])
                )
                return not have_moved() and not all(map(_are_rows_of, together, one, other))
        except Exception:  # noqa: BLE001  they may have other keys, or functions that take no single sample
            return False

    def on_epoch_end(self) -> None:
        """Keras calls it."""
        super().on_epoch_end()
        self.passes.end()


def _are_rows_of(together: Any, one: Any, other: Any) -> bool:
    """Whether an array has the rows of two others, in any order, or is none that can be compared."""
    if together.ndim == 0 or together.dtype.kind not in "biuf" or one.shape[1:] != other.shape[1:]:
        return True
    both = np.concatenate([one, other]), np.concatenate([other, one])
    return together.shape != both[0].shape or any(np.allclose(together, rows, equal_nan=True) for rows in both)


def reads_its_own_part(loader: DataLoader[Any]) -> bool:
    """Whether the user has sharded the loader already."""
    return any(
        isinstance(s, DistributedSampler) for s in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    )


class _Part:
    """Iterates over this rank's batches, a pass each time."""

    def __init__(self, loader: DataLoader[Any], shard: Shard) -> None:
        self.loader = loader
        self.shard = shard
        self.seed = 0
        self.draws = False
        self.passes = Passes()

    def __iter__(self) -> Iterator[Any]:
        epoch, begin = self.passes.begin()
        # Samplers without a generator of their own draw from torch's: for that moment all ranks have the same one.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self.seed + epoch) % 2**63)
            streams = self.loader.batch_sampler is None or isinstance(self.loader.dataset, IterableDataset)
            batches = (
                itertools.islice(self._stream(), begin * self.shard.turns, None)
                if streams
                else self._chosen(begin, (self.seed, epoch))
            )
            first = next(batches, None)
        while first is not None:
            yield first
            self.passes.next = epoch + 1  # Not before: see `arrays.ShardedArrays`.
            first = next(batches, None)

    def _stream(self) -> Iterator[Any]:
        """An iterable data set, or one without batches of its own: every rank reads all and keeps its part."""
        if self.shard.batch == "local":
            return deal(self.loader, rows.empty_like, self.shard)
        return (rows.mine(batch, one) for batch in self.loader for one in self.shard.each)

    def _chosen(self, begin: int, key: tuple[int, int]) -> Iterator[Any]:
        """An indexable data set: the rank loads its own samples only, from the step `begin` on.

        Args:
            begin: number of a step.
            key: names the pass.
        """
        loader, shard = self.loader, self.shard
        chosen: Iterator[list[int]] = map(list, list(loader.batch_sampler))
        if shard.batch == "local":
            indices = list(deal(chosen, lambda _: [], shard))
        else:
            indices = [batch[slice(*one.part(len(batch)))] for batch in chosen for one in shard.each]
        if shard.size > 1:
            seeds.begin_torch(*key, shard.rank)  # from which a loader seeds its processes
        loaded = iter(_with_indices(loader, [batch for batch in indices[begin * shard.turns :] if batch]))
        empty = None
        for number, batch in itertools.islice(enumerate(indices), begin * shard.turns, None):
            step, turn = divmod(number, shard.turns)
            with seeds.of_reader(*key, step, shard.rank + turn) if self.draws else contextlib.nullcontext():
                if not batch and empty is None:
                    empty = rows.empty_like(loader.collate_fn([loader.dataset[0]]))
                taken = next(loaded) if batch else empty
            yield taken


def _with_indices(loader: DataLoader[Any], batches: list[list[int]]) -> DataLoader[Any]:
    """Return a loader as the user's is, for these samples."""
    names = (
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "prefetch_factor",
    )
    return DataLoader(loader.dataset, batch_sampler=batches, **{name: getattr(loader, name) for name in names})
