# SPDX-License-Identifier: Apache-2.0
"""What a rank knows of itself and of its neighbours when ranks wait too long."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import pathlib
import platform
import re
import sysconfig
import threading
from typing import Any

from keras_hpc.job.team import Team

Key = tuple[int, str, int]
GONE = "gone"

# Files of libraries are named from here on, so that the user's own, with their whole path, stand out.
_FOLDERS = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
_PACKAGE = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass
class Stall:
    """A wait of a rank that takes long.

    Attributes:
        team: number of the team.
        what: "plan NUMBER NAME", "allreduce", "collective" or "exchange".
        number: step of the plan, or which of the team's calls of this kind it is.
        detail: name of the tensor, of the collective, or of the exchange and its direction.
        tensor: number of the tensor in the plan; -1: all of them.
        seconds: how long it waits.
        missing: ranks of the job that it waits for, as far as it sees.
    """

    team: int
    what: str
    number: int
    detail: str
    tensor: int
    seconds: float
    missing: list[int]

    @property
    def key(self) -> Key:
        """What all ranks call it."""
        return (self.team, self.what, self.number)

    @property
    def place(self) -> tuple[Any, ...]:
        """What the ranks that wait for the same call it."""
        return (*self.key, "" if self.tensor >= 0 else self.detail)


@dataclasses.dataclass
class State:
    """What a rank does at a moment; JSON can hold it.

    Attributes:
        rank: of the job.
        stalls: its long waits.
        progress: for each team and kind of wait the last number that it has begun, and the tensors not started in it.
        stacks: (name, frames, the innermost first) of each Python thread, the main thread first.
        neighbours: what the kernel says of the processes of its node, by rank: a letter as in /proc, or GONE.
        leaves: whether it has come to the end of its program.
    """

    rank: int
    stalls: list[Stall]
    progress: dict[str, dict[str, tuple[int, list[int]]]]
    stacks: list[tuple[str, list[str]]]
    neighbours: dict[str, str]
    leaves: bool = False

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> State:
        """Return the state that `dataclasses.asdict` made `values` of."""
        return cls(**values | {"stalls": [Stall(**stall) for stall in values["stalls"]]})

    def never_comes(self, stall: Stall) -> bool:
        """Return whether the rank has left, and not come to where others wait."""
        known = stall.what in self.progress.get(str(stall.team), {})  # a plan that has ended may be no more
        return self.leaves and known and not self.arrived(stall)

    def arrived(self, stall: Stall) -> bool:
        """Return whether the rank has come to where others wait."""
        reached, not_started = self.progress.get(str(stall.team), {}).get(stall.what, (0, []))
        if reached != stall.number:
            return reached > stall.number
        return stall.tensor not in not_started if stall.tensor >= 0 else not not_started


def stalls_of(teams: list[Team]) -> list[Stall]:
    """Return the long waits of this rank."""
    return [_stall(team, *row) for team in teams if team.rank >= 0 for row in team.native.stalls()]


def resolved_of(teams: list[Team]) -> list[Stall]:
    """Return the long waits of this rank that came to a good end since the last call."""
    return [_stall(team, *row) for team in teams if team.rank >= 0 for row in team.native.take_resolved()]


def _stall(team: Team, what: str, number: int, detail: str, tensor: int, seconds: float, missing: list[int]) -> Stall:
    return Stall(team.index, what, number, detail, tensor, seconds, [team.ranks[rank] for rank in missing])


def state_of(rank: int, teams: list[Team], places: dict[int, Place], leaves: bool) -> State:
    """Return what this rank does now.

    Args:
        rank: of the job.
        teams: of the job.
        places: of the other ranks of this node.
        leaves: whether it has come to the end of its program.
    """
    progress = {str(team.index): dict(team.native.progress()) for team in teams if team.rank >= 0}
    neighbours = {str(other): place.process() for other, place in places.items()}
    return State(rank, stalls_of(teams), progress, stacks(), neighbours, leaves)


@dataclasses.dataclass
class Place:
    """Where a rank runs.

    Attributes:
        host: name of its host.
        pid: of its process.
        born: when the process began, in the kernel's own unit: numbers of processes are used again.
    """

    host: str
    pid: int
    born: str

    @classmethod
    def mine(cls) -> Place:
        """Return the place of this process."""
        return cls(platform.node(), os.getpid(), _stat("self")[1])  # in a container the number may mean another one

    def process(self) -> str:
        """Return the state of a process on this host: a letter as in /proc, or GONE."""
        letter, born = _stat(self.pid)
        return GONE if born != self.born or letter in "ZXx" else letter


def _stat(pid: int | str) -> tuple[str, str]:
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # before it the name, which may hold anything
    return fields[0], fields[19]


def stacks() -> list[tuple[str, list[str]]]:
    """Return name and frames of each Python thread, the main thread first; not of this one, nor of idle workers."""
    file = os.memfd_create("keras_hpc-stacks")
    try:
        faulthandler.dump_traceback(file)
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    finally:
        os.close(file)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found: list[tuple[bool, str, list[str]]] = []
    for block in re.split(r"^(?=(?:Current thread|Thread) 0x)", text, flags=re.MULTILINE):
        if not block.startswith("Thread"):  # the current one is the watchdog
            continue
        number = int(block.split()[1], 16)
        frames = [_shortened(line.strip()) for line in block.splitlines()[1:] if line.startswith("  ")]
        if number == main or not all(_is_of_pool(frame) for frame in frames):
            found.append((number != main, names.get(number, "a thread of native code"), frames))
    return [(name, frames) for _, name, frames in sorted(found)]


def _shortened(frame: str) -> str:
    if frame.startswith(f'File "{_PACKAGE}/'):
        return frame.replace(f"{_PACKAGE.parent}/", "", 1)
    for folder in _FOLDERS:
        if frame.startswith(f'File "{folder}/'):
            return frame.replace(f"{folder}/", "", 1)
    return frame


def _is_of_pool(frame: str) -> bool:
    return frame.startswith(('File "threading.py"', 'File "concurrent/futures/', 'File "queue.py"'))


def own_frame(frames: list[str]) -> str:
    """Return the innermost frame of the user's own code, or the innermost."""
    own = (frame for frame in frames if frame.startswith('File "/'))
    return next(own, frames[0] if frames else "no Python code")
