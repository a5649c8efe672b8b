# SPDX-License-Identifier: Apache-2.0
"""Python generators and Grain: every rank reads the whole stream of batches and keeps its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data import rows
from keras_hpc.keras_hooks.data.arrays import digest
from keras_hpc.keras_hooks.data.partition import Shard, deal

_KerasAdapter = keras_private.adapter("generator_data_adapter:GeneratorDataAdapter")


class _Batches:
    """This rank's batches of a stream. A generator is read once; of what can be read again, each pass begins anew.

    Args:
        shard: where this rank stands.
        source: what yields the batches of all ranks.
    """

    def __init__(self, shard: Shard, source: Iterable[Any]) -> None:
        self._shard = shard
        self._source = source
        self._pass = self._begin()
        self.first = next(self._pass)
        self._pass = itertools.chain([self.first], self._pass)
        self._is_fresh = True

    def _begin(self) -> Iterator[Any]:
        return iter(self._source)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_fresh and iter(self._source) is not self._source:
            self._pass = self._begin()
        self._is_fresh = False
        if self._shard.batch == "local":
            return deal(self._pass, rows.empty_like, self._shard)
        return (rows.mine(batch, self._shard) for batch in self._pass)


class ShardedStream(_KerasAdapter):  # type: ignore[misc, valid-type]
    """This rank's part of a Python generator, or of another stream of batches that can be iterated over."""

    shuffle = False
    may_be_empty = True

    def __init__(self, shard: Shard, source: Iterable[Any], kind: str) -> None:
        try:
            batches = _Batches(shard, map(_as_tuple, source) if iter(source) is source else _Tuples(source))
        except StopIteration:
            raise ValueError(f"Cannot share out an empty data set. Received: {source}") from None
        self._batches = batches
        self._shard = shard
        # Keras looks at the first batch; ours is whole, so it knows shapes on ranks that would begin with none.
        super().__init__(iter([batches.first]))
        self.step_size = shard.steps_apart
        self.fingerprint = [kind]

    @property
    def summary(self) -> str:
        """What was decided, in a few words."""
        how = "dealt to ranks one by one" if self._shard.batch == "local" else "each cut among the ranks"
        return f"{self.fingerprint[0]}, every rank reads all batches, {how}"

    def content(self) -> str:
        """Returns a digest of the first batch, to find out whether ranks hold the same data."""
        return digest(self._batches.first)

    def _passes(self, convert: Callable[[], Any]) -> Any:
        self.generator = iter(self._batches)
        return convert()

    def get_numpy_iterator(self) -> Any:
        """One pass over this rank's batches."""
        return self._passes(super().get_numpy_iterator)

    def get_jax_iterator(self) -> Any:
        """One pass over this rank's batches."""
        return self._passes(super().get_jax_iterator)

    def get_tf_dataset(self) -> Any:
        """This rank's batches as a pipeline; each of its iterators makes a pass."""
        import tensorflow as tf

        spec = tf.nest.map_structure(_spec, self._batches.first)
        return tf.data.Dataset.from_generator(lambda: iter(self._batches), output_signature=spec)

    def get_torch_dataloader(self) -> Any:
        """One pass over this rank's batches."""
        return self._passes(super().get_torch_dataloader)


class _Tuples:
    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return map(_as_tuple, self._source)


def _as_tuple(batch: Any) -> Any:
    if isinstance(batch, list):
        batch = tuple(batch)
    return batch if isinstance(batch, tuple) else (batch,)


def _spec(array: Any) -> Any:
    import tensorflow as tf

    shape = [None, *array.shape[1:]]
    return tf.TensorSpec(shape, tf.as_dtype(str(array.dtype).removeprefix("torch.").replace("<U", "string")))
