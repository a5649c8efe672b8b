# SPDX-License-Identifier: Apache-2.0
"""Files that are read in ranges, from the node's cache if there is one."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from typing import Any, Protocol


class Reader(Protocol):
    """What keeps the bytes of files, such as `cache.Cache`."""

    def read_into(self, source: Source, offset: int, view: memoryview, keep: bool = True) -> None:
        """Fill `view` with the bytes of the file from `offset` on, and keep them or not."""

    def touch(self, source: Source, offset: int, nbytes: int) -> None:
        """Keep bytes that are read soon, as far as there is room."""


_reader: Reader | None = None
_counting = threading.Lock()
_read_bytes = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """A file where all ranks can read it.

    Attributes:
        path: absolute.
        size: bytes.
        changed: when it was written last, in ns.
    """

    path: str
    size: int
    changed: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Source:
        """Return a file as it is now.

        Raises:
            OSError: it cannot be seen; names it.
        """
        whole = os.path.abspath(path)
        found = os.stat(whole)
        return cls(whole, found.st_size, found.st_mtime_ns)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from the file itself, and count it.

        Raises:
            OSError: the file is gone or cannot be read, or is not what it was; names it.
        """
        global _read_bytes
        with open(self.path, "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if (found.st_size, found.st_mtime_ns) != (self.size, self.changed):
                raise OSError(
                    f"{self.path} has changed while the job reads it. Expected {self.size} bytes as they were at its "
                    f"beginning. Received: {found.st_size} bytes, written later"
                )
            file.seek(offset)
            done = 0
            while done < len(view):
                try:
                    got = file.readinto(view[done:])
                except OSError as error:
                    raise OSError(error.errno, error.strerror, self.path) from error
                if not got:
                    raise OSError(f"{self.path} ends at byte {offset + done}. Expected {self.size} bytes")
                done += got
        with _counting:
            _read_bytes += done


def read_bytes() -> int:
    """Return how many bytes this process has read from sources."""
    return _read_bytes


def use(reader: Reader | None) -> None:
    """Read through `reader` from now on; None: from the sources."""
    global _reader
    _reader = reader


def reader() -> Reader | None:
    """Return what files are read through; None: nothing."""
    return _reader


class _File(io.RawIOBase):
    """A file for reading, at any position, as libraries for formats take it."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.name = source.path
        self.mode = "rb"
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.source.size}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self.source.size - self._position))]
        if len(view):
            self.read_at(self._position, view)
            self._position += len(view)
        return len(view)

    def read_at(self, offset: int, view: memoryview, keep: bool = True) -> None:
        """Fill `view` with the bytes from `offset` on, wherever the file stands. Threads may do so at once.

        With `keep=False` the node's cache does not keep what it has not.
        """
        if _reader is None:
            self.source.read_into(offset, view)
        else:
            _reader.read_into(self.source, offset, view, keep)

    def touch(self, offset: int, nbytes: int) -> None:
        """Bring bytes into the node's cache, if there is one, as far as it has room."""
        if _reader is not None:
            _reader.touch(self.source, offset, nbytes)


def open_file(path: str | os.PathLike[str]) -> _File:
    """Open a file for reading that is read through the node's cache after `stage`, else as it is.

    Whatever reads Python's file objects can read it: `h5py.File(open_file("a.h5"))`, `tarfile.open(fileobj=...)`.

    Args:
        path: of the file, which must not change while the job runs.

    Returns:
        An unbuffered binary file object.

    Raises:
        OSError: it cannot be seen; names it.
    """
    return open_source(Source.of(path))


def open_source(source: Source) -> _File:
    """Open a file as it was when `source` was made; see `open_file`."""
    return _File(source)
