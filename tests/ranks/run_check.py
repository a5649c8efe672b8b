"""What each rank of a check runs: `mpiexec -n N python tests/ranks/run_check.py check_x.py SECONDS [FOLDER]`.

Becomes `python -m mpi4py -m pytest -x check_x.py`: under `-m mpi4py` a rank that fails aborts the job, and `-x` keeps
it from communicating after its first failure. With FOLDER, each rank writes to a file of its own there.
"""

import os
import sys
from pathlib import Path

check, seconds, *folder = sys.argv[1:]
if folder:
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMIX_RANK") or "0"
    log = os.open(Path(folder[0]) / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
# A rank that hangs shows where, shortly before the launcher's own limit ends the job.
options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={seconds}", "--tb=short"]
os.execv(sys.executable, [sys.executable, "-m", "mpi4py", "-m", "pytest", *options, check])
