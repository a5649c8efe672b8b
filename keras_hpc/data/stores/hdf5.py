# SPDX-License-Identifier: Apache-2.0
"""HDF5, by h5py."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from keras_hpc.data.files import open_file
from keras_hpc.data.stores.base import Store, best_block, pick


class HDF5Store(Store):
    """Rows of the data sets of an HDF5 file."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ImportError(f"HDF5 files are read by h5py: pip install h5py. Needed for {path}") from error
        self.path = path
        try:
            self._file = h5py.File(open_file(path), "r")
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ValueError(f"{path} cannot be read. Expected an HDF5 file. Received: {error}") from error
        available: dict[str, tuple[tuple[int, ...], str]] = {}

        def note(name: str, item: Any) -> None:
            # What lies in another file is read past `open_file`.
            if isinstance(item, h5py.Dataset) and item.shape is not None and item.file == self._file:
                available[name] = item.shape, item.dtype.str

        self._file.visititems(note)
        for name in {*(fields or ())} - {*available}:  # as a link, or with a slash in front
            note(name, self._file.get(name))
        names = pick(available, fields, path)
        self.spec = {name: (available[name][0][1:], available[name][1]) for name in names}
        self._count = available[names[0]][0][0]
        chunks = [self._file[name].chunks for name in names]
        self.block = max([best_block(self.spec), *(chunk[0] for chunk in chunks if chunk)])
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        with self._lock:  # one file object, which has a position
            return {name: self._file[name][start:stop] for name in self.spec}
