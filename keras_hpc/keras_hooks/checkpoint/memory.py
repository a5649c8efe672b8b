# SPDX-License-Identifier: Apache-2.0
"""The memory that a checkpoint's values are copied into while a step waits."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

_ALIGNMENT = 64
_PAGE = 4096


class Memory:
    """What values are copied into. It is kept, and grows if need be: new pages take longer than the copy."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._getting: threading.Thread | None = None

    def prepare(self, views: Mapping[str, np.ndarray]) -> None:
        """Begin to get memory for copies of such arrays, so that the first save need not wait for it."""
        if self._getting is None:
            self._getting = threading.Thread(target=self._get, args=(_starts(views)[-1],), daemon=True)
            self._getting.start()

    def _get(self, nbytes: int) -> None:
        try:
            memory = np.empty(nbytes, np.uint8)
        except MemoryError:
            return  # which the first save says
        memory[::_PAGE] = 0
        self._bytes = memory

    def copies(self, views: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies of arrays. Those of the time before are overwritten."""
        if self._getting is not None:
            self._getting.join()
        starts = _starts(views)
        if len(self._bytes) < starts[-1]:
            self._bytes = np.empty(starts[-1], np.uint8)
        found = {}
        for start, (name, view) in zip(starts, views.items(), strict=False):
            found[name] = self._bytes[start : start + view.nbytes].view(view.dtype).reshape(view.shape)
            found[name][...] = view
        return found


def _starts(views: Mapping[str, np.ndarray]) -> list[int]:
    """Return where each array begins, and the end of the last."""
    found: list[int] = np.cumsum([0, *(-(-view.nbytes // _ALIGNMENT) * _ALIGNMENT for view in views.values())]).tolist()
    return found
