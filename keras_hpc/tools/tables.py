# SPDX-License-Identifier: Apache-2.0
"""Tables of the command line: by rich on a terminal, if it is there, and else plain text, which programs can read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: in the header.
        width: characters at least.
        right: whether it is aligned to the right, as numbers are.
    """

    name: str
    width: int = 0
    right: bool = False


def pairs(rows: Mapping[str, str], title: str = "", width: int = 22) -> None:
    """Print names and values.

    Args:
        rows: values by name.
        title: a line before them, which are indented then.
        width: of the names.
    """
    console = _console()
    if console is None:
        lines = [title] if title else []
        lines += [f"{'  ' if title else ''}{name:<{width}}{value}" for name, value in rows.items()]
        print("\n".join(lines), flush=True)
        return
    from rich.text import Text

    table = _rich_table(title)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))  # Text: brackets in a path are no markup
    console.print(table)


def hints(lines: Sequence[str]) -> None:
    """Print what to look at."""
    console = _console()
    for line in lines:
        if console is None:
            print(f"hint: {line}", flush=True)
        else:
            console.print("hint:", line, style="yellow", markup=False)


class Grid:
    """Rows of several columns, printed as soon as they are known; the first ones with a header.

    Args:
        columns: from left to right.
        title: a line before them, which are indented then.
    """

    def __init__(self, columns: Sequence[Column], title: str = "") -> None:
        self._columns, self._title = columns, title
        self._first = True

    def show(self, rows: Sequence[Sequence[str]]) -> None:
        """Print rows; those of a later call come below, in columns that are as wide."""
        widths = [max(column.width, len(column.name)) for column in self._columns]
        if self._first:
            widths = [max(width, *(len(row[i]) for row in rows)) for i, width in enumerate(widths)]
        first, self._first = self._first, False
        console = _console()
        if console is None:
            lines = [self._title] if first and self._title else []
            header = [[column.name for column in self._columns]] if first else []
            for row in (*header, *rows):
                cells = zip(row, widths, self._columns, strict=True)
                line = "  ".join(f"{cell:{'>' if column.right else '<'}{width}}" for cell, width, column in cells)
                lines.append("  " * bool(self._title) + line.rstrip())
            print("\n".join(lines), flush=True)
            return
        from rich.text import Text

        table = _rich_table(self._title if first else "")
        table.show_header = first
        for column, width in zip(self._columns, widths, strict=True):
            table.add_column(column.name, justify="right" if column.right else "left", min_width=width)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)


def environment() -> dict[str, str]:
    """Return what tells a process whose output comes to our terminal through a pipe that it does."""
    if not sys.stdout.isatty() or "FORCE_COLOR" in os.environ or "NO_COLOR" in os.environ:
        return {}
    return {"FORCE_COLOR": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}


def _console() -> Any:
    """Return rich's console where output is a terminal, else None."""
    if not sys.stdout.isatty() and not os.environ.get("FORCE_COLOR"):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def _rich_table(title: str) -> Any:
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.show_header = False
    return table
