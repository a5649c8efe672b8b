# SPDX-License-Identifier: Apache-2.0
"""Which way an allreduce takes: measured by the engine, kept for the next job, or given by the user.

`KERAS_HPC_ALLREDUCE` overrides it, by ranges of sizes: `private:0-1Ki=slot,1Ki-=staged;segment:0-=push` for arrays, and
`network:0-64Ki=recursive_doubling,64Ki-=ring` for what each rank sends to other nodes, of arrays and gradients; and
`device:0-=staged` for plans with tensors on GPUs, by their bytes (`device_plans.py` measures these).

One job may measure while others disturb it. So the next one measures again, and a third one if these two disagree.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

from keras_hpc import _native
from keras_hpc.job import launch

VARIABLE = "KERAS_HPC_ALLREDUCE"
_WAYS = {
    "private": ("slot", "staged", "library"),
    "segment": ("slot", "push", "staged", "library"),
    "network": ("recursive_doubling", "rabenseifner", "ring", "pairwise", "radix_k", "library"),
    "device": ("staged", "peer", "nccl", "hierarchical", "mpi"),
}
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_SLOT_BYTES = 64 << 10
ANY = 2**63  # larger than any array
_MEASUREMENTS = 3  # at most, of each class of sizes
_VERSION = 6  # of what is kept: ways or classes of sizes have changed where it differs


Choice = list[Any]  # place, first byte, end, way
_Kept = dict[tuple[str, int, int], list[str]]  # ways that jobs have measured, of each place, first byte and end


def load(key: str, number: int) -> list[Choice]:
    """Return what earlier jobs measured, if that is settled, and then what the user wants.

    Args:
        key: names jobs that may share their measurements; see `key_of`.
        number: of the team. Of plans on GPUs only team 0 does what was measured, see `device_plans.py`.

    Raises:
        ValueError: `KERAS_HPC_ALLREDUCE` is not understood.
    """
    settled = [[*where, way] for where, ways in _read().get(key, {}).items() if (way := _settled(ways))]
    kept = [choice for choice in settled if number == 0 or choice[0] != "device"]
    return [*kept, *parse(os.environ.get(VARIABLE, ""))]


def save(team: _native.Team, rank: int, key: str) -> None:
    """Write what the team has measured to disk, on its first rank. What cannot be written is measured again."""
    choices = known(team)
    if rank != 0 or os.environ.get(VARIABLE) or not choices:
        return
    everything = _read()
    kept = everything.setdefault(key, {})
    new = {
        (place, begin, end): way
        for place, begin, end, way in choices
        if not _settled(kept.get((place, begin, end), []))
    }
    if not new:
        return
    for where, way in new.items():
        kept.setdefault(where, []).append(way)
    found = {key: [[*where, ways] for where, ways in kept.items()] for key, kept in everything.items()}
    text = json.dumps({"version": _VERSION, "choices": found})
    with contextlib.suppress(OSError, RuntimeError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=_file().parent)
        try:
            with open(descriptor, "w") as file:
                file.write(text)
            Path(name).replace(_file())
        except OSError:  # a full disk: nothing stays
            Path(name).unlink()


def known(team: _native.Team) -> list[Choice]:
    """Return what the team knows; of those that fit a size, the last counts."""
    return [list(choice) for choice in reversed(team.choices())]


def way_on_devices(team: _native.Team, nbytes: int) -> str:
    """Return how a plan of so many bytes is reduced whose tensors are on GPUs; empty: it is not known."""
    fitting = [way for place, begin, end, way in known(team) if place == "device" and begin <= nbytes < end]
    return str(fitting[-1]) if fitting else ""


def key_of(world: launch.World) -> str:
    """Return a name for jobs that may share their measurements: same first host, MPI, shape and cores of a rank."""
    about = [platform.node(), launch.mpi_version(world), world.node_of_rank, len(os.sched_getaffinity(0))]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def describe(team: _native.Team) -> str:
    """Return what the team knows, for people: "private 64 B: slot, 4 KiB: staged"."""
    choices = known(team)
    parts = []
    for place in _WAYS:
        ways = {}
        for nbytes in (16 * 4**k for k in range(12)):
            fitting = [way for where, begin, end, way in choices if where == place and begin <= nbytes < end]
            if fitting:
                ways[_size(nbytes)] = fitting[-1]
        if ways:
            parts.append(f"{place} " + ", ".join(f"{size}: {way}" for size, way in ways.items()))
    return "; ".join(parts)


def parse(text: str) -> list[Choice]:
    """Read the user's wishes.

    Raises:
        ValueError: the text is not understood, or asks for what cannot be.
    """
    choices: list[Choice] = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        place, _, ranges = part.partition(":")
        for one in ranges.split(","):
            match = re.fullmatch(r"\s*(\d+)(Ki|Mi|Gi)?-(?:(\d+)(Ki|Mi|Gi)?)?=(\w+)\s*", one)
            if place not in _WAYS or not match or match[5] not in _WAYS[place]:
                raise ValueError(
                    f"{VARIABLE} names a way for each range of sizes. Expected for example 'private:0-1Ki=slot,"
                    f"1Ki-=staged;segment:0-=push;network:0-=ring' with the ways {', '.join(_WAYS['segment'])} "
                    f"for arrays, {', '.join(_WAYS['network'])} between nodes, and {', '.join(_WAYS['device'])} for "
                    f"'device'. Received: {part!r}"
                )
            begin = int(match[1]) * _UNITS[match[2] or ""]
            end = int(match[3]) * _UNITS[match[4] or ""] if match[3] else ANY
            if match[5] == "slot" and end > _SLOT_BYTES + 1:
                raise ValueError(f"{VARIABLE}: the way 'slot' takes 64 KiB at most. Received: {one!r}")
            choices.append([place, begin, end, match[5]])
    return choices


def _size(nbytes: int) -> str:
    unit = next((unit for unit in ("Mi", "Ki") if nbytes >= _UNITS[unit]), "")
    return f"{nbytes // _UNITS[unit]} {unit}B"


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keras_hpc" / "allreduce.json"


def _settled(ways: list[str]) -> str:
    """Return the way that two measurements have found, or the last of several; empty: measure again."""
    ((way, times),) = collections.Counter(reversed(ways)).most_common(1) or [("", 0)]
    return way if times > 1 or len(ways) >= _MEASUREMENTS else ""


def _read() -> dict[str, _Kept]:
    """Return the kept choices that are as this version writes them: a cache that was damaged must not stop a job."""
    try:
        kept = json.loads(_file().read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home, as in containers
        return {}
    if not isinstance(kept, dict) or kept.get("version") != _VERSION or not isinstance(kept.get("choices"), dict):
        return {}
    return {
        key: {(place, begin, end): ways for place, begin, end, ways in filter(_is_kept, found)}
        for key, found in kept["choices"].items()
        if isinstance(found, list)
    }


def _is_kept(found: Any) -> bool:
    if not isinstance(found, list) or len(found) != 4 or not isinstance(found[3], list):
        return False
    place, begin, end, ways = found
    numbers = all(type(number) is int for number in (begin, end)) and 0 <= begin < end <= ANY
    known = isinstance(place, str) and place in _WAYS and all(way in _WAYS[place] for way in ways)
    return numbers and known and ("slot" not in ways or end <= _SLOT_BYTES + 1)
