# SPDX-License-Identifier: Apache-2.0
"""How a job ends: all ranks together, or, when one fails, at once instead of never.

mpi4py ends MPI when the interpreter exits, and that waits for all ranks. A rank that raised would wait for ranks that
wait for it. So an uncaught exception aborts the job, after its traceback has been printed.
"""

from __future__ import annotations

import array
import fcntl
import logging
import os
import stat
import sys
import termios
import time
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_hpc.runtime import Job

_log = logging.getLogger("keras_hpc")

# A rank that called sys.exit with an error waits so long for the others to leave, too, before it ends the job.
_GRACE_SECONDS = 2.0
# An MPI that aborts kills its launcher's helpers too, with all of this rank's output that they have not passed on yet.
_OUTPUT_SECONDS = 2.0
_FORWARD_SECONDS = 0.2
_REASON_CHARACTERS = 500

_previous: tuple[Any, Any] | None = None
_exit_code: int = 0


def install(job: Job) -> None:
    """Watches over uncaught exceptions and `sys.exit` of this process."""
    global _previous
    if job.size == 1:
        return
    _previous = previous_hook, previous_exit = sys.excepthook, sys.exit

    def excepthook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        previous_hook(kind, value, trace)
        text = " ".join(str(value).split())[:_REASON_CHARACTERS]
        abort(job, 1, f"uncaught {kind.__name__}: {text}")

    def exit_(code: Any = None) -> None:
        # Only noted: SystemExit may be caught, and all ranks may exit alike.
        global _exit_code
        _exit_code = 0 if code is None else code if isinstance(code, int) else 1
        previous_exit(code)

    sys.excepthook, sys.exit = excepthook, exit_  # type: ignore[assignment]


def leave(job: Job) -> None:
    """Collective: waits until all ranks leave, then frees what the teams hold."""
    global _previous
    if job.size > 1:
        for team in job.teams:
            team.leave()  # from now on, a rank that waits for this one on the same node fails at once
        request = job.comm.Ibarrier()
        begin = time.monotonic()
        pause = 1e-4
        while not request.Test():
            if _exit_code != 0 and time.monotonic() - begin > _GRACE_SECONDS:
                abort(job, _exit_code, f"sys.exit({_exit_code}) while other ranks go on")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if job.watchdog is not None:
            job.watchdog.close()
    if _previous is not None:
        sys.excepthook, sys.exit = _previous
        _previous = None
    for team in reversed(job.teams):
        team.close()


def abort(job: Job, code: int, reason: str) -> None:
    """Ends the job at once, after rank 0 and this rank have said why."""
    from mpi4py import MPI

    _log.error("rank %d ends the job: %s", job.rank, reason)
    sys.stdout.flush()
    sys.stderr.flush()
    if job.watchdog is not None:
        job.watchdog.last_word(reason)
    wait_for_readers()
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)


def wait_for_readers() -> None:
    """Until the launcher has read what this process wrote to its stdout and stderr, if those are pipes."""
    unread = array.array("i", [0])
    deadline = time.monotonic() + _OUTPUT_SECONDS
    for descriptor in (1, 2):
        try:
            while time.monotonic() < deadline and stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                fcntl.ioctl(descriptor, termios.FIONREAD, unread)
                if unread[0] == 0:
                    break
                time.sleep(0.01)
        except OSError:  # closed
            continue
    time.sleep(_FORWARD_SECONDS)
