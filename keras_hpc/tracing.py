# SPDX-License-Identifier: Apache-2.0
"""What was communicated when, as a file that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

from keras_hpc import _native

if TYPE_CHECKING:
    from keras_hpc.runtime import Job

_path: pathlib.Path | None = None


def enable(path: str) -> None:
    """Records from now on; `finish` writes the file."""
    global _path
    _path = pathlib.Path(path)
    _native.set_tracing(True)


def finish(job: Job) -> None:
    """Collective: rank 0 writes the events of all ranks."""
    global _path
    if _path is None:
        return
    _native.set_tracing(False)
    # Rows of the display: what the framework did, and what each team's communication did.
    events = [
        {
            "name": name,
            "cat": kind,
            "ph": "X",
            "pid": job.rank,
            "tid": f"team {team} {'framework' if kind in ('start', 'wait') else 'communication'}",
            "ts": begin * 1e6,
            "dur": (end - begin) * 1e6,
            "args": {"kind": kind},
        }
        for name, kind, team, begin, end in _native.take_trace()
    ]
    everyone = job.teams[0].allgather_object(events)
    if job.rank == 0:
        _path.write_text(json.dumps({"traceEvents": [event for events in everyone for event in events]}))
    _path = None
