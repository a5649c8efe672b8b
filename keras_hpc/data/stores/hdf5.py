# SPDX-License-Identifier: Apache-2.0
"""HDF5, by h5py."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from keras_hpc.data.files import open_file
from keras_hpc.data.stores.base import Store, best_block, pick, sample_bytes
from keras_hpc.data.stores.chunks import Chunks


class HDF5Store(Store):
    """Rows of the data sets of an HDF5 file."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ImportError(f"HDF5 files are read by h5py: pip install h5py. Needed for {path}") from error
        self.path = path
        try:
            self._source = open_file(path)
            self._file = h5py.File(self._source, "r")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ValueError(f"{path} cannot be read. Expected an HDF5 file. Received: {error}") from error
        available: dict[str, tuple[tuple[int, ...], str]] = {}

        elsewhere: set[str] = set()

        def note(name: str, item: Any) -> None:
            if not isinstance(item, h5py.Dataset) or item.shape is None:
                return
            if item.external or _is_of_other_files(item):
                elsewhere.add(name)
            else:
                available[name] = item.shape, item.dtype.str

        self._file.visititems(note)
        for name in {*(fields or ())} - {*available}:  # as a link, or with a slash in front
            if isinstance(self._file.get(name, getlink=True), h5py.ExternalLink):
                elsewhere.add(name)
            else:
                note(name, self._file.get(name))
        if found := sorted(elsewhere if fields is None else elsewhere & {*fields}):
            # HDF5 would read past `open_file`, or look for the other file in this one and find zeros.
            raise ValueError(
                f"Rows of {found} in {path} lie in other files. Expected data sets in the file itself; open the other "
                "files, or choose by `fields`. Received: virtual data sets, external storage or links"
            )
        names = pick(available, fields, path)
        self.spec = {name: (available[name][0][1:], available[name][1]) for name in names}
        self._count = available[names[0]][0][0]
        self._lock = threading.Lock()
        self._arrays = {name: self._rows_of(name) for name in names}
        self._offsets = {name: self._file[name].id.get_offset() for name in names}  # None: in chunks
        chunks = [self._file[name].chunks for name in names]
        self.block = max([best_block(self.spec), *(chunk[0] for chunk in chunks if chunk)])

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        return {name: array.read(start, stop) for name, array in self._arrays.items()}

    def touch(self, start: int, stop: int) -> None:
        """Bring samples near; see `Store`."""
        for name, array in self._arrays.items():
            array.touch(start, stop)
            if (offset := self._offsets[name]) is not None:
                nbytes = sample_bytes({name: self.spec[name]})
                self._source.touch(offset + start * nbytes, (stop - start) * nbytes)

    def _rows_of(self, name: str) -> Chunks:
        def read(start: int, stop: int) -> Any:
            with self._lock:  # one file object, which has a position
                return self._file[name][start:stop]

        rows = (self._file[name].chunks or (1,))[0]
        return Chunks(read, self._count, rows, rows * sample_bytes({name: self.spec[name]}))


def _is_of_other_files(item: Any) -> bool:
    """Return whether a virtual data set shows what lies in other files. "." is its own."""
    return item.is_virtual and any(source.file_name != "." for source in item.virtual_sources())
