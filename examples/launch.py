# SPDX-License-Identifier: Apache-2.0
"""Runs an example's module on a number of ranks, each with a core and a thread of its own, as measurements want it."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",  # as init() sets it: with one, weight gradients come after all else of backward
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def run(module, arguments, *, ranks=1, core=0, timeout, output=None):
    """Runs a module to its end: one rank without MPI, more by `keras_hpc run`.

    Args:
        module: name, as after `python -m`.
        arguments: its own.
        ranks: how many.
        core: of the first rank, counted among those of this process.
        timeout: seconds.
        output: a file for what it prints; None: what this process prints to.

    Raises:
        RuntimeError: it failed.
    """
    launcher = ["keras_hpc", "run", "-n", str(ranks), "--no-label", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launcher, module, *map(str, arguments)]
    sys.stdout.flush()
    with _keeping_to(core, ranks):
        done = subprocess.run(
            command, env=os.environ | ENVIRONMENT, timeout=timeout, check=False, stdout=output, stderr=output
        )
    if done.returncode:
        raise RuntimeError(f"{module} on {ranks} ranks ended with {done.returncode}; see its messages")


def two_at_a_time(work, items):
    """Calls `work(item, core)` for each item, so that two cores are busy all the time, as with two ranks.

    Args:
        work: calls `run` for one rank, on that core.
        items: whatever it needs.
    """
    with ThreadPoolExecutor(min(2, len(os.sched_getaffinity(0)))) as pool:
        for done in [pool.submit(work, item, number % 2) for number, item in enumerate(items)]:
            done.result()


@contextlib.contextmanager
def _keeping_to(first, count):
    """Inside, this thread and what it starts keep to some of the cores that it has."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(count)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
