# SPDX-License-Identifier: Apache-2.0
"""Arrays that are stored in chunks of rows, of which a file gives whole ones only.

A batch takes a few rows of each of several chunks. So chunks stay in memory until the batches that follow have taken
theirs: else a chunk would be read and unpacked once for each of its rows.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

_locked = threading.Lock()
_recent: OrderedDict[tuple[int, int], tuple[Future[np.ndarray], int]] = OrderedDict()  # with its bytes
_room = 0
_numbers = itertools.count()


def make_room(nbytes: int) -> None:
    """Keep at least so many bytes of the chunks that were read last, of all arrays of this process."""
    global _room
    _room = max(_room, nbytes)


class Chunks:
    """Rows of an array, by chunks.

    Args:
        read: `(start, stop) -> rows`.
        count: of all rows.
        rows: of a chunk.
        nbytes: of a chunk in memory.
    """

    def __init__(self, read: Callable[[int, int], np.ndarray], count: int, rows: int, nbytes: int) -> None:
        self._read, self._count, self._rows, self._nbytes = read, count, rows, nbytes
        self._number = next(_numbers)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`. Threads may do so at once."""
        if not _room or self._rows == 1 or start >= stop:
            return self._read(start, stop)
        parts = []
        for number in range(start // self._rows, -(-stop // self._rows)):
            begin = number * self._rows
            parts.append(self._chunk(number)[max(0, start - begin) : stop - begin])
        return np.concatenate(parts)  # a copy, also of one

    def touch(self, start: int, stop: int) -> None:
        """Read the chunks of rows `start` to `stop` into memory, if they are kept there."""
        if _room and self._rows > 1:
            for number in range(start // self._rows, -(-stop // self._rows)):
                self._chunk(number)

    def _chunk(self, number: int) -> np.ndarray:
        key = self._number, number
        with _locked:
            found, _ = _recent.get(key, (None, 0))
            mine: Future[np.ndarray] = Future()
            _recent[key] = found or mine, self._nbytes
            _recent.move_to_end(key)
            kept = sum(nbytes for _, nbytes in _recent.values())
            while kept > _room and len(_recent) > 1:
                kept -= _recent.popitem(last=False)[1][1]
        if found is not None:
            return found.result()
        try:
            mine.set_result(self._read(number * self._rows, min(self._count, (number + 1) * self._rows)))
        except BaseException as error:  # noqa: BLE001 - raised below, and where others wait for it
            with _locked:
                _recent.pop(key, None)
            mine.set_exception(error)
        return mine.result()
