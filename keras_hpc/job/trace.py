# SPDX-License-Identifier: Apache-2.0
"""What happened when, steps and communication, as a file that chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from keras_hpc import _native
from keras_hpc.job.current import Job

_path: pathlib.Path | None = None
_steps: list[tuple[str, float, float]] = []  # name, begin and end by the engine's clock, the monotonic one


def check(path: str) -> None:
    """Raise OSError if the file cannot be written."""
    with open(path, "w"):
        pass


def enable(path: str) -> None:
    """Record from now on; `finish` writes the file."""
    global _path
    _path = pathlib.Path(path)
    _steps.clear()
    _native.set_tracing(True)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Record a step of a model. JAX may end the call of a step before it ends the step."""
    if _path is None:
        yield
        return
    begin = time.monotonic()
    yield
    _steps.append((name, begin, time.monotonic()))


def finish(job: Job) -> None:
    """Collective: rank 0 writes the events of all ranks."""
    global _path
    if _path is None:
        return
    path, _path = _path, None
    _native.set_tracing(False)
    if job.guard.exit_code != 0:  # this rank leaves alone, and others still train
        return
    everyone = job.teams[0].allgather_object(_events(job.rank), "the events of the trace")
    if job.rank == 0:
        path.write_text(
            json.dumps({"traceEvents": [event for events in everyone for event in events], "otherData": _plans(job)})
        )


def _events(rank: int) -> list[dict[str, Any]]:
    """This rank's events: a row for steps; for each team, one for the framework's calls, one for the reductions."""
    rows = {"steps": 0}
    events = [_event(rank, 0, name, "step", begin, end) for name, begin, end in _steps]
    for name, kind, team, begin, end in _native.take_trace():
        calls = kind in ("start", "wait")
        row = 1 + 2 * team + (not calls)
        rows[f"team {team} {'start and wait' if calls else 'communication'}"] = row
        events.append(_event(rank, row, name, kind, begin, end))
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}},
        *({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": n}} for n, row in rows.items()),
    ]
    return names + events


def _plans(job: Job) -> dict[str, Any]:
    """What was reduced, in the order of each plan: events have its names only."""
    return {
        "ranks": job.size,
        "plans": [
            {
                "team": team.index,
                "name": plan.name,
                "tensors": [
                    {"name": tensor.name, "dtype": tensor.dtype, "elements": math.prod(tensor.shape)}
                    for tensor in plan.tensors
                ],
            }
            for team in job.teams
            for plan in team.plans
        ],
    }


def _event(rank: int, row: int, name: str, kind: str, begin: float, end: float) -> dict[str, Any]:
    times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
    return {"name": name, "cat": kind, "ph": "X", "pid": rank, "tid": row, **times, "args": {"kind": kind}}
