# SPDX-License-Identifier: Apache-2.0
"""What happened when, steps and communication: each rank writes it while it trains, `finalize` puts it together."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import shutil
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_hpc import _native
from keras_hpc.job import launch, log, trace_file
from keras_hpc.job.current import Job
from keras_hpc.job.plan import bytes_of

_PERIOD_SECONDS = 0.5  # from write to write
_ROUNDS = 10  # in which clocks are compared
_SWITCH = "record"  # a file: while it is there, ranks record

_recording: Recording | None = None


class Recording:
    """Writes what this rank does, from a thread of its own.

    Args:
        job: whose rank this is.
        path: of the file that `finish` writes.
        run: names this job among those with the same path.
        offset: seconds to add to this rank's clock for that of rank 0.
        record: whether it begins at once.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, job: Job, path: Path, run: str, offset: float, record: bool) -> None:
        if path.is_dir():
            raise IsADirectoryError(f"`trace` is the path of a file. Received the folder: {path}")
        self.path = path
        self.folder = path.with_name(f"{path.name}.parts") / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.part = trace_file.part(self.folder, job.rank)
        self.rank, self.offset = job.rank, offset
        self.is_on = False
        self.steps: collections.deque[tuple[str, float, float]] = collections.deque()
        self._job = job
        self._switch = self.folder / _SWITCH
        if record:
            self._switch.touch()
        self._was_there = record
        self._toggles = 0
        self._process = os.getpid()
        self._known: set[tuple[int, str]] = set()
        self._ended = threading.Event()
        self._descriptor = os.open(self.part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        about = {"rank": job.rank, "ranks": job.size, "host": os.uname().nodename, "offset": offset}
        trace_file.append(self._descriptor, about)
        self._previous: Any = None
        self._takes_signals = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL  # a handler of the user's own stays
        )
        if self._takes_signals:
            signal.signal(signal.SIGUSR2, self._note)
        _native.take_trace()
        self.record(record)
        self._thread = threading.Thread(target=self._run, name="keras_hpc trace", daemon=True)
        self._thread.start()

    def record(self, on: bool) -> None:
        """Begin or stop to record on this rank."""
        self.is_on = on
        _native.set_tracing(on)

    def _note(self, *_: int | types.FrameType | None) -> None:
        if os.getpid() == self._process:  # a forked child is no rank
            self._toggles += 1

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_SECONDS):
            if not self._look():
                return

    def _look(self) -> bool:
        """Do what was asked for, and write what there is. Return whether that was possible."""
        try:
            is_there = self._switch.exists()
            if is_there != self._was_there:
                self._was_there = is_there
                self.record(is_there)
            while self._toggles:
                self._toggles -= 1
                self.record(not self.is_on)
            self._write()
        except OSError as error:
            self.record(False)
            log.warning(f"rank {self._job.rank} records no more: {error}")
            return False
        return True

    def _write(self) -> None:
        steps = [self.steps.popleft() for _ in range(len(self.steps))]
        events = _native.take_trace()
        if not steps and not events:
            return
        line: dict[str, Any] = {"steps": steps}
        plans = [plan for plan in _plans(self._job) if (plan["team"], plan["name"]) not in self._known]
        if plans:
            line["plans"] = plans
            self._known |= {(plan["team"], plan["name"]) for plan in plans}
        trace_file.append(self._descriptor, line, events)

    def close(self) -> None:
        """Write the rest."""
        self._ended.set()
        self._thread.join()
        self.record(False)
        self._look()
        os.close(self._descriptor)
        if self._takes_signals:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def enable(job: Job, world: launch.World, path: str, record: bool) -> None:
    """Collective: write from now on what is recorded; `finish` puts it together.

    Args:
        job: to be traced.
        world: its ranks.
        path: of the file that `finish` writes.
        record: whether recording begins at once, or when a signal, a file or a callback asks for it.

    Raises:
        OSError: nothing can be written there.
        LaunchError: likewise, on another rank.
    """
    global _recording
    run = launch.exchange(world, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")[0]
    offset = _offset(job)
    with contextlib.ExitStack() as undo:

        def opened() -> Recording:
            writer = Recording(job, Path(path).absolute(), run, offset, record)
            undo.callback(writer.close)
            return writer

        writer = launch.on_all_ranks(world, opened)
        undo.pop_all()
    _recording = writer


def recording() -> Recording | None:
    """Return what this rank's events are written by; None without `init(trace=)`."""
    return _recording


@contextlib.contextmanager
def step(name: str, mark: Callable[[str], None]) -> Iterator[None]:
    """Record a step of a model. JAX may end the call of a step before it ends the step.

    Args:
        name: of the step.
        mark: puts a name into the framework's own profile, so that `keras-hpc trace --profile` knows its clock.
    """
    if _recording is None or not _recording.is_on:
        yield
        return
    writer, begin = _recording, time.monotonic()  # the engine's clock
    mark(trace_file.mark(writer.rank, begin + writer.offset))
    yield
    writer.steps.append((name, begin, time.monotonic()))


def close() -> None:
    """Stop; what was written stays."""
    global _recording
    if _recording is not None:
        writer, _recording = _recording, None
        writer.close()


def finish(job: Job) -> None:
    """Collective: rank 0 writes the events of all ranks as one file."""
    writer = _recording
    if writer is None:
        return
    close()
    if job.guard.exit_code != 0:  # this rank leaves alone, and others still train
        return
    team = job.teams[0]
    sizes = team.allgather_object(writer.part.stat().st_size, "the sizes of the trace")
    parts = [trace_file.part(writer.folder, rank) for rank in range(job.size)]
    unseen = [rank for rank, part in enumerate(parts) if not part.exists() or part.stat().st_size != sizes[rank]]
    for rank in team.broadcast_object(unseen, what="what rank 0 does not see of the trace"):
        mine = writer.part.read_bytes() if rank == job.rank else b""
        content = team.broadcast_object(mine, rank, "a part of the trace")
        if job.rank == 0:
            parts[rank].write_bytes(content)
    if job.rank == 0:
        try:
            trace_file.merge(writer.folder, writer.path)
        except OSError as error:
            log.warning(f"The trace stays in {writer.folder}: {error}. `keras-hpc trace` puts it together.")
            return
        shutil.rmtree(writer.folder)
        with contextlib.suppress(OSError):  # of another job
            writer.folder.parent.rmdir()


def _offset(job: Job) -> float:
    """Collective: what to add to this rank's clock for that of rank 0. Nodes began to count at different times.

    The answer that took the shortest way is the best one (Cristian, "Probabilistic clock synchronization", 1989).
    """
    if job.node_count == 1:
        return 0.0
    team = job.teams[0]
    clock = np.zeros(1)
    best, offset = math.inf, 0.0
    for _ in range(_ROUNDS):
        begin = time.monotonic()
        team.barrier()  # rank 0 leaves it, and reads its clock, after this rank has come
        clock[0] = time.monotonic()
        team.native.broadcast(bytes_of(clock), 0)
        took = time.monotonic() - begin
        if took < best:
            best, offset = took, float(clock[0]) - (begin + took / 2)
    return 0.0 if job.rank == 0 else offset


def _plans(job: Job) -> list[dict[str, Any]]:
    """What is reduced, in the order of each plan: events have its names only."""
    return [
        {
            "team": team.index,
            "name": plan.name,
            "tensors": [
                {"name": tensor.name, "dtype": tensor.dtype, "elements": math.prod(tensor.shape)}
                for tensor in plan.tensors
            ],
        }
        for team in job.teams
        if job.rank in team.ranks
        for plan in team.plans
    ]
