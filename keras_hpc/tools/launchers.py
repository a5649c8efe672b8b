# SPDX-License-Identifier: Apache-2.0
"""Ways to start ranks: which mpiexec or srun belongs to the MPI library that they will load, and how to talk to it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from keras_hpc.errors import LaunchError

Family = Literal["MPICH", "Intel MPI", "Open MPI"]

# What launchers answer to --version. Intel MPI's is Hydra, too, but says so first.
_LAUNCHERS: dict[str, Family] = {
    "Intel(R) MPI": "Intel MPI",
    "HYDRA": "MPICH",
    "Open MPI": "Open MPI",
    "OpenRTE": "Open MPI",
}
_NAMES = ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
# How srun introduces ranks to each other, best first.
_SRUN_TYPES: dict[Family, tuple[str, ...]] = {
    "MPICH": ("pmi2",),
    "Intel MPI": ("pmi2", "pmix"),
    "Open MPI": ("pmix",),
}
# Asked in a process of its own: one that has loaded MPI is no good to start ranks from.
_PROBE = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(" ".join(MPI.Get_library_version().replace(chr(0), "").split()))
print(*{line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/libmpi" in line}, sep="\\n")
"""


@dataclasses.dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes:
        version: as it describes itself.
        family: whose launchers can start it.
        files: its shared libraries.
    """

    version: str
    family: Family
    files: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Mpiexec:
    """A launcher.

    Attributes:
        path: the program.
        family: None where it does not say: then it is only told the number of ranks.
    """

    path: Path
    family: Family | None


def find_library() -> Library:
    """Find the MPI library of this environment.

    Raises:
        LaunchError: mpi4py finds none.
    """
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise LaunchError(
            "mpi4py found no MPI library to start ranks with. Install one into this environment "
            f"(pip install 'keras_hpc[mpich]') or load your site's MPI module. mpi4py says: {reason}"
        )
    version, *files = done.stdout.strip().splitlines()
    family: Family = "Open MPI" if "Open MPI" in version else "Intel MPI" if "Intel(R) MPI" in version else "MPICH"
    return Library(version, family, tuple(map(Path, files)))


def find_mpiexec(mpi: Library) -> Mpiexec:
    """Find the launcher of a library: where the library lies, beside Python, or on the PATH.

    Raises:
        LaunchError: there is none of its family.
    """
    beside_library = [parent / "bin" for file in mpi.files for parent in file.parents]
    path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    others = []
    for folder in dict.fromkeys([*beside_library, Path(sys.executable).parent, *path]):
        for name in _NAMES:
            if shutil.which(folder / name) is not None:
                found = mpiexec_at(folder / name)
                if found.family == mpi.family:
                    return found
                others.append(f"{found.path} of {found.family or 'an unknown MPI'}")
    raise LaunchError(
        f"There is no mpiexec for the MPI library that mpi4py loads. Expected one of {mpi.family}, on the PATH or "
        f"given by --mpiexec. Received: {', '.join(others) or 'no mpiexec'}; the library is {mpi.version[:60]}"
    )


def mpiexec_at(path: Path) -> Mpiexec:
    """Asks a launcher whose it is.

    Raises:
        LaunchError: it cannot be run.
    """
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise LaunchError(f"`--mpiexec` is the program that starts ranks. Received: {path}, {error}") from error
    said = done.stdout + done.stderr
    return Mpiexec(path, next((family for word, family in _LAUNCHERS.items() if word in said), None))


def mpiexec_command(
    mpiexec: Mpiexec, ranks: int, hosts: Sequence[tuple[str, int]] = (), environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the beginning of a command that starts ranks with mpiexec.

    Args:
        mpiexec: the launcher.
        ranks: how many.
        hosts: names, and how many ranks each gets. None: what a batch system has allocated, or this machine.
        environment: what the command will run in.

    Raises:
        LaunchError: there are hosts, and the launcher is of a family that we do not know.
    """
    options = []
    if hosts:
        slots = ",".join(f"{name}:{count}" for name, count in hosts)
        if mpiexec.family is None:
            raise LaunchError(f"`--hosts` needs the mpiexec of MPICH, Intel MPI or Open MPI. Received: {mpiexec.path}")
        options = ["--host" if mpiexec.family == "Open MPI" else "-hosts", slots]
        if mpiexec.family == "Intel MPI":
            options += ["-ppn", str(max(count for _, count in hosts))]
        elif mpiexec.family == "Open MPI":  # unlike others it does not take the environment along
            options += [word for name in _worth_taking(environment) for word in ("-x", name)]
    return [str(mpiexec.path), *options, "-n", str(ranks)]


def mpiexec_environment(ranks: int, *, placed: bool, pinned: bool) -> dict[str, str]:
    """Return what launchers read from the environment, where the user has not set it.

    Args:
        ranks: how many will be started.
        placed: whether the user or a batch system says on which hosts.
        pinned: whether each rank binds itself to cores, so that the launcher must not.
    """
    wanted: dict[str, str] = {}
    if os.geteuid() == 0:  # in a container, as a rule; Open MPI asks twice
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if pinned:
        wanted |= {
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "I_MPI_PIN": "0",
        }
    if ranks > len(os.sched_getaffinity(0)):
        if not placed:  # else it would put all ranks on the first one
            wanted |= {
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
            }
        wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def srun_command(mpi: Library, ranks: int | None) -> list[str]:
    """Return the beginning of a command that starts ranks with srun, in a Slurm allocation.

    Args:
        mpi: the library that the ranks load.
        ranks: how many; None: as many as the allocation is made for.

    Raises:
        LaunchError: there is no srun, or it has no way to introduce the library's ranks to each other.
    """
    try:
        done = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(f"srun cannot be run. Expected Slurm's on the PATH. Received: {error}") from error
    offered = re.findall(r"\w+", done.stdout + done.stderr)
    wanted = ("cray_shasta", "pmi2") if "CRAY" in mpi.version else _SRUN_TYPES[mpi.family]
    known = [kind for kind in wanted if kind in offered]
    if not known:
        raise LaunchError(
            f"srun cannot start {mpi.family} here; try --launcher mpiexec. Expected {' or '.join(wanted)} in `srun "
            f"--mpi=list`. Received: {' '.join(offered)}"
        )
    options = [f"--mpi={known[0]}", "--cpu-bind=cores", "--kill-on-bad-exit=1"]
    options += [f"--ntasks={ranks}"] if ranks is not None else []
    if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):  # since 22.05 srun no longer takes it from sbatch
        options.append(f"--cpus-per-task={cpus}")
    return ["srun", *options]


def ends_well(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> bool:
    """Return whether a command ends with status 0, in time. What it says is not shown."""
    no = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=dict(environment), stdin=no, stdout=no, stderr=no, start_new_session=True
    ) as process:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its ssh
            return False


def _worth_taking(environment: Mapping[str, str]) -> list[str]:
    """Names of variables that a rank on another host needs as they are here."""
    ours = ("KERAS_", "KHPC_", "MPI4PY_", "OMP_", "TF_", "XLA_", "JAX_", "PYTHON", "CUDA_", "NPROC", "LD_LIBRARY_PATH")
    return sorted(name for name in environment if name.startswith(ours))
