# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc run --elastic`: when a rank is lost, the others are started anew without it.

A launcher ends all ranks of a job when one is killed, and MPI libraries that would let the others live (ULFM, in Open
MPI 5 if asked for) cannot give frameworks back the programs that waited for the lost rank. So all are started again:
what they had is what `callbacks.Checkpoint` has saved. With `init(virtual_ranks=)` they go on with the same bits.
"""

from __future__ import annotations

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

_LOST = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTERM}
_COMMUNICATION = re.compile(r"uncaught Communication(Timeout)?Error: |rank \d+ (has ended|was killed|does not answer)")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def supervise(job_of: Callable[[int], tuple[list[str], dict[str, str]]], ranks: int) -> int:
    """Run a job until it ends by itself, with one rank less after each that is lost.

    Args:
        job_of: returns the command that starts so many ranks, and what it needs in the environment.
        ranks: how many to begin with.

    Returns:
        The exit status of the last launcher; it is not started again after an error of the script, nor after a signal
        to this process, which is passed on.
    """
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        while True:
            command, environment = job_of(ranks)
            with tempfile.TemporaryDirectory(prefix="keras_hpc-run-") as notes:
                process = subprocess.Popen(command, env=os.environ | environment | {"KERAS_HPC_RUN_NOTES": notes})
                status = process.wait()
                reasons = [path.read_text() for path in sorted(Path(notes).iterdir())]
            if status == 0 or asked or ranks == 1 or not _lost_a_rank(status, reasons):
                return status if status >= 0 else 128 - status
            ranks -= 1
            print(
                f"keras_hpc run: a rank was lost (the launcher ended with {status}, {time.strftime('%X')}); "
                f"starts again with {ranks}",
                file=sys.stderr,
                flush=True,
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _lost_a_rank(status: int, reasons: list[str]) -> bool:
    """Return whether a job ended because a rank is not there any more, and not by an error of the script.

    Args:
        status: exit status of its launcher, which tells the signal that has killed a rank in one way or another.
        reasons: of the ranks that ended the job themselves: those that waited for a lost one could not communicate.
    """
    if any(not _COMMUNICATION.search(reason) for reason in reasons):
        return False
    return bool(reasons) or {abs(status), status - 128} & _LOST != set()
