# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a node have read, in files on the node that they share.

A source file is cut into blocks. Who needs a block that is not there takes its lock, reads it, writes it into the
cache and marks it; others that need it wait for that lock. So a block is read once on a node, by whoever comes first,
and the kernel frees the lock of a process that dies. With several nodes a block has a home, from which the others get
it: so it is read once in a job.

The cache's files are removed from their folder as soon as all ranks have opened them: a job that is killed leaves
nothing behind. Blocks are read and written by system calls, because a full disk kills a process that writes through a
mapping.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from keras_hpc.data.files import Source

BLOCK_BYTES = 1 << 20
_COUNTERS = ("kept", "kept_for_others", "read", "from_nodes", "refused")
_MARKS = 64  # where the blocks' marks begin, behind the counters
_COUNTER_LOCK = 0


class Cache:
    """The cache of a node, seen from one of its ranks.

    Args:
        folder: where it lies.
        name: of this job in that folder, the same on all ranks of the node.
        limit: bytes that it may take.
        node: number of this node.
        node_count: number of nodes.
        block_bytes: size of a block; the same on all ranks.

    Attributes:
        fetch: `(node, source, block, begin, nbytes) -> bytes`, what gets a part of a block whose home is another node;
            None: with one node.

    Raises:
        OSError: the folder cannot be written; names it.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        limit: int,
        node: int = 0,
        node_count: int = 1,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.folder, self.limit, self.block_bytes = folder, limit, block_bytes
        self.fetch: Callable[[int, Source, int, int, int], bytes] | None = None
        self._node, self._node_count = node, node_count
        self._paths = [os.path.join(folder, f".keras_hpc-{name}-{part}") for part in ("table", "marks", "data")]
        self._table, self._marks, self._data = (os.open(p, os.O_RDWR | os.O_CREAT, 0o600) for p in self._paths)
        self._bases: dict[Source, int] = {}  # in blocks
        self._blocks = self._bytes = 0  # of all files that this rank knows
        self._table_end = 0  # what it has read of the table
        self._naming = threading.Lock()
        self._free: dict[int, list[int]] = {self._table: [], self._marks: []}

    def unlink(self) -> None:
        """Remove the files' names, once all ranks of the node have opened them."""
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def close(self) -> None:
        """Give the node its space back, once all ranks have closed it."""
        for descriptor in (self._table, self._marks, self._data, *itertools.chain(*self._free.values())):
            os.close(descriptor)

    def read_into(self, source: Source, offset: int, view: memoryview, keep: bool = True) -> None:
        """Fill `view` with the bytes of a source from `offset` on.

        Args:
            source: the file.
            offset: where they begin.
            view: is filled.
            keep: whether blocks that are not there are read as wholes and kept, if there is room.

        Raises:
            OSError: the source cannot be read, or the cache not be written; names the file.
        """
        done = 0
        while done < len(view):
            block, begin = divmod(offset + done, self.block_bytes)
            piece = view[done : done + self.block_bytes - begin]
            self._copy(source, block, begin, piece, keep)
            done += len(piece)

    def touch(self, source: Source, offset: int, nbytes: int) -> None:
        """Keep the blocks of some bytes, until there is no room."""
        if nbytes > 0:
            for block in range(offset // self.block_bytes, (offset + nbytes - 1) // self.block_bytes + 1):
                if not self._load(source, block):
                    return

    def block(self, source: Source, number: int, begin: int, nbytes: int) -> bytes:
        """Return a part of a block, for another node."""
        content = bytearray(nbytes)
        self._copy(source, number, begin, memoryview(content), keep=True)
        return bytes(content)

    def traffic(self) -> dict[str, int]:
        """Return what this node has kept and read so far, in bytes, by the names of the counters."""
        raw = os.pread(self._marks, 8 * len(_COUNTERS), 0)
        values = struct.unpack(f"={len(_COUNTERS)}q", raw.ljust(8 * len(_COUNTERS), b"\0"))
        return dict(zip(_COUNTERS, values, strict=True))

    def home(self, source: Source, block: int) -> int:
        """Return the node that reads a block."""
        return (zlib.crc32(source.path.encode()) + block) % self._node_count

    def _copy(self, source: Source, block: int, begin: int, view: memoryview, keep: bool) -> None:
        place = self._base(source) + block
        if self._is_kept(place) or (keep and self._load(source, block)):
            self._read_kept(place * self.block_bytes + begin, view)
        elif keep:  # there is no room: of a whole block most would be read in vain
            view[:] = self._get(source, block, begin, len(view))
            self._count(refused=len(view))
        else:
            source.read_into(block * self.block_bytes + begin, view)
            self._count(read=len(view))

    def _load(self, source: Source, block: int) -> bool:
        """Read a block and keep it, unless it is there. Returns whether it is now: there may be no room."""
        place = self._base(source) + block
        if self._is_kept(place):
            return True
        with self._locked(self._marks, _MARKS + place):
            if self._is_kept(place):  # somebody was faster
                return True
            size = self._size(source, block)
            counter = "kept" if self.home(source, block) == self._node else "kept_for_others"
            if not self._has_room(counter, size):
                return False
            try:
                self._keep(place, self._get(source, block, 0, size))
            except BaseException:  # whatever it was, it takes no room; raised again
                self._count(**{counter: -size})
                raise
        return True

    def _get(self, source: Source, block: int, begin: int, nbytes: int) -> bytes | bytearray:
        home = self.home(source, block)
        if home != self._node and self.fetch is not None:
            fetched = self.fetch(home, source, block, begin, nbytes)
            self._count(from_nodes=len(fetched))
            return fetched
        content = bytearray(nbytes)
        source.read_into(block * self.block_bytes + begin, memoryview(content))
        self._count(read=nbytes)
        return content

    def _has_room(self, counter: str, size: int) -> bool:
        """Count bytes as kept, if there is room for them."""
        with self._counters() as counters:
            kept, others = counters["kept"], counters["kept_for_others"]
            # What other nodes keep, too, gives way to what this node alone keeps.
            room = self.limit - others - (kept if counter == "kept" else max(kept, self._bytes // self._node_count))
            if size > room:
                return False
            counters[counter] += size
            return True

    def _keep(self, place: int, content: bytes | bytearray) -> None:
        view, done = memoryview(content), 0
        try:
            while done < len(view):
                done += os.pwrite(self._data, view[done:], place * self.block_bytes + done)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} while the node's cache was written", self._paths[2]) from None
        os.pwrite(self._marks, b"\1", _MARKS + place)

    def _read_kept(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            got = os.preadv(self._data, [view[done:]], offset + done)
            if not got:
                raise OSError(f"{self._paths[2]} is shorter than it was")
            done += got

    def _is_kept(self, place: int) -> bool:
        return os.pread(self._marks, 1, _MARKS + place) == b"\1"

    def _size(self, source: Source, block: int) -> int:
        return min(self.block_bytes, source.size - block * self.block_bytes)

    def _base(self, source: Source) -> int:
        """Return the place of a file's first block in this node's cache."""
        with self._naming:
            if source not in self._bases:
                with self._locked(self._table, 0):
                    self._read_table()
                    if source not in self._bases:
                        row = [source.path, source.size, source.changed, -(-source.size // self.block_bytes)]
                        self._table_end += os.pwrite(self._table, json.dumps(row).encode() + b"\n", self._table_end)
                        self._note(row)
            return self._bases[source]

    def _read_table(self) -> None:
        """Note what other ranks have written into the table since."""
        raw = os.pread(self._table, os.fstat(self._table).st_size - self._table_end, self._table_end)
        self._table_end += len(raw)
        for line in raw.splitlines():
            self._note(json.loads(line))

    def _note(self, row: list[Any]) -> None:
        path, size, changed, blocks = row
        self._bases[Source(path, size, changed)] = self._blocks
        self._blocks += blocks
        self._bytes += size

    def _count(self, **more: int) -> None:
        with self._counters() as counters:
            for name, value in more.items():
                counters[name] += value

    @contextlib.contextmanager
    def _counters(self) -> Iterator[dict[str, int]]:
        with self._locked(self._marks, _COUNTER_LOCK):
            counters = self.traffic()
            yield counters
            os.pwrite(self._marks, struct.pack(f"={len(_COUNTERS)}q", *counters.values()), 0)

    @contextlib.contextmanager
    def _locked(self, descriptor: int, byte: int) -> Iterator[None]:
        """Hold the lock of a byte against all threads of all ranks of the node."""
        with self._opening(descriptor) as own:
            fcntl.fcntl(own, fcntl.F_OFD_SETLKW, _lock(fcntl.F_WRLCK, byte))
            try:
                yield
            finally:
                fcntl.fcntl(own, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, byte))

    @contextlib.contextmanager
    def _opening(self, descriptor: int) -> Iterator[int]:
        """Lend an opening of a file to one holder at a time: a lock belongs to an opening, not to a thread."""
        free = self._free[descriptor]
        try:
            own = free.pop()
        except IndexError:
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            yield own
        finally:
            free.append(own)


def _lock(kind: int, byte: int) -> Any:
    """Return C's `struct flock` of one byte."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
