# SPDX-License-Identifier: Apache-2.0
"""What ranks write while they are traced, a file each, and the one file for chrome://tracing and ui.perfetto.dev.

A rank's file has lines of JSON, each a gzip member of its own: of a rank that was killed all but the last can be read.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUFFIX = ".jsonl.gz"
_CALLS = ("start", "wait")
MARK = re.compile(r"keras_hpc rank (\d+) clock ([\d.]+)")


class TraceError(ValueError):
    """There is nothing to show; the message says why."""


def part(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank{rank:06d}{SUFFIX}"


def mark(rank: int, seconds: float) -> str:
    """Return the name of an event of a framework's profile that tells the time by the clock of rank 0, as `MARK`."""
    return f"keras_hpc rank {rank} clock {seconds:.9f}"


def append(descriptor: int, line: dict[str, Any], events: bytes = b"") -> None:
    """Write a line, past any buffer: a forked child must not write it again.

    Args:
        descriptor: of the rank's file.
        line: what it has.
        events: its "events", a list in JSON already.

    Raises:
        OSError: it could not be written whole.
    """
    text = json.dumps(line, separators=(",", ":")).encode()
    if events:
        text = b'%b,"events":%b}' % (text[:-1], events)
    data = memoryview(gzip.compress(text + b"\n", 1))
    while data:
        data = data[os.write(descriptor, data) :]


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a rank's file, up to where it was cut off."""
    with gzip.open(path) as file:
        while True:
            try:
                line = file.readline()
            except (EOFError, OSError, zlib.error):  # the rank was killed while it wrote
                return
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)


def merge(folder: Path, out: Path) -> int:
    """Write what the ranks of a job have recorded as one file, and return how many ranks there are.

    Args:
        folder: with the ranks' files.
        out: Chrome's format, compressed where its name ends in `.gz`.

    Raises:
        TraceError: no rank has written anything there.
        OSError: the file cannot be written.
    """
    parts = sorted(folder.glob(f"rank*{SUFFIX}"))
    plans: dict[tuple[int, str], dict[str, Any]] = {}
    written = out.with_name(f"{out.name}.new")
    found = ranks = 0
    with gzip.open(written, "wt") if out.suffix == ".gz" else written.open("w") as file:
        file.write('{"traceEvents": [\n')
        separator = ""
        for path in parts:
            content = lines(path)
            header = next(content, None)
            if header is None:
                continue
            found += 1
            ranks = max(ranks, header["ranks"])
            rows = _Rows(header["rank"], header["offset"])
            for line in content:
                for plan in line.get("plans", ()):
                    plans[plan["team"], plan["name"]] = plan
                for event in rows.events(line):
                    file.write(separator + json.dumps(event))
                    separator = ",\n"
            for event in rows.names(header["host"]):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        other = {"ranks": ranks, "plans": [plans[key] for key in sorted(plans)]}
        file.write(f'\n], "otherData": {json.dumps(other)}}}\n')
    if not found:
        written.unlink()
        raise TraceError(f"Expected a folder with files of ranks, rank000000{SUFFIX} and so on. Received: {folder}")
    written.replace(out)
    return found


class _Rows:
    """The events of a rank in Chrome's format: events that overlap without one holding the other need two rows.

    Args:
        rank: of the job.
        offset: seconds to add to this rank's clock for that of rank 0.
    """

    def __init__(self, rank: int, offset: float) -> None:
        self._rank, self._offset = rank, offset
        self._rows: dict[tuple[int, str, int], int] = {(-1, "steps", 0): 0}  # team, what, which: its number
        self._ends: dict[int, float] = {}

    def events(self, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a line."""
        found: list[Sequence[Any]] = [(name, "step", -1, *times) for name, *times in line.get("steps", ())]
        found += line.get("events", ())
        for name, kind, team, begin, end in sorted(found, key=lambda event: float(event[3])):
            what = "steps" if team < 0 else "start and wait" if kind in _CALLS else "communication"
            yield {
                "name": name,
                "cat": kind,
                "ph": "X",
                "pid": self._rank,
                "tid": self._row(team, what, begin, end),
                "ts": (begin + self._offset) * 1e6,
                "dur": (end - begin) * 1e6,
                "args": {"kind": kind},
            }

    def _row(self, team: int, what: str, begin: float, end: float) -> int:
        """Return the first row of its kind that has ended."""
        which = 0
        while True:
            row = self._rows.setdefault((team, what, which), len(self._rows))
            if self._ends.get(row, begin) <= begin:
                self._ends[row] = end
                return row
            which += 1

    def names(self, host: str) -> Iterator[dict[str, Any]]:
        """Yield what the rank and its rows are called, and in which order they stand."""
        process = {"ph": "M", "pid": self._rank}
        yield {"name": "process_name", **process, "args": {"name": f"rank {self._rank}"}}
        yield {"name": "process_labels", **process, "args": {"labels": host}}
        yield {"name": "process_sort_index", **process, "args": {"sort_index": 10 * self._rank}}
        for place, ((team, what, which), row) in enumerate(sorted(self._rows.items())):
            name = (what if team < 0 else f"team {team} {what}") + (f", {which + 1}" if which else "")
            yield {"name": "thread_name", **process, "tid": row, "args": {"name": name}}
            yield {"name": "thread_sort_index", **process, "tid": row, "args": {"sort_index": place}}
