# SPDX-License-Identifier: Apache-2.0
"""`keras-hpc trace`: one file for Perfetto of what the ranks of a job have recorded, and frameworks have profiled."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from keras_hpc.job import trace_file
from keras_hpc.tools import profiles


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "trace",
        help="put together what ranks have recorded, and what frameworks have profiled",
        description="Makes a file for chrome://tracing and ui.perfetto.dev of what ranks have written under "
        "init(trace=PATH), for a job that did not come to its end: one that did has made PATH itself. With --profile "
        "it has what the framework itself has profiled at that time, too, by the same clock.",
    )
    parser.add_argument(
        "path", type=Path, help="PATH.parts, or the folder of one job in it (else: of the newest); PATH"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        action="append",
        default=[],
        metavar="PROFILE",
        help="a folder or file that TensorFlow's, JAX's or PyTorch's profiler has written; several times for more",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: the folder's name with .json)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and return the exit status."""
    path: Path = arguments.path
    try:
        if path.is_file():
            return _add_profiles(path, arguments.profile, arguments.out or _beside(path))
        folder = _job(path)
        out: Path = arguments.out or folder.with_suffix(".json")
        count = trace_file.merge(folder, out)
        print(f"{out}: {count} rank{'s' * (count > 1)}")
        return _add_profiles(out, arguments.profile, out) if arguments.profile else 0
    except (trace_file.TraceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _job(folder: Path) -> Path:
    """Return the folder of a job: this one, or the newest in it."""
    jobs = sorted(path for path in folder.glob("*") if path.is_dir())
    if not jobs or list(folder.glob(f"rank*{trace_file.SUFFIX}")):
        return folder
    if jobs[:-1]:
        print(f"of {len(jobs)} jobs the newest, {jobs[-1].name}; others: {', '.join(job.name for job in jobs[:-1])}")
    return jobs[-1]


def _beside(file: Path) -> Path:
    """Return a name for what is made of a file."""
    name, dot, end = file.name.partition(".")
    return file.with_name(f"{name}-with-profile{dot}{end}")


def _add_profiles(trace: Path, found: list[Path], out: Path) -> int:
    if not found:
        raise trace_file.TraceError(f"This is one file already: --profile says what to add. Received: {trace}")
    profiles.add(trace, found, out, print)
    print(out)
    return 0
