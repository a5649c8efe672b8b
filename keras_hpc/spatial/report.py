# SPDX-License-Identifier: Apache-2.0
"""The table that `print(plan)` shows."""

from __future__ import annotations

from collections.abc import Sequence

Line = tuple[str, str, str, int, int, str]  # name, shape of the output, how it is split, rows, bytes, note


def table(head: str, lines: Sequence[Line]) -> str:
    """Return a table: what each layer gives, how it is split, and what the rank that receives most receives."""
    rows = [("layer", "output", "", "receives, for each sample, forward"), *map(_columns, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    text = ["  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row[3]]).rstrip() for row in rows]
    received = sum(line[4] for line in lines)
    whole = sum(line[2] == "whole" for line in lines)
    end = (
        f"{_size(received)} in all; {whole} of {len(lines)} layers give something whole, on all ranks of a group alike"
    )
    return "\n".join([head, *text, end])


def _columns(line: Line) -> tuple[str, str, str, str]:
    name, shape, split, rows, nbytes, note = line
    received = f"{rows} row{'s' if rows != 1 else ''}, {_size(nbytes)}" if rows else ""
    return name, shape, split, ", ".join(text for text in (received, note) if text)


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
