# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc`: tools beside the library."""

import argparse
import sys

from keras_hpc.tools import doctor, plan, run, template


def main() -> int:
    """Run the subcommand that the command line names, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m keras_hpc", description="Tools of keras_hpc.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_command(commands)
    run.add_command(commands)
    plan.add_command(commands)
    template.add_command(commands)
    arguments = parser.parse_args()
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
