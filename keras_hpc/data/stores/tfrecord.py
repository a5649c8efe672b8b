# SPDX-License-Identifier: Apache-2.0
"""TFRecord files: each record is its length, a checksum of that, the record, a checksum of it.

Checksums of lengths are always looked at, those of records where google_crc32c is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from keras_hpc.data.files import open_file
from keras_hpc.data.stores import crc32c
from keras_hpc.data.stores.base import Store

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
        self._records: list[tuple[int, int]] = []
        position, size = 0, self._file.source.size
        head = bytearray(_LENGTH.size)
        while position < size:
            if position + _LENGTH.size <= size:
                self._file.read_at(position, memoryview(head))
                length, checksum = _LENGTH.unpack(head)
            if position + _LENGTH.size > size or position + _LENGTH.size + length + _CHECKSUM.size > size:
                raise ValueError(
                    f"{path} cannot be read. Expected whole records, uncompressed. "
                    f"Received: a record at byte {position} of {size} that does not end in the file"
                )
            if crc32c.masked(bytes(head[:8])) != checksum:
                raise ValueError(
                    f"{path} is damaged. Expected the length of a record at byte {position} and its checksum. "
                    f"Received: {length} and {checksum:#010x}, which is another length's"
                )
            self._records.append((position + _LENGTH.size, length))
            position += _LENGTH.size + length + _CHECKSUM.size

    def __len__(self) -> int:
        return len(self._records)

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        return [self._bytes(*record) for record in self._records[start:stop]]

    def _bytes(self, offset: int, size: int) -> bytes:
        content = bytearray(size + _CHECKSUM.size)
        self._file.read_at(offset, memoryview(content))
        record = bytes(memoryview(content)[:size])
        if crc32c.is_fast():
            (expected,) = _CHECKSUM.unpack_from(content, size)
            if (received := crc32c.masked(record)) != expected:
                raise ValueError(
                    f"{self.path} is damaged. Expected a record with checksum {expected:#010x} at byte {offset}. "
                    f"Received: one with {received:#010x}"
                )
        return record
