# SPDX-License-Identifier: Apache-2.0
"""`Dataset`: batches of a store for `fit`, `evaluate` and `predict`, read ahead by threads."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.data.ahead import Ahead
from keras_hpc.data.order import Order, Shuffle
from keras_hpc.data.stores import Store, chunks, open_store
from keras_hpc.data.stores.base import join, sample_bytes


class Dataset(keras.utils.PyDataset):  # type: ignore[misc]
    """Samples of files in batches, each sample once an epoch by all ranks together.

    An epoch's order is the same on all ranks, depends only on `seed` and the number of the epoch, and is cut into
    batches; `fit` deals them to the ranks, or cuts each among them with `init(batch="global")`, and a rank reads only
    its own samples. The last batch is as short as it is. A job that is resumed by `callbacks.Checkpoint` goes on at the
    same sample.

    Args:
        source: a store, or what `open_store` takes: paths of `.h5`, `.npy`, `.npz`, `.tar`, `.tfrecord` or `.zarr`.
        batch_size: samples of a batch: of one rank's, or of all ranks' with `init(batch="global")`.
        fields: names of data sets or arrays, in the order in which the model takes them, such as `("x", "y")`.
        decode: makes a batch of what the store has read: of a dictionary of arrays, or of a list of records. It runs in
            the threads that read ahead. None: a tuple of the arrays of `fields`; records need one.
        shuffle: "blocks": blocks of neighbouring samples come in random order, and the samples of `mixed` blocks at a
            time are mixed. "all": all samples are drawn one by one; for data that are in memory or on fast disks.
            False: the order of the files.
        seed: of the order; the same on all ranks.
        samples: `(start, stop)`: only these of the store, for a split into training and validation.
        block: samples of a block. None: as the file is stored, about 4 MiB.
        mixed: blocks whose samples are mixed.
        readers: threads that read ahead, at least 2; after `keras_hpc.init()`, also on one rank.
        ahead: batches that they may be ahead.

    Raises:
        ValueError: an argument is not as described.

    Example:
        train = keras_hpc.data.Dataset("train-*.h5", batch_size=32, fields=("image", "label"))
        model.fit(train, epochs=3)
    """

    def __init__(
        self,
        source: Store | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        batch_size: int,
        *,
        fields: Sequence[str] | None = None,
        decode: Callable[[Any], Any] | None = None,
        shuffle: Shuffle = "blocks",
        seed: int = 0,
        samples: tuple[int, int] | None = None,
        block: int | None = None,
        mixed: int = 8,
        readers: int = 2,
        ahead: int = 4,
    ) -> None:
        numbers = {"batch_size": (batch_size, 1), "mixed": (mixed, 1), "readers": (readers, 2), "ahead": (ahead, 1)}
        numbers |= {"seed": (seed, 0), "block": (1 if block is None else block, 1)}
        for name, (value, least) in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise ValueError(f"`{name}` is a number. Expected an integer >= {least}. Received: {name}={value!r}")
        if shuffle is not False and shuffle not in ("blocks", "all"):
            raise ValueError(f"Expected shuffle to be 'blocks', 'all' or False. Received: shuffle={shuffle!r}")
        # Keras' own threads would read the first batches of an epoch in the order of the epoch before.
        super().__init__(workers=1, use_multiprocessing=False)
        self.readers, self.ahead = readers, ahead
        self.store = source if isinstance(source, Store) else open_store(source, fields)
        if not len(self.store):
            raise ValueError(f"There are no samples to read. Expected at least one. Received: 0 in {self.store.path}")
        self.first, stop = samples or (0, len(self.store))
        if not 0 <= self.first < stop <= len(self.store):
            raise ValueError(
                f"`samples` are those of the store that are wanted. Expected 0 <= start < stop <= {len(self.store)}. "
                f"Received: samples={samples!r}"
            )
        if not self.store.spec and decode is None:
            raise ValueError(
                f"Records need `decode`, a function that makes a batch of a list of them. Received: {self.store.path} "
                "without it"
            )
        raw = [name for name, (_, dtype) in self.store.spec.items() if dtype.lstrip("|<>=").startswith("V")]
        if raw and decode is None:
            raise ValueError(
                f"Values of {raw[0]!r} in {self.store.path} are no numbers, but bytes or fields of their own. Expected "
                "numbers, or `decode`, which makes them: NumPy saves bfloat16 so, and `.view(ml_dtypes.bfloat16)` is "
                f"what it was. Received: dtype {self.store.spec[raw[0]][1]}"
            )
        self.batch_size, self.decode = batch_size, decode
        self._order = Order(stop - self.first, shuffle, block or self.store.block, mixed, seed, epoch=0)
        self._has_ended = False
        self._ahead: Ahead | None = None
        self._names = list(self.store.spec)
        # The window that is read now, and the next one.
        chunks.make_room(2 * mixed * self._order.block * sample_bytes(self.store.spec))

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return -(-self._order.samples // self.batch_size)

    def __getitem__(self, number: int) -> Any:
        """Return a batch of the epoch."""
        if not 0 <= number < len(self):
            raise IndexError(f"Expected a batch from 0 to {len(self) - 1}. Received: {number}")
        if number == 0:
            self.begin_pass()
        return self.rows(number, 0, self.count(number))

    def count(self, number: int) -> int:
        """Return how many samples a batch has."""
        return min(self.batch_size, self._order.samples - number * self.batch_size)

    def rows(self, number: int, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` of a batch. keras_hpc calls it where ranks share a batch."""
        begin = number * self.batch_size
        if self._ahead is not None:
            self._ahead.at(begin)
        return self._decoded(self._order.at(begin + start, begin + stop) + self.first)

    def of_epoch(self, epoch: int) -> Dataset:
        """Return the same in the order of an epoch, whatever this one's is. keras_hpc reads each pass from one."""
        other = copy.copy(self)
        other.set_epoch(epoch)
        return other

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self._has_ended = False
        self._order = dataclasses.replace(self._order, epoch=epoch)

    def on_epoch_end(self) -> None:
        """Let the next pass have the order of the next epoch. Keras calls it, with `steps_per_epoch` amid a pass."""
        self._has_ended = True

    def begin_pass(self) -> None:
        """Take the order of the next epoch, if one has ended. Whoever reads the first batch of a pass does it."""
        if self._has_ended:
            self.set_epoch(self._order.epoch + 1)

    @contextlib.contextmanager
    def read_ahead(self) -> Iterator[None]:
        """Bring near what this pass reads next, meanwhile. keras_hpc does so in each pass."""
        self._ahead = Ahead(self.store, self._order, self.first)
        try:
            with self._ahead.running():
                yield
        finally:
            self._ahead = None

    def _decoded(self, samples: np.ndarray) -> Any:
        found = self._read(samples)
        if self.decode is not None:
            return self.decode(found)
        arrays = tuple(found[name] for name in self._names)
        return arrays if len(arrays) > 1 else arrays[0]

    def _read(self, samples: np.ndarray) -> Any:
        """Read samples in the order of the file, neighbours together, and return them in the order that was asked."""
        if not len(samples):
            return self.store.read(0, 0)
        places = np.argsort(samples)
        found = samples[places]
        runs = np.split(found, np.flatnonzero(np.diff(found) != 1) + 1)
        read = join([self.store.read(int(run[0]), int(run[-1]) + 1) for run in runs])
        back = np.empty_like(places)
        back[places] = np.arange(len(places))
        if isinstance(read, dict):
            return {name: _native(array[back]) for name, array in read.items()}
        return [read[place] for place in back]


def _native(array: np.ndarray) -> np.ndarray:
    """Return an array in this machine's order of bytes, which frameworks want."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
