# SPDX-License-Identifier: Apache-2.0
"""What a GPU does for this project: `benchmarks/gpu/one_gpu.sh` runs all of it on one, with two ranks that share it."""

from __future__ import annotations

import json
import sys


def say(probe: str, what: str, value: float, unit: str, target: str = "", *, holds: bool | None = None) -> None:
    """Print what was measured, one JSON object a line, as probe.cpp does; `report.py` reads them."""
    found = {"probe": probe, "what": what, "value": value, "unit": unit, "target": target, "holds": holds}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


# In the order of the report.
EXPECTED = ["P1", "P2", "P3", "P4", "P5", "P6", "P7", "S1", "S2", "S3", "C1", "C2", "J1", "N1", "fit", "allreduce"]
