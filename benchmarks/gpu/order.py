# SPDX-License-Identifier: Apache-2.0
"""J1: how early XLA has scheduled the starts of reductions: `python -m benchmarks.gpu.order FOLDER`.

FOLDER: what `XLA_FLAGS=--xla_dump_to=FOLDER` wrote. A scheduled program lists its instructions in the order in which
they are queued. Of the starts, those before the last gradient's kernel are the ones that overlap with backward.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.gpu import say

_START = "khpc_jax_start_on"


def early(program: str) -> tuple[int, int]:
    """Return how many starts of a scheduled program come before what the last of them reduces exists, and of how many.

    The last start itself is not counted.
    """
    entry = program[program.index("\nENTRY ") :]
    lines = re.findall(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$", entry, re.M)
    place = {name: number for number, (name, _) in enumerate(lines)}
    starts = [number for number, (_, text) in enumerate(lines) if f'custom_call_target="{_START}"' in text]
    if len(starts) < 2:
        return 0, 0
    operands = re.findall(r"%?([\w.-]+)", lines[starts[-1]][1].split("custom-call(")[1].split(")")[0])
    # What gives it a value, behind renamings.
    last = max(_kernel(lines, place, name) for name in operands if name in place)
    return sum(number < last for number in starts[:-1]), len(starts) - 1


def _kernel(lines: list[tuple[str, str]], place: dict[str, int], name: str) -> int:
    while found := re.search(r"\s(?:bitcast|get-tuple-element|copy)\([^%)]*%?([\w.-]+)", lines[place[name]][1]):
        if found[1] not in place:
            break
        name = found[1]
    return place[name]


def main(folder: Path) -> None:
    """Print what the programs of a folder say."""
    before = total = 0
    for file in sorted(folder.glob("*after_optimizations.txt")):
        text = file.read_text()
        if _START in text and "is_scheduled=true" in text:
            here, of = early(text)
            before, total = before + here, total + of
    part = before / total if total else -0.01
    say("J1", f"starts before the last gradient's kernel, of {total}", 100 * part, "%", ">= 80", holds=part >= 0.8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
