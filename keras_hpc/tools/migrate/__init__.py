# SPDX-License-Identifier: Apache-2.0
"""`keras-hpc migrate`: takes Horovod out of a Keras script, and marks what it cannot judge."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from pathlib import Path
from typing import Any

from keras_hpc.tools.migrate.rules import MARK, NothingToDo, migrate


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "migrate",
        help="take Horovod out of a Keras script",
        description="Prints the difference that takes Horovod out of a Keras script and puts keras_hpc in its place. "
        f"What it cannot judge it leaves as it is, marks with a comment that begins with `{MARK}`, and lists on "
        "standard error. Read the difference before you keep it.",
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file that imports horovod")
    parser.add_argument("--write", action="store_true", help="change the file, instead of printing the difference")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the difference, or change the file."""
    script: Path = arguments.script
    try:
        before = script.read_bytes()
        after, marks = migrate(before, str(script))
    except OSError as error:
        sys.exit(f"keras-hpc migrate: there is no such script. Received: {script}, {error.strerror}")
    except (SyntaxError, ValueError) as error:
        sys.exit(f"keras-hpc migrate: cannot read this script. Expected Python in UTF-8. Received: {script}, {error}")
    except NothingToDo as error:
        sys.exit(f"keras-hpc migrate: {error}. Received: {script}")
    if arguments.write:
        try:
            _write(script.resolve(), after)
        except OSError as error:
            sys.exit(f"keras-hpc migrate: the script stays as it is. Received: {error}")
        print(f"keras-hpc migrate: {script} is changed", file=sys.stderr)
    else:
        old, new = (text.decode().splitlines(keepends=True) for text in (before, after))
        sys.stdout.writelines(difflib.unified_diff(old, new, f"a/{script}", f"b/{script}"))
    for number, text in marks:
        print(f"{script}:{number}: {text}", file=sys.stderr)
    if marks:
        print(f"keras-hpc migrate: {len(marks)} place(s) to look at, marked `{MARK}`", file=sys.stderr)
    return 0


def _write(script: Path, text: bytes) -> None:
    """Put another script in the place of one, whole or not at all."""
    part = script.with_name(f".{script.name}.new")
    try:
        part.write_bytes(text)
        shutil.copymode(script, part)
        part.replace(script)
    finally:
        part.unlink(missing_ok=True)
