# SPDX-License-Identifier: Apache-2.0
"""NumPy's own files."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc.data.files import open_file
from keras_hpc.data.stores.base import Store, best_block, pick

_LOCAL_HEADER = struct.Struct("<26x2H")  # of a zip file's member: lengths of its name and of what follows


@dataclasses.dataclass(frozen=True)
class _Rows:
    """An array in a file, of which rows are read."""

    file: Any
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if rows.nbytes:
            step = rows.nbytes // len(rows)
            self.file.read_at(self.offset + start * step, rows.reshape(-1).view(np.uint8).data)
        return rows

    def touch(self, start: int, stop: int) -> None:
        step = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.file.touch(self.offset + start * step, (stop - start) * step)


@dataclasses.dataclass(frozen=True)
class _Loaded:
    """An array in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.array[start:stop]

    def touch(self, start: int, stop: int) -> None:
        pass


class _ArrayStore(Store):
    def __init__(
        self, path: str, arrays: dict[str, Any], fields: Sequence[str] | None, others: Sequence[str] = ()
    ) -> None:
        self.path = path
        available = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
        names = pick(available, fields, path, others)
        self._arrays = {name: arrays[name] for name in names}
        self.spec = {name: (available[name][0][1:], available[name][1]) for name in names}
        self._count: int = available[names[0]][0][0]
        self.block = best_block(self.spec)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        return {name: array.read(start, stop) for name, array in self._arrays.items()}

    def touch(self, start: int, stop: int) -> None:
        """Bring samples near; see `Store`."""
        for array in self._arrays.values():
            array.touch(start, stop)


class NpyStore(_ArrayStore):
    """Rows of the array of a `.npy` file, under the name of the file."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        name = os.path.splitext(os.path.basename(path))[0]
        super().__init__(
            path, {"array" if fields is None else fields[0]: _header(open_file(path), 0, path, name)}, fields
        )


class NpzStore(_ArrayStore):
    """Rows of the arrays of a `.npz` file."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        file = open_file(path)
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path} cannot be read. Expected a file of numpy.savez. Received: {error}") from error
        arrays: dict[str, Any] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if fields is not None and name not in fields:
                continue
            if member.compress_type == zipfile.ZIP_STORED:
                header = bytearray(_LOCAL_HEADER.size)
                file.read_at(member.header_offset, memoryview(header))
                offset = member.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
                arrays[name] = _header(file, offset, path, name)
            else:
                arrays[name] = _loaded(archive, member, path, name)
        names = [member.filename.removesuffix(".npy") for member in archive.infolist()]
        super().__init__(path, arrays, fields, names)


def _loaded(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: str, name: str) -> _Loaded:
    """Return an array that is compressed."""
    try:
        return _Loaded(np.load(io.BytesIO(archive.read(member)), allow_pickle=False))
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{name} in {path} cannot be read. Expected an array of numbers in NumPy's format. Received: {error}"
        ) from error


def _header(file: Any, offset: int, path: str, name: str) -> _Rows:
    """Return the array whose `.npy` format begins at `offset`."""
    file.seek(offset)
    buffered = io.BufferedReader(file, 4096)
    try:
        version = np.lib.format.read_magic(buffered)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(buffered)
    except ValueError as error:
        raise ValueError(f"{name} in {path} cannot be read. Expected NumPy's format. Received: {error}") from error
    finally:
        begin = buffered.tell()
        buffered.detach()
    if dtype.hasobject or (fortran and len(shape) > 1):
        raise ValueError(
            f"Rows of {name} in {path} do not lie together. Expected an array of numbers in C order "
            f"(numpy.ascontiguousarray). Received: {'objects' if dtype.hasobject else 'Fortran order'}"
        )
    end = begin + math.prod(shape) * dtype.itemsize
    if end > file.source.size:
        raise ValueError(
            f"{path} is cut off. Expected {end:,} bytes, to the end of {name}. Received: {file.source.size:,}"
        )
    return _Rows(file, begin, shape, dtype)
