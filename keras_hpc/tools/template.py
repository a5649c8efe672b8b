# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc template`: job scripts to edit, with the settings that matter."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "templates"


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "template",
        help="print a job script to edit",
        description="Prints a job script for a batch system: edit what it asks for, and the name of your script.",
    )
    parser.add_argument("system", choices=sorted(file.stem for file in _FOLDER.glob("*.sh")), help="batch system")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    sys.stdout.write((_FOLDER / f"{arguments.system}.sh").read_text())
    return 0
