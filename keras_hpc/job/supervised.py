# SPDX-License-Identifier: Apache-2.0
"""What ranks and `keras_hpc run --elastic` tell each other: files in a folder that the latter names.

The folder is on the host of `run`: ranks on other hosts see it where they share its folder for temporary files.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

NAME = "KERAS_HPC_RUN_NOTES"  # the environment variable that names the folder
_ASKED, _LEFT = "rejoin", "left"
_REASON = re.compile(r"rank\d+")


def end_with(rank: int, reason: str) -> None:
    """Say why a rank ends the job."""
    if NAME in os.environ:
        path = Path(os.environ[NAME]) / f"rank{rank}"
        with contextlib.suppress(OSError):
            part = path.with_suffix(".part")
            part.write_text(reason)
            part.replace(path)  # whole, or not there: a rank may be killed while it writes


def asked_to_rejoin() -> bool:
    """Return whether ranks wait outside, so that this job is to end at an epoch's end, and to begin with them."""
    return NAME in os.environ and (Path(os.environ[NAME]) / _ASKED).exists()


def leave_to_rejoin() -> None:
    """Say that the job ends because it was asked to, and not because it is done."""
    (Path(os.environ[NAME]) / _LEFT).touch()


def ask_to_rejoin(folder: Path) -> None:
    """Ask a job to end at an epoch's end."""
    (folder / _ASKED).touch()


def reasons(folder: Path) -> list[str]:
    """Return why ranks have ended a job."""
    return [path.read_text() for path in sorted(folder.iterdir()) if _REASON.fullmatch(path.name)]


def has_left(folder: Path) -> bool:
    """Return whether a job has ended because it was asked to."""
    return (folder / _LEFT).exists()
