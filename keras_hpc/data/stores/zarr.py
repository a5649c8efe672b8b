# SPDX-License-Identifier: Apache-2.0
"""Zarr, by the library of that name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from keras_hpc.data.files import Source, open_source
from keras_hpc.data.stores.base import Store, best_block, pick, sample_bytes
from keras_hpc.data.stores.chunks import Chunks


class ZarrStore(Store):
    """Rows of the arrays in a folder of Zarr's format 2 or 3."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        try:
            import zarr
        except ImportError as error:
            raise ImportError(f"Zarr's folders are read by zarr: pip install zarr. Needed for {path}") from error
        self.path = path
        try:
            opened = zarr.open(store=_folder(path), mode="r")
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise ValueError(f"{path} cannot be read. Expected a folder of Zarr. Received: {error}") from error
        if isinstance(opened, zarr.Array):
            arrays: dict[str, Any] = {"array" if fields is None else fields[0]: opened}
        elif fields is None:
            arrays = dict(opened.arrays())
        else:
            found = {name: opened[name] for name in fields if name in opened}
            arrays = {name: array for name, array in found.items() if isinstance(array, zarr.Array)}
        available = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
        names = pick(available, fields, path, () if isinstance(opened, zarr.Array) else opened.array_keys())
        self.spec = {name: (available[name][0][1:], available[name][1]) for name in names}
        self._count: int = available[names[0]][0][0]
        self.block = max([best_block(self.spec), *(arrays[name].chunks[0] for name in names)])
        self._arrays = {name: self._rows_of(name, arrays[name]) for name in names}

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        return {name: array.read(start, stop) for name, array in self._arrays.items()}

    def touch(self, start: int, stop: int) -> None:
        """Bring samples near; see `Store`."""
        for array in self._arrays.values():
            array.touch(start, stop)

    def _rows_of(self, name: str, array: Any) -> Chunks:
        rows = array.chunks[0]
        nbytes = rows * sample_bytes({name: self.spec[name]})
        return Chunks(lambda start, stop: array[start:stop], self._count, rows, nbytes)


def _folder(path: str) -> Any:
    """Return a store of zarr's that reads the files of a folder by `open_file`.

    A chunk that has no file counts as empty in Zarr. So what is there is noted now: a file that vanishes is an error.
    """
    from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
    from zarr.storage import LocalStore

    known: dict[str, Source] = {}
    for folder, _, names in os.walk(path, followlinks=True):  # a chunk that is not seen counts as empty
        for name in names:
            whole = os.path.join(folder, name)
            known[os.path.relpath(whole, path)] = Source.of(whole)

    def read(source: Source, request: ByteRequest | None) -> bytes:
        start, stop = 0, source.size
        if isinstance(request, RangeByteRequest):
            start, stop = request.start, min(stop, request.end)
        elif isinstance(request, OffsetByteRequest):
            start = request.offset
        elif isinstance(request, SuffixByteRequest):
            start = max(0, stop - request.suffix)
        content = bytearray(stop - start)
        open_source(source).read_at(start, memoryview(content))
        return bytes(content)

    class Folder(LocalStore):  # type: ignore[misc, unused-ignore]
        async def get(
            self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
        ) -> Buffer | None:
            if key not in known:
                return None
            content = await asyncio.to_thread(read, known[key], byte_range)
            return (prototype or default_buffer_prototype()).buffer.from_bytes(content)

        async def get_partial_values(self, prototype: BufferPrototype, key_ranges: Any) -> list[Buffer | None]:
            return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    return Folder(path, read_only=True)
