# SPDX-License-Identifier: Apache-2.0
"""Signals by which batch systems ask a job to end: noted, and agreed on by all ranks at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from typing import Any

import numpy as np

from keras_hpc.job import supervised

# SIGTERM: preemption, scancel, the time limit itself. SIGUSR1: Slurm's warning before the limit (--signal=USR1@120).
_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
# What `keras_hpc run --elastic --rejoin` asks for is agreed on as if it were a signal, which is less than those.
REJOIN = signal.SIGHUP
_LOOK_SECONDS = 0.5


class Request:
    """Context in which SIGTERM and SIGUSR1 are noted. Where a program handles one itself, its handler stays.

    Ranks look together, and not after every step: about twice a second, at steps that they agree on.
    """

    def __init__(self) -> None:
        self._received = 0
        self.taken = False  # whether `fit` ends because of it
        self.looks = 0  # how often all ranks have looked
        self._previous: dict[int, Any] = {}
        self._steps = 1  # from the last look to the next
        self._left = 1
        self._looked_at = time.monotonic()

    def __enter__(self) -> Request:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if not callable(signal.getsignal(number)):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if (
            self._received not in (0, REJOIN) and not self.taken
        ):  # it came too late for `fit`: it is for the program then
            os.kill(os.getpid(), self._received)

    def _note(self, number: int, _: types.FrameType | None) -> None:
        self._received = number

    def after_step(self, team: Any) -> int:
        """Return the signal that a rank has received, or 0 if there is none or it is not time to look. Collective."""
        self._left -= 1
        return 0 if self._left > 0 else self.look(team)

    def after_epoch(self, team: Any) -> int:
        """Return the signal that a rank has received, or 0; `REJOIN` if ranks wait outside. Collective on the team."""
        if team.rank == 0 and not self._received and supervised.asked_to_rejoin():
            self._received = REJOIN
        return self.look(team)

    def look(self, team: Any) -> int:
        """Return the signal that a rank has received, or 0. Collective on the team."""
        now = time.monotonic()
        per_second = self._steps / max(now - self._looked_at, 1e-9)
        steps = max(1, min(2 * self._steps, int(_LOOK_SECONDS * per_second)))
        message = np.array([self._received, -steps], np.int64)
        team.allreduce(message, "max")
        self._looked_at = now
        self.looks += 1
        self._steps = self._left = -int(message[1])
        return int(message[0])
