# SPDX-License-Identifier: Apache-2.0
"""What a store is, and several as one."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

_BLOCK_BYTES = 4 << 20  # a few blocks of the node's cache, so that few of those lie in two blocks of an order


class Store(abc.ABC):
    """Samples in a file, read in ranges.

    Attributes:
        path: of the file.
        spec: what a sample is: of each field its shape and dtype; of records nothing.
        block: so many neighbouring samples are read together best.
    """

    path: str
    spec: dict[str, tuple[tuple[int, ...], str]]
    block: int = 1

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`: a dictionary of arrays with as many rows, or a list of records."""

    def touch(self, start: int, stop: int) -> None:  # noqa: B027 - a store need not
        """Bring samples near that are read soon: into the node's cache, or into memory. It may do nothing."""


class Concatenated(Store):
    """Several stores, one behind the other.

    Args:
        stores: those, with the same fields.

    Raises:
        ValueError: their samples differ.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = list(stores)
        self.path, self.spec = self.stores[0].path, self.stores[0].spec
        for store in self.stores:
            if store.spec != self.spec:
                raise ValueError(
                    f"The files' samples differ. Expected {self.spec}, as in {self.path}. "
                    f"Received: {store.spec} in {store.path}"
                )
        self.block = max(store.block for store in self.stores)
        self._starts = np.concatenate([[0], np.cumsum([len(store) for store in self.stores])])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        parts = [store.read(*inside) for store, inside in self._parts(start, stop)]
        return join(parts) if parts else self.stores[0].read(0, 0)

    def touch(self, start: int, stop: int) -> None:
        """Bring samples near; see `Store`."""
        for store, inside in self._parts(start, stop):
            store.touch(*inside)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Store, tuple[int, int]]]:
        """Yield the stores that have samples `start` to `stop`, and which of their own."""
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        for store, begin in zip(self.stores[first:], self._starts[first:], strict=False):
            inside = max(start - int(begin), 0), min(stop - int(begin), len(store))
            if inside[0] < inside[1]:
                yield store, inside
            if begin + len(store) >= stop:
                break


def join(parts: Sequence[Any]) -> Any:
    """Return ranges of samples as one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], dict):
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return [record for part in parts for record in part]


def pick(
    available: dict[str, tuple[tuple[int, ...], str]],
    fields: Sequence[str] | None,
    path: str,
    others: Iterable[str] = (),
) -> list[str]:
    """Return the names of the fields to read, once it is clear that they are samples.

    Args:
        available: of each array in the file its whole shape and dtype.
        fields: those that are wanted; None: all.
        path: of the file, for messages.
        others: names of what else the file holds, for messages.

    Raises:
        ValueError: some are not there, or they have different numbers of rows.
    """
    names = sorted(available) if fields is None else list(fields)
    if missing := [name for name in names if name not in available]:
        known = sorted({*available, *others})
        raise ValueError(f"{path} has no {missing}. Expected fields among {known}. Received: {names}")
    if not names or any(not available[name][0] for name in names) or len({available[n][0][0] for n in names}) > 1:
        raise ValueError(
            f"{path} holds no samples. Expected arrays with equally many rows; `fields` chooses some. "
            f"Received: { {name: available[name][0] for name in names} }"
        )
    return names


def best_block(spec: dict[str, tuple[tuple[int, ...], str]]) -> int:
    """Return so many samples as make a block."""
    return max(1, _BLOCK_BYTES // max(1, sample_bytes(spec)))


def record_block(nbytes: int, count: int) -> int:
    """The same of records, which have `nbytes` together."""
    return max(1, _BLOCK_BYTES * count // max(1, int(nbytes)))


def sample_bytes(spec: dict[str, tuple[tuple[int, ...], str]]) -> int:
    """Return the bytes of a sample."""
    return sum(int(np.prod(shape)) * _itemsize(dtype) for shape, dtype in spec.values())


def _itemsize(dtype: str) -> int:
    """Return the bytes of a value. A text of any length has a dtype of its own, whose name NumPy does not know."""
    return 16 if dtype.startswith("StringDType") else int(np.dtype(dtype).itemsize)
