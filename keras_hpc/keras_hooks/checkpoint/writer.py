# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints while training goes on: a thread of each rank, and what ranks tell each other of it.

A rank's part is whole when it has its name; the thread of the rank that leads waits for all parts and then makes the
checkpoint whole. So no rank waits for another's disk in a step, and no message is needed for a checkpoint to become
whole. What went wrong all ranks learn at the next point at which they agree: `agree`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_hpc.keras_hooks.checkpoint import storage
from keras_hpc.keras_hooks.checkpoint.places import Places

_LONGEST_PAUSE = 1.0  # seconds: waiting for a slow disk is no wait for a rank that does not come
_NICE = 12  # of 19, and 0 is what training has: on full cores, a sixteenth of one
_PATIENCE = 5.0  # seconds that an exception waits for what is being written


class Writer:
    """Writes checkpoints of a team of ranks into a folder, one at a time.

    Args:
        team: whose ranks call everything but `let_finish` together.
        folder: `storage.check` was called for it, on ranks that lead.
        places: which ranks write together.
        keep: so many of the newest checkpoints stay.

    Attributes:
        writing: whether a checkpoint is on its way; the same on all ranks.
    """

    def __init__(self, team: Any, folder: Path, places: Places, keep: int) -> None:
        self.team = team
        self.writing = False
        self._folder, self._places, self._keep = folder, places, keep
        self._attempts = 0
        self._step = 0
        self._unfinished = folder
        self._done = threading.Event()
        self._abandoned = threading.Event()
        self._error: str | None = None

    def start(self, step: int, facts: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Begin to write a checkpoint. Collective: `agree(wait=True)` was called before.

        Args:
            step: its number, the same on all ranks.
            facts: JSON, on ranks that lead.
            arrays: this rank's part, which nobody changes until the checkpoint is written.
        """
        self._attempts += 1
        self._step = step
        self._unfinished = self._folder / storage.name_of_unfinished(step, f"{self._places.token}-{self._attempts}")
        self._error = None
        self._done, self._abandoned = threading.Event(), threading.Event()
        self.writing = True
        if not self._places.group:
            self._done.set()
            return
        arguments = (step, facts, arrays, self._unfinished, self._done, self._abandoned)
        threading.Thread(target=self._write, args=arguments, name="keras_hpc checkpoint", daemon=True).start()

    def _write(
        self,
        step: int,
        facts: str,
        arrays: Mapping[str, np.ndarray],
        unfinished: Path,
        done: threading.Event,
        abandoned: threading.Event,
    ) -> None:
        try:
            # Of this thread alone: it takes what training leaves of the cores.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            storage.write_part(unfinished, self.team.rank, arrays)
            if self._places.leads:
                ranks = len(self._places.group)
                storage.commit(self._folder, unfinished, step, facts, ranks, self._keep, abandoned)
        except storage.AbandonedError:
            pass  # whoever has failed says why
        except Exception as error:  # noqa: BLE001  whatever it is, all ranks are told at the next agreed point
            self._error = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        finally:
            done.set()

    def agree(self, wait: bool = False) -> None:
        """Learn whether the checkpoint on its way is written. Collective.

        Args:
            wait: until it is.

        Raises:
            OSError: on all ranks, if one of them could not write it; those before it are whole.
        """
        if not self.writing:
            return
        pause, failed = 1e-3, False
        while True:
            done = self._done.wait(pause) if wait else self._done.is_set()
            message = np.array([not done, done and self._error is not None], np.int64)
            self.team.allreduce(message, "max", what="Checkpoint: is it written")
            if message[1]:
                failed = wait = True
                self._abandoned.set()
            if not message[0]:
                break
            if not wait:
                return
            pause = min(2 * pause, _LONGEST_PAUSE)
        self.writing = False
        if failed:
            self._raise()

    def _raise(self) -> None:
        errors = self.team.allgather_object(self._error, "Checkpoint: what went wrong")
        if self._places.group:
            storage.clear(self._unfinished)
        texts = [f"rank {rank}: {error}" if self.team.size > 1 else error for rank, error in enumerate(errors) if error]
        raise OSError(
            f"The checkpoint after step {self._step} was not written; those before it are whole. {'; '.join(texts)}"
        )

    def let_finish(self) -> None:
        """Give the checkpoint on its way a moment to become whole, and give it up then. Of this rank alone."""
        if self.writing:
            self._done.wait(_PATIENCE)
            self._abandoned.set()
            self.writing = False
