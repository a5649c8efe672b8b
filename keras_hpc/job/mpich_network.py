# SPDX-License-Identifier: Apache-2.0
"""What MPICH must be told before it starts.

Its default network, UCX, does not get through Slurm's pmi2; and in containers it would read the memory of other
processes than it means.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import mpi4py

from keras_hpc.job import log

# What MPICH reads: the first that is set counts.
_VARIABLES = ("MPIR_CVAR_CH4_NETMOD", "MPIR_PARAM_CH4_NETMOD", "MPICH_CH4_NETMOD")
# What works. Left alone, MPICH would take libfabric's provider `sockets` before all others, which libfabric itself has
# given up and which takes twice the time of `tcp` for a small message.
_OFI = {_VARIABLES[0]: "ofi", "FI_PROVIDER": "^sockets"}
_EXPORT = "export " + " ".join(f"{name}={value}" for name, value in _OFI.items())
# Slurm's pmi2 promises room for values of 1,024 bytes and then reads lines of 1,024, in which a command and a key stand
# as well. MPICH cuts the UCX addresses of a node, with whatever lies in memory behind them, into values of that size:
# where memory is full of zeros they shrink and fit, and with a framework loaded they do not. OFI's take some 20 bytes.
_REASON = "the UCX addresses of this MPICH do not fit into the lines that Slurm's pmi2 reads"
_chosen = False
# Ranks of one host read each other's memory by the number of the process (process_vm_readv). In containers that have
# name spaces of processes of their own, numbers mean other processes: MPICH fails, or reads what is not the message.
_CMA = "MPIR_CVAR_CH4_CMA_ENABLE"
_NAME_SPACE_OF_HOST = 0xEFFFFFFC  # the kernel's constant


def import_mpi() -> Any:
    """Return `mpi4py.MPI` and start MPI: over OFI where an MPICH that would take UCX meets Slurm's pmi2.

    Raises:
        ImportError, RuntimeError: mpi4py finds no MPI library.
    """
    if _CMA in os.environ or not _has_own_processes():
        return _import_over_network()
    os.environ[_CMA] = "0"
    try:
        return _import_over_network()
    finally:  # MPI has read it
        del os.environ[_CMA]


def _has_own_processes() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino != _NAME_SPACE_OF_HOST
    except OSError:
        return False


def _import_over_network() -> Any:
    global _chosen
    if not _meets_pmi2() or _setting() or not mpi4py.rc.initialize:
        from mpi4py import MPI

        return MPI
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if not _chosen and _is_affected(MPI):
            cure = f"call init() before `from mpi4py import MPI`, or {_EXPORT}"
            _say(f"MPI was started before keras_hpc.init(), and {_REASON}. If it fails or hangs: {cure}", bad=True)
        return MPI
    MPI = _import_without_start()
    if not _is_affected(MPI):
        _start(MPI)
    elif "ofi" not in modules(MPI):
        _say(f"{_REASON}, and it has no other network. If it fails or hangs, start with mpiexec.", bad=True)
        _start(MPI)
    else:
        ours = {name: value for name, value in _OFI.items() if name not in os.environ}
        assignments = " ".join(f"{name}={value}" for name, value in ours.items())
        _say(f"MPICH starts over OFI ({assignments}): {_REASON}. A setting of your own stays")
        _chosen = True
        os.environ |= ours
        try:
            _start(MPI)
        finally:  # MPI has read them; what the script starts shall see what its user has set
            for name in ours:
                del os.environ[name]
    return MPI


def modules(MPI: Any) -> list[str]:
    """Return the network modules of this MPICH, the default first; none if it is another MPI."""
    found = re.search(r"^MPICH Device:\s*ch4:([\w ,]+)$", MPI.Get_library_version(), re.M)
    return re.findall(r"\w+", found[1]) if found else []


def describe(MPI: Any) -> str:
    """Say which network module MPICH has taken, and why; empty for another MPI."""
    names = modules(MPI)
    if not names:
        return ""
    if _chosen:
        return f"ofi, which init() has chosen: {_REASON}"
    if setting := _setting():
        return f"{setting[1]}, as {setting[0]} says"
    return f"{names[0]}, the first of what this MPICH has: {', '.join(names)}"


def hint(MPI: Any) -> str:
    """Say what is wrong with the user's own choice; empty where nothing is."""
    setting = _setting()
    if setting and setting[1].lower() == "ucx" and _meets_pmi2() and "ofi" in modules(MPI):
        return f"{setting[0]}=ucx: MPI_Init may fail or hang, as {_REASON}. Unset it, and init() takes ofi"
    return ""


def _meets_pmi2() -> bool:
    """Return whether srun started this process by pmi2, on several hosts: those of one need no addresses."""
    env = os.environ
    by_mpiexec = "MPI_LOCALRANKID" in env  # of Hydra, which inherits Slurm's variables inside an allocation
    pmi2 = env.get("SLURM_MPI_TYPE") == "pmi2" and "PMI_FD" in env and not by_mpiexec
    return pmi2 and env.get("SLURM_STEP_NUM_NODES") != "1"


def _setting() -> tuple[str, str] | None:
    """Return the user's own choice: the variable and its value."""
    return next(((name, os.environ[name]) for name in _VARIABLES if name in os.environ), None)


def _is_affected(MPI: Any) -> bool:
    """Return whether this is an MPICH over UCX that speaks to Slurm in lines: Slurm's own libpmi2 does not."""
    return modules(MPI)[:1] == ["ucx"] and "/libpmi2." not in Path("/proc/self/maps").read_text()


def _import_without_start() -> Any:
    """Return `mpi4py.MPI` with MPI loaded, but not started; it will be finalized at the end of the process."""
    rc = mpi4py.rc
    before = rc.initialize, rc.finalize
    rc.initialize = False
    rc.finalize = True if rc.finalize is None else rc.finalize  # None: only what the import has started
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = before
    return MPI


def _start(MPI: Any) -> None:
    """Start MPI as the import of mpi4py does."""
    if mpi4py.rc.threads:
        MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    else:
        MPI.Init()


def _say(text: str, *, bad: bool = False) -> None:
    """Log one line on rank 0, which only the launcher knows so far: it is said before MPI can fail."""
    if os.environ.get("PMI_RANK") == "0":
        (log.warning if bad else log.info)(text)
