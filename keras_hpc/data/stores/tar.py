# SPDX-License-Identifier: Apache-2.0
"""WebDataset's tar files, by tarfile."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from typing import Any

from keras_hpc.data.files import open_file
from keras_hpc.data.stores.base import Store


class TarStore(Store):
    """Samples of a tar file: neighbouring members with the same name up to the first dot behind the last slash."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        self.path, self.spec = path, {}
        self._file = open_file(path)
        self._samples: list[dict[str, tuple[int, int]]] = []
        last = None
        try:
            with tarfile.open(fileobj=io.BufferedReader(self._file, 1 << 16), mode="r:") as archive:
                for member in archive:
                    if not member.isfile():
                        continue
                    folder, slash, name = member.name.rpartition("/")
                    stem, _, extension = name.partition(".")
                    if folder + slash + stem != last:
                        self._samples.append({})
                        last = folder + slash + stem
                    self._samples[-1][extension] = member.offset_data, member.size
                self._check_end(archive.offset)
        except tarfile.TarError as error:
            raise ValueError(f"{path} cannot be read. Expected a tar file, uncompressed. Received: {error}") from error
        self._file = open_file(path)  # tarfile closes the other
        for number, sample in enumerate(self._samples):
            if missing := set(fields or ()) - set(sample):
                raise ValueError(
                    f"Sample {number} of {path} has no {sorted(missing)}. Expected {list(fields or ())}. "
                    f"Received: {sorted(sample)}"
                )
        self._fields = fields

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        return [
            {name: self._bytes(*sample[name]) for name in self._fields or sample}
            for sample in self._samples[start:stop]
        ]

    def _check_end(self, offset: int) -> None:
        """Raise ValueError unless the archive ends where tarfile stopped: it takes a damaged header for the end.

        So it takes the end of a file, where one was cut off between two members.
        """
        rest = bytearray(min(tarfile.BLOCKSIZE, self._file.source.size - offset))
        self._file.read_at(offset, memoryview(rest))
        if not rest:
            raise ValueError(
                f"{self.path} is cut off. Expected an empty block at the end, as tar files have. "
                f"Received: {self._file.source.size:,} bytes that end with a member"
            )
        if any(rest):
            raise ValueError(
                f"{self.path} is damaged. Expected the header of a file, or the end, at byte {offset}. "
                "Received: a header with another checksum"
            )

    def _bytes(self, offset: int, size: int) -> bytes:
        content = bytearray(size)
        self._file.read_at(offset, memoryview(content))
        return bytes(content)
