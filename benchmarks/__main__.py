# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: how fast the engine is on this machine, with this MPI."""

from __future__ import annotations

import argparse
import sys

from benchmarks import kinds


def main() -> int:
    """Runs the measurement that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measures the engine of keras_hpc against the MPI library."
    )
    kinds.add_commands(parser.add_subparsers(dest="kind", required=True, metavar="KIND"))
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
