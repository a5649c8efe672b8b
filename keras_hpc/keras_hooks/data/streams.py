# SPDX-License-Identifier: Apache-2.0
"""Python generators and Grain: every rank reads the whole stream of batches and keeps its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data import rows
from keras_hpc.keras_hooks.data.arrays import digest
from keras_hpc.keras_hooks.data.partition import Shard, deal

_KerasAdapter = keras_private.adapter("generator_data_adapter:GeneratorDataAdapter")
_PEEKED = 2  # steps, as many as Keras: what differs between them has no fixed size


def install(job: Any, patcher: Any) -> None:
    """Let ranks that share generators read of them as much as they use, and no more."""
    if keras.backend.backend() == "tensorflow" and job.shard:
        patcher.patch(_KerasAdapter, "get_tf_dataset", _as_far_as_used)


def _as_far_as_used(original: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the prefetch that Keras adds on TensorFlow.

    How far it has read when a `fit` or an evaluation ends is chance. What is read later from the same generator, or
    drawn from a generator of random numbers that it uses, would then be another thing on each rank.
    """

    @functools.wraps(original)
    def get_tf_dataset(self: Any) -> Any:
        dataset = original(self)
        if not current.active():
            return dataset
        from keras_hpc.keras_hooks.data.tf_datasets import without_reading_ahead

        return without_reading_ahead(dataset)

    return get_tf_dataset


class _Batches:
    """This rank's batches of a stream. Of what can be read again, each pass begins anew.

    A generator is read once, but each pass begins with the first batches again, as in Keras: it builds models with one
    pass, and trains with the next.

    Args:
        shard: where this rank stands.
        source: what yields the batches of all ranks.

    Attributes:
        first: the first batches, whole.
    """

    def __init__(self, shard: Shard, source: Iterable[Any]) -> None:
        self._shard = shard
        self._source = source
        stream: Iterator[Any] = map(_as_tuple, source)
        each_step = shard.size if shard.batch == "local" else 1
        self.first = list(itertools.islice(stream, _PEEKED * each_step))
        self._rest: Iterator[Any] | None = stream
        self._is_read_once = iter(source) is source

    def begin(self) -> Iterator[Any]:
        """Return a pass."""
        if self._rest is None:
            stream: Iterator[Any] = map(_as_tuple, self._source)
        else:
            stream = itertools.chain(self.first, self._rest)
        if not self._is_read_once:
            self._rest = None
        if self._shard.batch == "local":
            return deal(stream, rows.empty_like, self._shard)
        return (rows.mine(batch, one) for batch in stream for one in self._shard.each)


class ShardedStream(_KerasAdapter):  # type: ignore[misc, valid-type]
    """This rank's part of a Python generator, or of another stream of batches that can be iterated over."""

    shuffle = False
    may_be_empty = True

    def __init__(self, shard: Shard, source: Iterable[Any], kind: str) -> None:
        self._batches = _Batches(shard, source)
        self._shard = shard
        # Keras learns shapes from the first batches: whole ones, as a rank may begin with none.
        super().__init__(iter(self._batches.first))
        self.generator = self._batches.begin
        self.step_size = shard.steps_apart
        self.turns = shard.turns
        self.fingerprint = [kind]

    @property
    def summary(self) -> str:
        """What was decided, in a few words."""
        how = "dealt to ranks one by one" if self._shard.batch == "local" else "each cut among the ranks"
        return f"{self.fingerprint[0]}, every rank reads all batches, {how}"

    @property
    def first_batch(self) -> Any:
        """What all ranks read first."""
        return self._batches.first[0]

    def content(self) -> str:
        """Return a digest of the first batch, to find out whether ranks hold the same data."""
        return digest(self.first_batch)


def _as_tuple(batch: Any) -> Any:
    if isinstance(batch, list):
        batch = tuple(batch)
    return batch if isinstance(batch, tuple) else (batch,)
