"""Starts ranks through the environment's mpiexec, with a time limit, and leaves nothing behind.

Imports neither MPI nor a framework: an MPI that has been started in this process would disturb the launches.
"""

import atexit
import importlib.metadata
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parent.parent
MPIEXEC = Path(sys.executable).parent / "mpiexec"
TOKEN = "KERAS_HPC_TEST_TOKEN"


def _xla_flags() -> str:
    """More than half of the time of a JAX test would be compiling small models well."""
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    # JAX refuses what it does not know. 0.5 computes weight gradients last unless told otherwise: docs/design.md.
    version = tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2])
    if version == (0, 5):
        flags.append("--xla_cpu_enable_concurrency_optimized_scheduler=true")
    elif version < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


# One thread per rank: two cores carry up to four ranks here, and pools of threads that fight take minutes, not seconds.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    # Not one: TensorFlow may then compute all kernels' gradients after backward has gone through all layers, and two
    # teams need more than one. It is what init() sets for two teams.
    "TF_NUM_INTEROP_THREADS": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "XLA_FLAGS": _xla_flags(),
    "PYTHONFAULTHANDLER": "1",
    "XDG_CACHE_HOME": tempfile.mkdtemp(prefix="keras_hpc-tests-"),
    # Open MPI refuses root, and more ranks than cores, unless told otherwise; ranks that outnumber cores must yield.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
atexit.register(shutil.rmtree, ENVIRONMENT["XDG_CACHE_HOME"], ignore_errors=True)


@dataclass(frozen=True)
class Run:
    """How a job ended.

    Attributes:
        returncode: of mpiexec; `None` where the time limit ended it.
        output: stdout and stderr of all ranks as mpiexec passed them on.
        ended_at: when mpiexec ended, as `time.time()` tells it.
        leaked_processes: process ids that outlived mpiexec.
    """

    returncode: int | None
    output: str
    ended_at: float
    leaked_processes: tuple[int, ...]


def child_environment(
    backend: str = "tensorflow", extra: dict[str, str] | None = None, lean: bool = False
) -> dict[str, str]:
    """The environment of a rank: ours without what a surrounding job has set, one thread, the wanted backend.

    `lean`: without packages that frameworks import only because they are here; see tests/lean.
    """
    outer = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "HYDRA_", "KERAS_", "KHPC_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(outer)}
    if lean:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "tests" / "lean"), env.get("PYTHONPATH"))))
    return env | ENVIRONMENT | {"KERAS_BACKEND": backend} | (extra or {})


def _processes_with(token: str) -> list[int]:
    """Of a job: known by their environment, or by their group, as a forked rank's is its server's."""
    needle = f"{TOKEN}={token}".encode()
    groups = forks.groups_of(token)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if state != "Z" and (group in groups or needle in (entry / "environ").read_bytes()):
                    found.append(int(entry.name))
            except OSError:  # it ended while we looked, or is another user's
                continue
    return found


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """First as a batch system would (mpiexec passes SIGTERM on), then without asking."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
    for pid in _processes_with(token):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def launch(
    n: int, command: list[str], *, timeout: float, env: dict[str, str], cwd: Path = ROOT, mpi: bool = True
) -> Run:
    """Run `command` on `n` ranks, or, with `mpi=False`, once and without mpiexec."""
    token = secrets.token_hex(8)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [str(MPIEXEC), "-n", str(n), *command] if mpi else command,
            cwd=cwd,
            env=env | {TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        returncode: int | None
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        except BaseException:  # an interrupted test run must not leave a job running
            _end(process, token)
            raise
        ended_at = time.time()
        if returncode is None:
            _end(process, token)
        log.seek(0)
        output = log.read().decode(errors="replace")

    # The launcher may end a moment before its last child does.
    deadline = time.monotonic() + 3
    while (left := _processes_with(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    forks.forget(token)
    return Run(returncode, output, ended_at, tuple(left))
