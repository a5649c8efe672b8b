# SPDX-License-Identifier: Apache-2.0
"""Brings near what a pass reads next, while it trains on what it has.

The first batches of a window of mixed blocks need samples of all of them, the later ones nothing that is not there. So
reading batch by batch would have training wait at each window's beginning, and files wait during the rest of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from keras_hpc.data.order import Order


class Ahead:
    """A thread that touches the window of a pass which is read now, and the next one.

    Args:
        store: of the samples.
        order: of the pass.
        first: the store's sample that is the order's first.
    """

    def __init__(self, store: Any, order: Order, first: int) -> None:
        self._store, self._order, self._first = store, order, first
        self._news = threading.Condition()
        self._wanted = self._done = -1  # numbers of windows
        self._stopped = False

    def at(self, place: int) -> None:
        """Say which place of the order is read now."""
        with self._news:
            self._wanted = max(self._wanted, self._order.window(place) + 1)
            self._news.notify()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Touch windows meanwhile."""
        thread = threading.Thread(target=self._run, name="keras_hpc data", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._news:
                self._stopped = True
                self._news.notify()
            thread.join()

    def _run(self) -> None:
        while (number := self._next()) is not None:
            ranges = self._order.ranges(number)
            turn = os.getpid() % max(1, len(ranges))  # ranks of a node begin with different ones
            for start, stop in ranges[turn:] + ranges[:turn]:
                if self._stopped:
                    return
                # Whoever needs it meets the error, too, and says so.
                with contextlib.suppress(Exception):
                    self._store.touch(self._first + start, self._first + stop)

    def _next(self) -> int | None:
        """Wait for a window that is wanted, and return its number; None: no more is."""
        with self._news:
            self._news.wait_for(lambda: self._stopped or self._done < self._wanted)
            # The first to be read is the one before the first that was wanted.
            self._done = self._wanted - 1 if self._done < 0 else self._done + 1
            return None if self._stopped else self._done
