# SPDX-License-Identifier: Apache-2.0
"""TFRecord files: each record is its length, a checksum of that, the record, a checksum of it.

Checksums of lengths are always looked at, those of records where google_crc32c is installed.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc.data.files import open_file
from keras_hpc.data.stores import crc32c
from keras_hpc.data.stores.base import Store, record_block
from keras_hpc.data.stores.headers import Headers

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


class TFRecordStore(Store):
    """Records of a TFRecord file, as bytes; `tf.io.parse_example` in `decode` makes tensors of a batch of them."""

    def __init__(self, path: str, fields: Sequence[str] | None = None) -> None:
        if fields is not None:
            raise ValueError(
                f"Records of {path} are bytes: `decode` chooses among their features. Received: fields={fields}"
            )
        self.path, self.spec = path, {}
        self._file = open_file(path)
        ends = array("q")  # of each record, with its checksum
        position, size = 0, self._file.source.size
        headers = Headers(self._file)
        while position < size:
            headers.seek(position)
            head = headers.read(_LENGTH.size)
            length, checksum = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (size, 0)
            if position + _LENGTH.size + length + _CHECKSUM.size > size:
                raise ValueError(
                    f"{path} cannot be read. Expected whole records, uncompressed. "
                    f"Received: a record at byte {position} of {size} that does not end in the file"
                )
            if crc32c.masked(head[:8]) != checksum:
                raise ValueError(
                    f"{path} is damaged. Expected the length of a record at byte {position} and its checksum. "
                    f"Received: {length} and {checksum:#010x}, which is another length's"
                )
            position += _LENGTH.size + length + _CHECKSUM.size
            ends.append(position)
        self._bounds = np.concatenate([[0], np.frombuffer(ends, np.int64)])
        self.block = record_block(size, len(self))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        bounds = self._bounds[start : stop + 1].tolist()
        content = memoryview(bytearray(bounds[-1] - bounds[0]))
        self._file.read_at(bounds[0], content)
        return [
            self._record(content[begin - bounds[0] : end - bounds[0]], begin)
            for begin, end in itertools.pairwise(bounds)
        ]

    def touch(self, start: int, stop: int) -> None:
        """Bring samples near; see `Store`."""
        begin, end = self._bounds[start], self._bounds[stop]
        self._file.touch(int(begin), int(end - begin))

    def _record(self, content: memoryview, offset: int) -> bytes:
        """Return a record without what is around it."""
        record = bytes(content[_LENGTH.size : -_CHECKSUM.size])
        if crc32c.is_fast():
            (expected,) = _CHECKSUM.unpack(content[-_CHECKSUM.size :])
            if (received := crc32c.masked(record)) != expected:
                raise ValueError(
                    f"{self.path} is damaged. Expected a record with checksum {expected:#010x} at byte {offset}. "
                    f"Received: one with {received:#010x}"
                )
        return record
