# SPDX-License-Identifier: Apache-2.0
"""Runs an example's module on a number of ranks, each with a core and a thread of its own, as measurements want it.

python -m examples.launch CORE MODULE [arguments]   what each rank is: it keeps to core CORE + its rank on the node
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # Open MPI would not start as root, or bind ranks itself.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def run(module, arguments, *, ranks=1, core=0, timeout, output=None):
    """Runs a module to its end: one rank without MPI, more with the environment's own mpiexec.

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
    command = [sys.executable, "-m", "examples.launch", str(core), module, *map(str, arguments)]
    if ranks > 1:
        command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks), *command]
    sys.stdout.flush()
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, timeout=timeout, check=False, stdout=output, stderr=output
    )
    if done.returncode:
        raise RuntimeError(f"{module} on {ranks} ranks ended with {done.returncode}; see its messages")


def main():
    core, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    names = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK")
    core += next((int(os.environ[name]) for name in names if name in os.environ), 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
