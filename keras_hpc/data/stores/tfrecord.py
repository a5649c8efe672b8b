# SPDX-License-Identifier: Apache-2.0
"""TFRecord files: each record is its length, a checksum of that, the record, a checksum of it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from keras_hpc.data.files import open_file
from keras_hpc.data.stores.base import Store

_LENGTH = struct.Struct("<Q4x")
_CHECKSUM_BYTES = 4


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
                (length,) = _LENGTH.unpack(head)
            if position + _LENGTH.size > size or position + _LENGTH.size + length + _CHECKSUM_BYTES > size:
                raise ValueError(
                    f"{path} cannot be read. Expected whole records, uncompressed. "
                    f"Received: a record at byte {position} of {size} that does not end in the file"
                )
            self._records.append((position + _LENGTH.size, length))
            position += _LENGTH.size + length + _CHECKSUM_BYTES

    def __len__(self) -> int:
        return len(self._records)

    def read(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`; see `Store`."""
        return [self._bytes(*record) for record in self._records[start:stop]]

    def _bytes(self, offset: int, size: int) -> bytes:
        content = bytearray(size)
        self._file.read_at(offset, memoryview(content))
        return bytes(content)
