# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc run --elastic`: when a rank is lost, the others are started anew without it.

A launcher ends all ranks of a job when one is killed, and MPI libraries that would let the others live (ULFM, in Open
MPI 5 if asked for) cannot give frameworks back the programs that waited for the lost rank. So all are started again:
what they had is what `callbacks.Checkpoint` has saved. With `init(virtual_ranks=)` they go on with the same bits.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from keras_hpc.job import supervised
from keras_hpc.tools.places import Machine, Placement

_LOST = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTERM}
# What the others end with. They say that a rank is gone, or their MPI (MPICH, Open MPI) finds its memory gone, or they
# only heard of it from another rank.
_GONE = re.compile(
    r"\brank \d+ (\([^)]*\) )?(has ended|was killed|does not answer)"
    r"|\bOther MPI error\b|\bMPIX?_ERR_(OTHER|INTERN|UNKNOWN|PROC_FAILED|PROC_ABORTED|REVOKED)\b"
)
_HEARD = re.compile(r"^uncaught Communication(Timeout)?Error: ")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1
_LOOK_SECONDS = 0.5
_PROBE_SECONDS = 5.0  # from one look for places that are back to the next
_PATIENCE = 10.0  # seconds that a launcher may take to end after a rank has ended the job: a host may be gone


def supervise(
    job_of: Callable[[Placement], tuple[list[str], dict[str, str]]], machine: Machine, *, rejoin: bool = False
) -> int:
    """Run a job until it ends by itself, without the ranks that are lost.

    Args:
        job_of: returns the command that starts ranks somewhere, and what it needs in the environment.
        machine: where they can start.
        rejoin: whether a job that has lost ranks is asked to end at an epoch's end, and started with all again, once
            there is place for them.

    Returns:
        The exit status of the last launcher; it is not started again after an error of the script, nor after a signal
        to this process, which is passed on. If that comes while there is no launcher, 128 plus its number.
    """
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if process is not None and not _launcher_has(number):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    now = machine.wanted
    try:
        while True:
            command, more = job_of(now)
            if asked:
                return 128 + asked[0]
            # A rank that outlives its launcher for a moment may still write there.
            with tempfile.TemporaryDirectory(prefix="keras_hpc-run-", ignore_cleanup_errors=True) as folder:
                notes = Path(folder)
                changed = machine.environment(now) | more | {supervised.NAME: folder}
                environment = {k: v for k, v in (os.environ | changed).items() if v is not None}
                process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
                for number in asked:  # it came just before
                    process.send_signal(number)
                status = _wait(process, notes, machine, now if rejoin else machine.wanted)
                reasons, has_left = supervised.reasons(notes), supervised.has_left(notes)
            if asked:
                return _exit_status(status)
            if status == 0 and has_left:
                now = machine.back(now)
                _say(f"lost ranks join again, {time.strftime('%X')}; starts again with {now.ranks}")
                continue
            if status == 0 or now.ranks == 1 or not (_lost_a_rank(status, reasons) or machine.lost(now)):
                return _exit_status(status)
            now = machine.without(now, reasons)
            if now.ranks == 0:
                return _exit_status(status)
            _say(
                f"a rank was lost (the launcher ended with {status}, {time.strftime('%X')}); "
                f"starts again with {now.ranks}"
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes], notes: Path, machine: Machine, now: Placement) -> int:
    """Wait for a launcher, and ask its job to end where more ranks could start.

    Args:
        process: the launcher.
        notes: what the ranks say.
        machine: where ranks can start.
        now: where they have; `machine.wanted` if nothing is asked of the job.
    """
    asked, probed, ended = now == machine.wanted, -_PROBE_SECONDS, 0.0
    while True:
        try:
            return process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        if not asked and time.monotonic() - probed > _PROBE_SECONDS:
            if machine.back(now).ranks > now.ranks:
                supervised.ask_to_rejoin(notes)
                asked = True
            probed = time.monotonic()
        if supervised.reasons(notes):
            ended = ended or time.monotonic()
            if time.monotonic() - ended > _PATIENCE:  # it waits for a host that is gone
                process.kill()


def _end_with_parent() -> None:
    """Let this process get SIGTERM when its parent is killed: a job that nobody looks after would go on unseen."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _launcher_has(number: int) -> bool:
    """Return whether a signal reaches the launcher without us: Ctrl-C goes to all in the foreground of a terminal.

    A second one would be taken as that of somebody who has no patience, and ranks would be killed at once.
    """
    if number != signal.SIGINT:
        return False
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is none
        return False


def _say(text: str) -> None:
    print(f"keras_hpc run: {text}", file=sys.stderr, flush=True)


def _exit_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def _lost_a_rank(status: int, reasons: list[str]) -> bool:
    """Return whether a job ended because a rank is not there any more, and not by an error of the script.

    Args:
        status: exit status of its launcher, which tells the signal that has killed a rank in one way or another.
        reasons: of the ranks that ended the job themselves: those that waited for a lost one could not communicate.
    """
    if not all(_GONE.search(reason) or _HEARD.search(reason) for reason in reasons):
        return False
    return any(map(_GONE.search, reasons)) or {abs(status), status - 128} & _LOST != set()
