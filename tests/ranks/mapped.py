"""What a rank has mapped from /dev/shm, for the tests that look for what a failed job leaves there."""

import sys
from pathlib import Path

PREFIX = "/dev/shm/"


def tell():
    """Prints the names that this process maps, whether or not they still exist: `MAPS NAME`, a line for each."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.partition(PREFIX)[2].removesuffix(" (deleted)") for line in lines if PREFIX in line}
    sys.stdout.writelines(f"MAPS {name}\n" for name in sorted(names))
    sys.stdout.flush()
