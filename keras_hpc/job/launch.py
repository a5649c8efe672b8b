# SPDX-License-Identifier: Apache-2.0
"""How this process was started: finds the other ranks and their nodes, or says what is wrong with the launch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from keras_hpc import _native
from keras_hpc.errors import LaunchError, PlanMismatchError
from keras_hpc.job import mpich_network

T = TypeVar("T")

_SHARED_MEMORY = "/dev/shm/"
# MPICH makes one file per job and node. MPI_Finalize removes it, which a job that aborts or is killed never calls.
_PREFIX = "mpich_shm_"
# Launchers tell each process the number of ranks that they started.
_SIZE_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "an mpiexec or srun that speaks PMI (MPICH, Intel MPI)",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# Of communication, where each node has one rank: one for so many cores, at most so many. On GPUs: for so many of a
# rank's own cores, which have little else to do.
_CORES_PER_THREAD, _MOST_THREADS, _CORES_PER_THREAD_ON_GPUS = 8, 4, 2
_SRUN_HINT = (
    "srun needs to be told how this MPI library finds its peers: `srun --mpi=pmi2` for MPICH and Intel MPI, "
    "`srun --mpi=pmix` for Open MPI (`srun --mpi=list` shows what your site has)."
)
_MPIEXEC_HINT = (
    "Start the job with the mpiexec that belongs to this MPI library: the one in the same environment as Python "
    "(`which mpiexec`), or point mpi4py to the launcher's library with the environment variable MPI4PY_LIBMPI."
)


@dataclasses.dataclass
class World:
    """The ranks of a job and their nodes."""

    comm: Any  # mpi4py communicator or None
    rank: int = 0
    size: int = 1
    node_of_rank: list[int] = dataclasses.field(default_factory=lambda: [0])

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.node_of_rank[self.rank]

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return max(self.node_of_rank) + 1

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self.node_of_rank[: self.rank].count(self.node)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self.node_of_rank.count(self.node)

    @property
    def nodes_are_alike(self) -> bool:
        """Whether all nodes have as many ranks."""
        return len(set(collections.Counter(self.node_of_rank).values())) == 1

    def peers(self) -> World:
        """Collective: the ranks with this rank's number on their nodes, which all have as many; one of each node."""
        if self.comm is None:
            return World(None)
        comm = self.comm.Split(self.local_rank, self.node)
        return World(comm, self.node, self.node_count, list(range(self.node_count)))

    def close(self) -> None:
        """Collective: frees the communicator."""
        if self.comm is not None:
            self.comm.Free()

    def transport(self) -> _native.Transport:
        """Collective: a way for the engine to reach the ranks, over the MPI library that mpi4py uses."""
        if self.comm is None:
            return _native.in_process_transports([0])[0]
        return _native_mpi(self.comm).transport(self.node_of_rank)


def connect(comm: Any, stall_seconds: float = 30.0, timeout_seconds: float = 300.0) -> World:
    """Collective: finds the ranks of `comm` and their nodes.

    Args:
        comm: an mpi4py communicator or None for all ranks.
        stall_seconds: of the start of MPI, after which it is said that ranks are missing.
        timeout_seconds: after which this rank ends the job.

    Raises:
        LaunchError: MPI cannot be loaded, or sees other ranks than the launcher started.
        TypeError: `comm` is not a communicator.
    """
    try:
        with _start_watched(stall_seconds, timeout_seconds):
            MPI = mpich_network.import_mpi()
    except (ImportError, RuntimeError) as error:
        started = ranks_started()
        if comm is None and not started:
            return World(None)  # a plain `python train.py` on a machine without MPI: one rank
        raise LaunchError(
            f"mpi4py found no MPI library, but {started or 'a communicator was given'}. Install one into this "
            f"environment (pip install 'keras_hpc[mpich]') or load your site's MPI module. mpi4py says: {error}"
        ) from error
    if comm is None:
        comm = MPI.COMM_WORLD
        if comm.size == 1 and (started := ranks_started()):
            hint = _SRUN_HINT if "srun" in started else _MPIEXEC_HINT
            raise LaunchError(
                f"{started}, but the MPI library of this process sees only one: {mpi_version(None)}. "
                f"Each process would train alone and think that it is rank 0. {hint}"
            )
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"`comm` is the communicator of the job. Expected an mpi4py communicator. Received: {comm!r}")
    comm = comm.Dup()  # the user may communicate on the other one
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    leader = np.array([comm.rank], dtype=np.int32)
    shared.Bcast(leader, root=0)
    shared.Free()
    leaders = np.empty(comm.size, dtype=np.int32)
    comm.Allgather(leader, leaders)
    if comm.rank == leader[0]:  # all ranks of the node are through MPI_Init
        _unlink_shared_memory()
    return World(comm, comm.rank, comm.size, _native_mpi(comm).nodes(leaders.tolist()))


