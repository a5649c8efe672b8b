# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> str:
    """Returns the processor, its number of cores, and the kernel, in a few words."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"
