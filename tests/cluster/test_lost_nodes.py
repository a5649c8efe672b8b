"""The recipe of docs/howto/checkpoints.md: an allocation with --no-kill outlives a node, and the job goes on."""

import json
import re

import pytest
from kills import TRAIN

pytestmark = [pytest.mark.mpi, pytest.mark.soak]

# Ends slurmd and all that it has started on a host, as a node that fails does, takes its memory, and tells Slurm.
LOSE = """
import os, signal, subprocess, sys
name, spaces = sys.argv[1], {}
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        spaces.setdefault(os.readlink(f"/proc/{process}/ns/uts"), []).append(int(process))
    except OSError:
        continue
for processes in spaces.values():
    own = ["nsenter", "-t", str(processes[0]), "--uts", "--mount"]
    if subprocess.run([*own, "hostname"], capture_output=True, text=True).stdout.strip() != name:
        continue
    subprocess.run([*own, "sh", "-c", "rm -rf /dev/shm/*"])
    for process in processes:
        if open(f"/proc/{process}/comm").read().strip() not in ("cat", "sh"):  # what keeps the host's network
            os.kill(process, signal.SIGKILL)
subprocess.run(["scontrol", "update", f"nodename={name}", "state=DOWN", "reason=lost"], check=True)
"""
JOB = f"""
timeout 100 python -m keras_hpc run --elastic -n "$SLURM_NTASKS" {TRAIN} /dev/shm/run 5 0.2 > log.txt 2>&1 &
job=$!
while ! grep -q "steps an epoch" log.txt; do sleep 0.1; done
sleep 4  # a checkpoint or two
python lose.py host2
wait $job
echo "ended with $?" >> log.txt
"""


def test_a_node_fails(slurm, tmp_path, run_ranks):
    (tmp_path / "lose.py").write_text(LOSE)
    (tmp_path / "job.sh").write_text(JOB)
    environment = {"KERAS_BACKEND": "torch"}
    done = slurm(2, "salloc --no-kill -N2 --ntasks-per-node=2 bash job.sh; cat log.txt", env=environment)
    assert re.findall(r"starts again with (\d)", done.output) == ["2"], done.output
    assert "goes on from /dev/shm/run/step-" in done.output, done.output
    assert "ended with 0" in done.output, done.output
    (said,) = re.findall(r'\{"ranks": 2.*\}', done.output)
    assert json.loads(said)["digest"] in run_ranks(1, [TRAIN], backend="torch").output
