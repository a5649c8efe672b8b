# SPDX-License-Identifier: Apache-2.0
"""What frameworks have profiled by themselves, by the clock that ranks have recorded with.

TensorFlow and JAX write `*.xplane.pb`, PyTorch a trace in Chrome's format. While a rank records, each of its steps puts
an event into the framework's profile whose name tells the time: `trace_file.MARK`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keras_hpc.job.trace_file import MARK, TraceError

_XPLANE = ".xplane.pb"
_CHROME = (".json", ".json.gz")
Event = dict[str, Any]


def files(path: Path) -> list[Path]:
    """Return the profiles of a folder, or the one that is named.

    Raises:
        TraceError: there is none.
    """
    if path.is_file():
        return [path]
    found = sorted(path.rglob(f"*{_XPLANE}"))
    seen = {file.parent for file in found}  # JAX writes the same once more as .trace.json.gz
    found += sorted(file for end in _CHROME for file in path.rglob(f"*{end}") if file.parent not in seen)
    if not found:
        raise TraceError(
            f"Expected a profile, *{_XPLANE}, *.json or *.json.gz, or a folder with some. Received: {path}"
        )
    return found


def events(file: Path) -> tuple[int, list[Event]]:
    """Return whose profile this is, and its events in Chrome's format, by the clock of rank 0.

    Raises:
        TraceError: no step of ours is in it; or it cannot be read.
        OSError: likewise.
    """
    found = list(_of_xplane(file) if file.name.endswith(_XPLANE) else _of_chrome(file))
    marks = [(MARK.fullmatch(event["name"]), event["ts"]) for event in found if "keras_hpc rank" in event["name"]]
    clocks = [(int(match[1]), float(match[2]) * 1e6 - begin) for match, begin in marks if match]
    if len({rank for rank, _ in clocks}) != 1:
        raise TraceError(
            "Expected a profile of one rank that was recording, init(trace=), while it trained by `fit`. "
            f"Received: {file}, in which {len(clocks)} steps are marked"
        )
    rank = clocks[0][0]
    shift = statistics.median(shift for _, shift in clocks)
    return rank, list(_placed(found, rank, shift))


def add(trace: Path, profiles: list[Path], out: Path, tell: Callable[[str], None]) -> None:
    """Write a file with what ranks have recorded and with these profiles.

    Args:
        trace: what `trace_file.merge` has written.
        profiles: files or folders.
        out: Chrome's format, compressed where its name ends in `.gz`.
        tell: called with a line for each profile.

    Raises:
        TraceError: a file is none of these.
        OSError: a file cannot be read or written.
    """
    content = _json(trace)
    if "plans" not in content.get("otherData", {}):
        raise TraceError(f"Expected a file that init(trace=) or `keras-hpc trace` has written. Received: {trace}")
    for file in [file for path in profiles for file in files(path)]:
        rank, more = events(file)
        content["traceEvents"] += more
        tell(f"{file}: {len(more)} events of rank {rank}")
    written = out.with_name(f"{out.name}.new")
    with gzip.open(written, "wt") if out.suffix == ".gz" else written.open("w") as stream:
        json.dump(content, stream)
    written.replace(out)


def _placed(found: list[Event], rank: int, shift: float) -> Iterator[Event]:
    """Yield the events with times and numbers of processes that fit to the ranks', which are 0, 1, ..."""
    numbers: dict[Any, int] = {}
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    for event in found:
        if MARK.fullmatch(event["name"]) or event["name"] in ("process_name", "process_labels", "process_sort_index"):
            continue
        new = event.get("pid") not in numbers
        number = numbers.setdefault(event.get("pid"), 10_000 * (rank + 1) + len(numbers))
        if new:
            about = {"ph": "M", "pid": number}
            name = f"rank {rank}: {names.get(event.get('pid'), 'profile')}"
            yield {"name": "process_name", **about, "args": {"name": name}}
            yield {"name": "process_sort_index", **about, "args": {"sort_index": 10 * rank + 1}}
        yield event | {"pid": number} | ({"ts": event["ts"] + shift} if "ts" in event else {})


def _json(file: Path) -> dict[str, Any]:
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
            content: dict[str, Any] = json.load(stream)
        if not isinstance(content["traceEvents"], list):
            raise TypeError("its traceEvents are no list")
    except (ValueError, TypeError, KeyError, EOFError) as error:
        raise TraceError(f"Expected a trace in Chrome's format. Received: {file}, {error!r}") from error
    return content


def _of_chrome(file: Path) -> Iterator[Event]:
    yield from (event for event in _json(file)["traceEvents"] if "name" in event)


def _of_xplane(file: Path) -> Iterator[Event]:
    """Yield the events of a profile of XLA's, with the times of its own clock."""
    for plane, (name, lines) in enumerate(_planes(file)):
        yield {"name": "process_name", "ph": "M", "pid": plane, "args": {"name": name}}
        for row, (line, found) in enumerate(lines):
            yield {"name": "thread_name", "ph": "M", "pid": plane, "tid": row, "args": {"name": line}}
            for event, begin, duration in found:
                yield {"name": event, "ph": "X", "pid": plane, "tid": row, "ts": begin / 1e3, "dur": duration / 1e3}


def _planes(file: Path) -> Iterator[tuple[str, Iterator[tuple[str, Iterator[tuple[str, float, float]]]]]]:
    """Yield names of planes and of their lines, and events: a name, begin and duration in ns."""
    try:
        from jax.profiler import ProfileData
    except ImportError:
        ProfileData = None
    if ProfileData is not None:
        for plane in ProfileData.from_file(str(file)).planes:
            yield (
                plane.name,
                (
                    (line.name, ((event.name, event.start_ns, event.duration_ns) for event in line.events))
                    for line in plane.lines
                ),
            )
        return
    if importlib.util.find_spec("tensorflow") is None:
        raise TraceError(f"JAX or TensorFlow can read a profile of XLA's, and neither is here. Received: {file}")
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(file.read_bytes())
    for plane in space.planes:
        known = plane.event_metadata
        yield (
            plane.name,
            (
                (
                    line.name,
                    (
                        (
                            known[event.metadata_id].name,
                            line.timestamp_ns + event.offset_ps / 1e3,
                            event.duration_ps / 1e3,
                        )
                        for event in line.events
                    ),
                )
                for line in plane.lines
            ),
        )
