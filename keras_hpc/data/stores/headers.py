# SPDX-License-Identifier: Apache-2.0
"""Reads the headers in a file that lie between its contents, without reading the contents if they are large."""

from __future__ import annotations

from typing import Any

_FAR = 8 << 10
_LARGEST = 64 << 10


class Headers:
    """A file object that goes through a file once, as tarfile takes it.

    What is near to what was read last comes in pieces that grow. What is far comes alone, and small pieces come past
    the node's cache, which keeps large blocks: otherwise opening a store would read all of it.

    Args:
        file: what `open_file` returns.
    """

    def __init__(self, file: Any) -> None:
        self._file, self._size = file, file.source.size
        self._begin, self._piece, self._position = 0, b"", 0

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, position: int) -> int:
        """Take a position, from the beginning of the file."""
        self._position = position
        return position

    def read(self, nbytes: int) -> bytes:
        """Return so many bytes, or fewer at the end of the file."""
        begin = self._position
        nbytes = max(0, min(nbytes, self._size - begin))
        end = self._begin + len(self._piece)
        if not self._begin <= begin <= begin + nbytes <= end:
            near = begin - end < _FAR
            wanted = max(nbytes, min(2 * len(self._piece), _LARGEST)) if near else nbytes
            piece = bytearray(min(wanted, self._size - begin))
            self._file.read_at(begin, memoryview(piece), keep=near and len(piece) > _FAR)
            self._begin, self._piece = begin, bytes(piece)
        self._position += nbytes
        return self._piece[begin - self._begin : begin - self._begin + nbytes]
