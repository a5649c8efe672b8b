"""How a job must end once a rank has failed: `FAILS AT SECONDS` is what that rank said just before."""

import re
from pathlib import Path

END_SECONDS = 20


def check_end(done) -> None:
    """Soon after, not having trained to the end, and with no shared memory left behind (`ranks/mapped.py`)."""
    failed_at = float(re.search(r"FAILS AT ([\d.]+)", done.output)[1])
    assert done.ended_at - failed_at < END_SECONDS
    assert "trained to the end" not in done.output
    mapped = re.findall("^MAPS (.+)$", done.output, re.MULTILINE)
    assert mapped, "MPICH shares memory through a file"
    assert not [name for name in mapped if Path("/dev/shm", name).exists()]
