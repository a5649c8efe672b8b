# SPDX-License-Identifier: Apache-2.0
"""`keras-hpc`, or `python -m keras_hpc`: tools beside the library."""

import argparse
import os
import sys
from pathlib import Path

import keras_hpc
from keras_hpc.tools import bench, demo, doctor, migrate, plan, run, template, trace


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        prog: what it was started as.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Tools of keras_hpc. Each has a --help of its own.")
    parser.add_argument("--version", action="version", version=f"keras_hpc {keras_hpc.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for tool in (demo, doctor, run, plan, bench, template, migrate, trace):
        tool.add_command(commands)
    return parser


def main() -> int:
    """Run the subcommand that the command line names, and return the exit status."""
    as_module = Path(sys.argv[0]).name == "__main__.py"
    arguments = make_parser("python -m keras_hpc" if as_module else "keras-hpc").parse_args()
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