@contextlib.contextmanager
def _start_watched(stall_seconds: float, timeout_seconds: float) -> Iterator[None]:
    """Inside, MPI starts, which waits for all ranks: mpiexec of MPICH does not end where one has ended before.

    It is said by two ranks, of which one may be the missing one.
    """
    started = ranks_started()
    times = (stall_seconds, timeout_seconds)
    if not started or not all(isinstance(time, (int, float)) and time > 0 for time in times):  # refused below
        yield
        return
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "?")
    report = (
        f"keras_hpc: rank {rank} waits in init() since {stall_seconds:g} s, because other ranks have not started MPI "
        f"({started}). Has one ended, or does it do something else first? See what it has written"
    )
    end = (
        f"keras_hpc: rank {rank} ends the job: other ranks have not started MPI within {timeout_seconds:g} s "
        "(timeout_seconds)"
    )
    late = _native.Late(*times, *((report, end) if rank in ("0", "1", "?") else ("", "")))
    try:
        yield
    finally:
        late.stop()


def check_threads(world: World) -> None:
    """Raise LaunchError unless several threads may call MPI."""
    if world.size == 1:
        return
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError(
            "keras_hpc communicates from several threads and needs MPI_THREAD_MULTIPLE, but MPI was initialized with "
            f"less (level {MPI.Query_thread()}). Do not set mpi4py.rc.thread_level or mpi4py.rc.threads before "
            "keras_hpc.init(), and use an MPI library built with thread support."
        )


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Collective: does on every rank what needs no other rank, and raises on all of them where it fails on one.

    Args:
        world: the ranks.
        work: what to do.

    Raises:
        LaunchError: it failed on another rank only.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as problem:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        error = problem
    texts = exchange(world, "" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        raise LaunchError(f"keras_hpc.init() was refused on rank {failed[0]}. {texts[failed[0]]}")
    return result


def agree(world: World, what: str, items: Sequence[str]) -> None:
    """Collective: raises PlanMismatchError on all ranks unless all pass equal lists, naming the first difference."""
    lists = [text.split("\n") for text in exchange(world, "\n".join(items))]
    for number, here in enumerate(itertools.zip_longest(*lists, fillvalue="nothing")):
        if len(set(here)) > 1:
            ranks_of: dict[str, list[str]] = {}
            for rank, item in enumerate(here):
                ranks_of.setdefault(item, []).append(str(rank))
            said = "; ".join(f"'{item}' on rank {', '.join(ranks)}" for item, ranks in ranks_of.items())
            raise PlanMismatchError(f"{what} differ between ranks. The first difference is number {number}: {said}.")


def exchange(world: World, text: str) -> list[str]:
    """Return the texts of all ranks. Collective."""
    if world.size == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    lengths = np.empty(world.size, np.int32)
    world.comm.Allgather(np.array([mine.size], np.int32), lengths)
    everyone = np.empty(int(lengths.sum()), np.uint8)
    world.comm.Allgatherv(mine, (everyone, lengths))
    parts = np.split(everyone, np.cumsum(lengths)[:-1])
    return [part.tobytes().decode() for part in parts]


def cores_of_nodes(world: World) -> tuple[int, int]:
    """Collective: the number of cores that the ranks of this node may use together, and the fewest of any node."""
    group = _native.control_group()  # of a container, or a batch job
    cores = np.zeros(8192, dtype=np.uint8)
    cores[[core for core in os.sched_getaffinity(0) if core < cores.size]] = 1
    allowed = np.array([group.cores, group.cores_of])
    everyone = np.empty((world.size, cores.size), dtype=np.uint8)
    all_allowed = np.empty((world.size, 2))
    if world.comm is None:
        everyone[0], all_allowed[0] = cores, allowed
    else:
        world.comm.Allgather(cores, everyone)
        world.comm.Allgather(allowed, all_allowed)
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(world.node_of_rank):
        ranks_of.setdefault(node, []).append(rank)
    found = {}
    for node, ranks in ranks_of.items():
        quota = sum({of: quota for quota, of in all_allowed[ranks].tolist()}.values())
        found[node] = max(1, int(min(np.count_nonzero(everyone[ranks].any(axis=0)), quota)))
    return found[world.node], min(found.values())


def threads_per_team(
    world: World,
    asked: int | Literal["auto"],
    cores: int,
    fewest: int,
    teams: int,
    *,
    needs_thread: bool,
    on_gpus: bool = False,
) -> int:
    """The number of communication threads of a team, the same on all ranks.

    Where ranks fill the cores of a single node, a thread hides nothing and only takes time from the step. Where each
    node has one rank and many cores, several threads share the passes over memory that a reduction makes: see
    docs/simulation.md. So they do where ranks compute on GPUs: a core adds up far less than a GPU's bus brings.

    Args:
        world: the ranks.
        asked: the user's choice.
        cores: of this node.
        fewest: cores of any node.
        teams: of this job.
        needs_thread: whether the backend cannot do without.
        on_gpus: whether ranks compute on GPUs.

    Raises:
        ValueError: no thread asked for, but the backend needs one.
    """
    if asked == 0 and needs_thread and world.size > 1:
        raise ValueError(
            "With this Keras backend a communication thread completes the reductions. Expected 'auto' or at least 1. "
            "Received: threads_per_team=0"
        )
    if asked != "auto":
        return asked
    if world.size == 1:
        return 0
    if on_gpus:
        share = fewest // max(collections.Counter(world.node_of_rank).values())
        return max(1, min(_MOST_THREADS, share // _CORES_PER_THREAD_ON_GPUS) // teams)
    if world.node_count == world.size:
        return max(1, min(_MOST_THREADS, fewest // _CORES_PER_THREAD) // teams)
    return int(needs_thread or world.node_count > 1 or cores > world.size)


def mpi_version(world: World | None) -> str:
    """Return name and version of the MPI library, one line."""
    if world is not None and world.comm is None:
        return "no MPI"
    from mpi4py import MPI

    name: str = MPI.Get_library_version().replace("\x00", "")
    return " ".join(name.split("\n")[0].replace("\t", " ").split()).split(", package")[0]


def ranks_started() -> str:
    """Says which launcher started several processes, going by the environment; empty if none did."""
    for variable, launcher in _SIZE_VARIABLES.items():
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) > 1:
            return f"{launcher} started {value} processes ({variable}={value})"
    return ""


def _native_mpi(comm: Any) -> _native.Mpi:
    """MPI for the engine: the library that mpi4py uses."""
    from mpi4py import MPI

    return _native.Mpi(
        module_path=MPI.__file__,
        handle_size=MPI._sizeof(MPI.Comm),
        comm=_handle(comm),
        constants={
            "BYTE": _handle(MPI.BYTE),
            "ERRORS_RETURN": _handle(MPI.ERRORS_RETURN),
            "IN_PLACE": int(MPI.IN_PLACE),
            # The one constant that mpi4py does not show: 1 in the MPICH family, 0 in Open MPI.
            "STATUS_IGNORE": 0 if MPI._sizeof(MPI.Comm) > 4 else 1,
        },
        dtypes={
            "float32": _handle(MPI.FLOAT),
            "float64": _handle(MPI.DOUBLE),
            "int32": _handle(MPI.INT32_T),
            "int64": _handle(MPI.INT64_T),
        },
        ops={"sum": _handle(MPI.SUM)},  # its min and max do not propagate NaN
    )


def _handle(thing: Any) -> int:
    """An MPI handle as the signed integer that the engine casts back."""
    from mpi4py import MPI

    bits = 8 * MPI._sizeof(thing)
    value = int(MPI._handleof(thing)) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def _unlink_shared_memory() -> None:
    """Remove the names of the files in /dev/shm through which MPI has mapped this node's shared memory.

    The memory itself stays until the last rank unmaps it, however that rank ends. Call it on one rank of each node,
    after all ranks of the node have gone through MPI_Init.
    """
    mapped = (line.rstrip("\n").partition(_SHARED_MEMORY)[2] for line in Path("/proc/self/maps").open())
    for name in {name for name in mapped if name.startswith(_PREFIX) and not name.endswith(" (deleted)")}:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(_SHARED_MEMORY + name)
