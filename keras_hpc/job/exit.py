# SPDX-License-Identifier: Apache-2.0
"""How a job ends: all ranks together, or, when one fails, at once instead of never.

mpi4py ends MPI when the interpreter exits, and that waits for all ranks. A rank that raised would wait for ranks that
wait for it. So an uncaught exception aborts the job, after its traceback has been printed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import dis
import fcntl
import logging
import os
import stat
import sys
import termios
import threading
import time
import types
import weakref
from typing import Any, NoReturn

from keras_hpc.job import supervised
from keras_hpc.job.current import Job

_log = logging.getLogger("keras_hpc")

# A rank that called sys.exit with an error waits so long for the others to leave, too, before it ends the job.
_GRACE_SECONDS = 2.0
# An MPI that aborts kills its launcher's helpers too, with all of this rank's output that they have not passed on yet.
_OUTPUT_SECONDS = 2.0
_FORWARD_SECONDS = 0.2
_REASON_CHARACTERS = 500


class _Exit(SystemExit):
    """The same, but a weak reference to it is possible."""


def _has_left_all(error: BaseException | None) -> bool:
    """Return whether, at the end of the program, an error is one that nobody has caught.

    The function that it was last seen in did not return then, and nor did those that had called it.
    """
    trace = None if error is None else error.__traceback__
    if trace is None:
        return False
    frame = trace.tb_frame
    ends = (i.opname for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti)
    return not any(name.startswith("RETURN_") for name in ends)


class Guard:
    """Watches over how this process ends, from the start of MPI until all ranks leave.

    That is uncaught exceptions, `sys.exit` and `os._exit`.

    Args:
        comm: the mpi4py communicator of the job, or None where there is no MPI.
        rank: of this process.
        size: number of ranks.

    Attributes:
        exit_code: with which `sys.exit` ends this process; 0 while nothing does.
        watchdog: the `Watchdog` of the job, once there is one.
        is_leaving: whether this rank has come to a good end, and waits for the others to come to theirs.
    """

    def __init__(self, comm: Any, rank: int, size: int) -> None:
        self.exit_code = 0
        self.watchdog: Any = None
        self.is_leaving = False
        self._comm, self._rank = comm, rank
        self._process = os.getpid()
        self._previous: tuple[Any, Any, Any] | None = None
        self._exits: dict[weakref.ref[_Exit], int] = {}
        if size > 1:
            self._install()

    def _install(self) -> None:
        self._previous = previous_hook, _, exit_at_once = sys.excepthook, sys.exit, os._exit

        def excepthook(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
            previous_hook(kind, value, trace)
            if os.getpid() != self._process:  # a forked child is no rank
                self.exit_code = 1
            else:
                text = " ".join(str(value).split())[:_REASON_CHARACTERS]
                self.abort(1, f"uncaught {kind.__name__}: {text}")

        def exit_(code: Any = None) -> None:
            error = _Exit(code)
            if threading.current_thread() is threading.main_thread():
                status = 0 if code is None else code if isinstance(code, int) else 1
                self._exits[weakref.ref(error, self._drop)] = status
                atexit.unregister(self._look_back)
                atexit.register(self._look_back)  # the last one is the first to be called
            raise error

        def exit_at_once_(status: int) -> NoReturn:
            if os.getpid() == self._process:  # by which the script ends; others see no more than that a rank has gone
                supervised.end_with(self._rank, f"os._exit({status})")
            exit_at_once(status)

        sys.excepthook, sys.exit, os._exit = excepthook, exit_, exit_at_once_  # type: ignore[assignment]

    def _look_back(self) -> None:
        """Note the exit code of an error that nobody has caught, but that a cycle of references still holds."""
        left = (code for reference, code in self._exits.items() if _has_left_all(reference()))
        self.exit_code = self.exit_code or next(left, 0)

    def _drop(self, reference: weakref.ref[_Exit]) -> None:
        """Note the exit code once nobody can catch the error any more.

        SystemExit may be caught, so when it is raised it means nothing. The interpreter drops an uncaught one when no
        frame of Python runs any more; one that was caught is dropped while the program goes on.
        """
        code = self._exits.pop(reference)
        if sys._getframe().f_back is None:
            self.exit_code = code

    def remove(self) -> None:
        """Give `sys` back what it had."""
        atexit.unregister(self._look_back)
        if self._previous is not None:
            sys.excepthook, sys.exit, os._exit = self._previous
            self._previous = None

    def abort(self, code: int, reason: str) -> None:
        """End the job at once, after rank 0 and this rank have said why."""
        from mpi4py import MPI

        supervised.end_with(self._rank, reason)
        _log.error("rank %d ends the job: %s", self._rank, reason)
        _flush()
        if self.watchdog is not None:
            self.watchdog.last_word(reason)
        wait_for_readers()
        if not MPI.Is_finalized():
            self._comm.Abort(code)


def leave_child(job: Job) -> None:
    """End a forked child of a rank. It must not end MPI, as mpi4py does at the end of a process: it is the parent's.

    Args:
        job: of the parent.
    """
    _flush()
    os._exit(job.guard.exit_code)


def _flush() -> None:
    """Write out what was printed, if it can be: neither a full disk nor a reader that has gone keeps a job alive."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the last two: it is closed, or None
            stream.flush()


def leave(job: Job) -> None:
    """Collective: waits until all ranks leave."""
    if job.size == 1:
        return
    if job.guard.exit_code != 0:  # a launcher's status may mean the same as that of a rank that was killed
        supervised.end_with(job.rank, f"sys.exit({job.guard.exit_code})")
    else:  # the others of a rank that ends with an error would end the job first, with an exit code of their own
        job.guard.is_leaving = True
        for team in job.all_teams:
            team.leave()  # from now on, a rank that waits for this one on the same node fails at once
    request = job.comm.Ibarrier()
    begin = time.monotonic()
    pause = 1e-4
    while not request.Test():
        code = job.guard.exit_code
        if code != 0 and time.monotonic() - begin > _GRACE_SECONDS:
            job.guard.abort(code, f"sys.exit({code}) while other ranks go on")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


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
