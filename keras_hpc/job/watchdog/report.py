# SPDX-License-Identifier: Apache-2.0
"""The report of ranks that wait too long: who has come, who has not, and where each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keras_hpc.job.watchdog.state import GONE, Place, Stall, State, own_frame

_WHY_SILENT = {
    GONE: "its process has ended",
    "T": "its process is stopped (by SIGSTOP, or a debugger)",
    "t": "its process is stopped (by a debugger)",
    "D": "it waits inside the kernel, perhaps for a file system",
    "R": "its process computes, but runs no Python: perhaps native code that holds the GIL",
    "S": "its process lives, but runs no Python: perhaps native code that holds the GIL",
}


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0 to 2, 5"."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}{' to ' if run[2:] else ', '}{run[-1]}" for run in runs]
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(parts)}"


def where_text(stall: Stall) -> str:
    """Return where a rank waits, as text."""
    if stall.what.startswith("plan "):
        tensor = f", tensor '{stall.detail}'" if stall.detail else ""
        return f"step {stall.number} of plan '{stall.what.split(' ', 2)[2]}' (team {stall.team}){tensor}"
    name = f"exchange {stall.detail}" if stall.what == "exchange" else stall.detail or stall.what
    return f"{name} (team {stall.team}, call {stall.number})"


def why_silent(rank: int, states: Iterable[State]) -> str:
    """Return why a rank does not answer, going by what its neighbours see."""
    seen = (state.neighbours[str(rank)] for state in states if str(rank) in state.neighbours)
    return _WHY_SILENT.get(next(seen, ""), "nothing is known of its process")


def has_ended(rank: int, states: Iterable[State]) -> bool:
    """Return whether a neighbour sees that the process of a rank is no more."""
    return any(state.neighbours.get(str(rank)) == GONE for state in states)


def has_left(states: Mapping[int, State], members: Mapping[int, Sequence[int]]) -> tuple[int, Stall] | None:
    """Return a rank that has left without its part of what others wait for, and that wait, if there is one."""
    waits = (stall for state in states.values() for stall in state.stalls)
    left = ((rank, s) for s in waits for rank in members[s.team] if rank in states and states[rank].never_comes(s))
    return next(left, None)


def text(
    states: dict[int, State], places: Sequence[Place], members: Mapping[int, Sequence[int]], timeout_seconds: float
) -> str:
    """Return the report.

    Args:
        states: of the ranks that answer.
        places: of all ranks.
        members: ranks of the job that belong to each team.
        timeout_seconds: when the job ends.
    """
    silent = [rank for rank in range(len(places)) if rank not in states]
    lines: list[str] = []
    late: set[int] = set(silent)
    for stall in _longest(states):
        same = {rank: s for rank, state in states.items() for s in state.stalls if s.place == stall.place}
        seen = {rank for s in same.values() for rank in s.missing}
        arrived: list[int] = []
        missing: list[int] = []
        unknown: list[int] = []
        for rank in members[stall.team]:
            if rank in states:
                # Where ranks make different calls, they wait at the same number, but not for the same.
                elsewhere = any(s.key == stall.key and s.place != stall.place for s in states[rank].stalls)
                here = rank in same or (states[rank].arrived(stall) and not elsewhere)
                (arrived if here else missing).append(rank)
            else:
                (missing if rank in seen else unknown).append(rank)
        late.update(missing)
        lines.append(f"{ranks_text(same)} waited {stall.seconds:.0f} s in {where_text(stall)}.")
        for word, ranks in (("arrived", arrived), ("missing", missing), ("not known", unknown)):
            if ranks:
                lines.append(f"  {word}: {ranks_text(ranks)}")
    for rank in silent:
        lines.append(f"{_named(rank, places)} does not answer: {why_silent(rank, states.values())}.")
    lines += _stacks(states, places, late or set(states))
    lines.append(f"The job ends when a wait reaches {timeout_seconds:g} s (timeout_seconds).")
    return "".join(f"keras_hpc: {line}\n" for line in lines)


def own_text(state: State, stall: Stall, whole: bool) -> str:
    """Return what a rank writes into its own log.

    Args:
        state: of the rank.
        stall: a wait that rank 0 asks about.
        whole: with the rank's stack, even if it only waits for others.
    """
    lines = _waits(state)
    waits = state.arrived(stall)
    if not lines:
        does = "has arrived there" if waits else "is elsewhere"
        lines = [f"other ranks wait in {where_text(stall)}; rank {state.rank} {does}."]
    if whole or not waits:
        lines += [f"rank {state.rank} is here, innermost first:", *(f"  {line}" for line in _lines_of(state))]
    return "".join(f"keras_hpc: {line}\n" for line in lines)


def without_rank_0(state: State, places: Sequence[Place]) -> str:
    """Return what a rank that waits writes into its own log where rank 0 does not answer."""
    lines = [*_waits(state), f"{_named(0, places)} does not answer: {why_silent(0, [state])}."]
    lines += [f"rank {state.rank} is here, innermost first:", *(f"  {line}" for line in _lines_of(state))]
    return "".join(f"keras_hpc: {line}\n" for line in lines)


def _waits(state: State) -> list[str]:
    return [
        f"rank {state.rank} waited {stall.seconds:.0f} s in {where_text(stall)}"
        + (f", as far as it sees for {ranks_text(stall.missing)}." if stall.missing else ".")
        for stall in state.stalls
    ]


def _longest(states: dict[int, State]) -> list[Stall]:
    """The waits, the longest first, each once."""
    found: dict[tuple[Any, ...], Stall] = {}
    for stall in sorted((s for state in states.values() for s in state.stalls), key=lambda s: -s.seconds):
        found.setdefault(stall.place, stall)
    return list(found.values())


def _stacks(states: dict[int, State], places: Sequence[Place], late: set[int]) -> list[str]:
    """Ranks with equal stacks together: of those that are late all of it, of those that wait for them one line."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, state in sorted(states.items()):
        if rank in late:
            lines = tuple(_lines_of(state))
        else:
            lines = (own_frame(state.stacks[0][1]) if state.stacks else "no Python code",)
        groups.setdefault(lines, []).append(rank)
    found = []
    for group in sorted(groups.items(), key=lambda item: not late.intersection(item[1])):
        lines, ranks = group
        who = _named(ranks[0], places) if len(ranks) == 1 else ranks_text(ranks)
        verb = "is" if len(ranks) == 1 else "are"
        if late.intersection(ranks):
            found += [f"{who} {verb} here, innermost first:", *(f"  {x}" for x in lines)]
        else:
            found.append(f"{who} {verb} at {lines[0]}")
    return found


def _lines_of(state: State) -> list[str]:
    if len(state.stacks) == 1:
        return state.stacks[0][1]
    return [line for name, frames in state.stacks for line in (f"{name}:", *(f"  {frame}" for frame in frames))]


def _named(rank: int, places: Sequence[Place]) -> str:
    return f"rank {rank} ({places[rank].host}, process {places[rank].pid})"
