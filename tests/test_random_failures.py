"""The engine over MPI, with ranks that fail at random moments: nothing wrong, nothing unclear, nothing left behind."""

import json
import os
import random
import sys

import moments
import pytest
from launch import ROOT, child_environment, launch

pytestmark = [pytest.mark.mpi, pytest.mark.soak]

SCRIPT = ROOT / "tests" / "ranks" / "random_failures.py"
JOBS = int(os.environ.get("RANDOM_FAILURES", "10"))
ROUNDS = 6  # and then one in which a rank is killed
# The launcher ends a job when one of its processes ends without MPI_Finalize: of that one it shall not know.
SURVIVOR = """folder=$1; shift; "$@"; status=$?
[ $status -eq 137 ] || exit $status
for i in $(seq 600); do [ -e $folder/over ] && break; sleep 0.1; done"""
# UCX reads the memory of other processes of the host, though they are of other nodes, and ends who cannot any more.
_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2", "UCX_TLS": "^cma"}
WAYS = {
    "one host": {},
    "two nodes": _NODES,
    "two nodes, TCP": _NODES | {"UCX_TLS": "tcp,self"},
    "a node for each rank": {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "^cma"},
}
# Memory that is freed or new has no zeros, and each free looks at what lies around it. In a forked child of several
# threads this allocator of glibc may wait for ever, in the fork itself.
HEAP = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}


def play(folder, seed, way, rounds=ROUNDS, kinds=""):
    """Runs a job, and returns what is wrong with it, and its output."""
    folder.mkdir()
    size = random.Random(seed).choice([2, 3, 3, 4, 4])
    env = child_environment("jax", WAYS[way] | {"KINDS": kinds}, lean=True)
    heap = {} if kinds == "fork" else HEAP
    command = ["env", *(f"{name}={value}" for name, value in heap.items()), sys.executable]
    survivor = ["sh", "-c", SURVIVOR, "sh", str(folder)]
    done = launch(size, [*survivor, *command, str(SCRIPT), str(folder), str(seed), str(rounds)], timeout=600, env=env)
    found = [f"left {done.leaked_processes} behind"] if done.leaked_processes else []
    logs = [(folder / f"rank-{rank}") for rank in range(size)]
    lines = [log.read_text().splitlines() if log.exists() else [] for log in logs]
    nodes = json.loads((folder / "nodes").read_text()) if (folder / "nodes").exists() else [0] * size
    # MPICH over UCX may, in a send to a rank that has ended: docs/design.md.
    crashed = max(nodes) > 0 and "Segmentation fault" in done.output
    for number in range(rounds + 1):
        last = number == rounds
        one = moments.draw(seed, number, size, last=last, own_nodes=way == "one host", kinds=kinds)
        told = [moments.Told(**t) for own in lines if len(own) > number for t in json.loads(own[number])]
        if last and crashed:
            continue
        faults = moments.faults(one, told, nodes)
        found += [f"seed {seed}, {way}, round {number}, {one}: {fault}" for fault in faults]
    return found, done.output


@pytest.mark.timeout(JOBS * 300)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_fail_at_random_moments(way, tmp_path):
    source = random.Random()
    for number in range(JOBS):
        seed = source.randrange(10**6)
        found, output = play(tmp_path / str(number), seed, way, kinds="fork" if number % 4 == 3 else "")
        assert not found, "\n".join([*found, output[-4000:]])
