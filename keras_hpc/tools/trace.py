# SPDX-License-Identifier: Apache-2.0
"""`keras-hpc trace`: one file for Perfetto of what the ranks of a job have recorded, of one that was killed, too."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from keras_hpc.job import trace_file


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "trace",
        help="put together what the ranks of a job that was killed have recorded",
        description="Makes a file for chrome://tracing and ui.perfetto.dev of what ranks have written under "
        "init(trace=PATH), for a job that did not come to its end: one that did has made PATH itself.",
    )
    parser.add_argument("folder", type=Path, help="PATH.parts, or the folder of one job in it (else: of the newest)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: the folder's name with .json)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and return the exit status."""
    folder: Path = arguments.folder
    jobs = sorted(path for path in folder.glob("*") if path.is_dir())
    if jobs and not list(folder.glob(f"rank*{trace_file.SUFFIX}")):
        folder = jobs[-1]
        if jobs[:-1]:
            print(f"of {len(jobs)} jobs the newest, {folder.name}; others: {', '.join(job.name for job in jobs[:-1])}")
    out: Path = arguments.out or folder.with_suffix(".json")
    try:
        count = trace_file.merge(folder, out)
    except (trace_file.TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{out}: {count} rank{'s' * (count > 1)}")
    return 0
