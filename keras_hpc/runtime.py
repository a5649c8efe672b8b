# SPDX-License-Identifier: Apache-2.0
"""The life of a job: `init`, `finalize`, and who this process is in between."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Iterator
from typing import Any, Literal

from keras_hpc import launch, memory, shutdown, tracing
from keras_hpc.errors import NotInitializedError
from keras_hpc.teams import Team, make_team
from keras_hpc.threads import share_cores
from keras_hpc.watchdog import Watchdog

_log = logging.getLogger("keras_hpc")
_local = threading.local()
_job: Job | None = None


@dataclasses.dataclass
class Job:
    """What `init` found and decided. One per process.

    Attributes:
        comm: the mpi4py communicator of the job, or None where there is no MPI and one rank.
        rank: this process' number, 0 to `size - 1`.
        size: number of ranks.
        local_rank: this rank's number on its node.
        local_size: number of ranks on this node.
        node: number of this node, in order of the nodes' first ranks.
        node_count: number of nodes.
        node_of_rank: the node of every rank.
        teams: the teams, team 0 first.
        shard: whether data sets are shared out among ranks.
        batch: whether `batch_size` means one rank's batch ("local") or the batch of all ranks together ("global").
        timeout_seconds: limit of every wait for other ranks.
        check_replicas_every: so many steps of a model; None: never.
        delayed: whether a team is pipelined: then one rank alone has something to do, too.
        watchdog: reports waits that take long; None with one rank.
    """

    comm: Any
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    node_count: int
    node_of_rank: list[int]
    teams: list[Team]
    shard: bool
    batch: Literal["local", "global"]
    timeout_seconds: float
    check_replicas_every: int | None
    delayed: bool = False
    watchdog: Watchdog | None = None


def init(
    comm: Any = None,
    *,
    teams: int = 1,
    threads_per_team: int | Literal["auto"] = "auto",
    shard: bool = True,
    batch: Literal["local", "global"] = "local",
    wire_dtype: Literal["float16", "bfloat16"] | None = None,
    timeout_seconds: float = 300.0,
    stall_seconds: float = 30.0,
    check_replicas_every: int | None = None,
    trace: str | None = None,
    keep_memory: bool = True,
) -> None:
    """Makes this Keras script one rank of a data-parallel job. Collective.

    Call it once, before `model.compile` and `model.fit`, which stay as they are, and before anything is computed: it
    also gives each rank of a node its share of the cores, unless you have set the numbers of threads.

    Args:
        comm: an mpi4py communicator whose ranks train together. None: `MPI.COMM_WORLD`.
        teams: number of teams. Each has communicators and communication threads of its own, so that models assigned
            to different teams (`assign_team`) reduce their gradients at the same time.
        threads_per_team: communication threads of each team on each rank. "auto": none where ranks fill the cores of
            a single node, else one. JAX always needs one.
        shard: give every rank its own part of the data sets passed to `fit` and `evaluate`. False for scripts that
            already read their own part.
        batch: "local": `batch_size` is one rank's batch. "global": it is divided among the ranks.
        wire_dtype: gradients of float32 are rounded to it on their way between nodes: half the bytes. They are summed
            in float32, and all ranks get the same bits. "bfloat16" has the range of float32, "float16" three more bits
            and no values beyond 65,504. None: they travel as they are.
        timeout_seconds: a wait for other ranks that takes longer ends the job.
        stall_seconds: a wait that takes longer is reported once, on rank 0's stderr: who has come, who has not, and the
            Python stack of each rank.
        check_replicas_every: compare weights and optimizer state of the ranks, bit for bit, after every so many steps
            of a model, as `check_replicas` does: memory that fails shows within these steps, not in the result. A
            comparison reads all of them once.
        trace: path of a JSON file to which `finalize` writes what was communicated when (Chrome and Perfetto show it).
        keep_memory: glibc keeps freed memory for the next step, which else needs new pages: on JAX and PyTorch steps
            take up to half as long. Unless you have set glibc's variables, such as `MALLOC_ARENA_MAX`. False leaves
            glibc as it is, for jobs that are short of memory.

    Raises:
        RuntimeError: called twice, or Keras is in a state that does not go with keras_hpc.
        LaunchError: the launcher and the MPI library do not fit together, or MPI has no MPI_THREAD_MULTIPLE.
        ValueError: an argument is not as described.
    """
    global _job
    if _job is not None:
        raise RuntimeError("keras_hpc.init() was called twice. Call it once per process, or finalize() in between.")
    _check_arguments(teams, threads_per_team, batch, wire_dtype, timeout_seconds, stall_seconds, check_replicas_every)
    kept = keep_memory and memory.keep_freed()  # first: MPI starts threads
    from keras_hpc import backends, keras_hooks

    backend = backends.current()
    world = launch.connect(comm)
    cores = launch.cores_of_node(world)
    threads = launch.threads_per_team(world, threads_per_team, cores, needs_thread=backend.NEEDS_THREAD)
    shares = ""
    if world.size > 1:
        limit = functools.partial(backend.limit_threads, teams=teams)
        shares = share_cores(cores, world.local_size, threads * teams, limit)
    backend.load()
    job = Job(
        comm=world.comm,
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        node=world.node,
        node_count=world.node_count,
        node_of_rank=world.node_of_rank,
        teams=[],
        shard=shard,
        batch=batch,
        timeout_seconds=timeout_seconds,
        check_replicas_every=check_replicas_every,
    )
    for index in range(teams):
        job.teams.append(make_team(world, index, threads, timeout_seconds, stall_seconds))
        job.teams[-1].wire_dtype = wire_dtype
    job.teams[0].agree(
        "The arguments of keras_hpc.init()",
        [
            f"teams={teams}",
            f"shard={shard}",
            f"batch={batch}",
            f"wire_dtype={wire_dtype}",
            f"check_replicas_every={check_replicas_every}",
            f"threads={threads}",
            f"backend={backend.__name__}",
        ],
    )
    keras_hooks.install(job)
    shutdown.install(job)
    if trace is not None:
        tracing.enable(trace)
    _job = job
    if job.size > 1:
        job.watchdog = Watchdog(job, stall_seconds)
        nodes = f"{job.node_count} node{'s' * (job.node_count > 1)}"
        notice(
            f"{job.size} ranks on {nodes}, {launch.mpi_version(world)}; {shares}{'; malloc keeps what is freed' * kept}"
        )


def finalize() -> None:
    """Ends the job and takes every hook out of Keras again. Collective. The end of the process does it, too."""
    global _job
    if _job is None:
        return
    from keras_hpc import keras_hooks

    keras_hooks.uninstall()
    tracing.finish(_job)
    shutdown.leave(_job)
    _job = None


atexit.register(finalize)


def job() -> Job:
    """Returns the job.

    Raises:
        NotInitializedError: before `init` or after `finalize`.
    """
    if _job is None:
        raise NotInitializedError("Call keras_hpc.init() first: there is no job yet, or finalize() has ended it.")
    return _job


def is_initialized() -> bool:
    """Returns whether there is a job: `init` was called, `finalize` was not."""
    return _job is not None


def rank() -> int:
    """Returns this process' number, 0 to `size() - 1`."""
    return job().rank


def size() -> int:
    """Returns the number of ranks."""
    return job().size


def local_rank() -> int:
    """Returns this rank's number on its node, 0 to `local_size() - 1`."""
    return job().local_rank


def local_size() -> int:
    """Returns the number of ranks on this node."""
    return job().local_size


def node() -> int:
    """Returns the number of this node, 0 to `node_count() - 1`."""
    return job().node


def node_count() -> int:
    """Returns the number of nodes."""
    return job().node_count


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Work for this rank alone: inside, Keras behaves in this thread as if keras_hpc were not there.

    ```python
    with keras_hpc.local():
        history = probe.fit(x, y)  # not collective
    ```
    """
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1


def is_local() -> bool:
    """Returns whether this thread is inside `local()`."""
    return getattr(_local, "depth", 0) > 0


def notice(text: str) -> None:
    """Tells the user one line, once: rank 0 logs it as information."""
    if _job is None or _job.rank == 0:
        show(text)


def show(text: str) -> None:
    """Tells the user one line, from this rank."""
    _show_notices()
    _log.info(text)


def _show_notices() -> None:
    # Only where nobody configured logging: then INFO would be lost.
    if not _log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        _log.addHandler(handler)
        _log.propagate = False
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


def _check_arguments(
    teams: Any, threads: Any, batch: Any, wire_dtype: Any, timeout_seconds: Any, stall_seconds: Any, check_every: Any
) -> None:
    if not isinstance(teams, int) or teams < 1:
        raise ValueError(f"`teams` is the number of teams. Expected an integer >= 1. Received: teams={teams!r}")
    if threads != "auto" and (not isinstance(threads, int) or not 0 <= threads <= 16):
        raise ValueError(
            "`threads_per_team` is the number of communication threads. Expected 'auto' or an integer from 0 to 16. "
            f"Received: threads_per_team={threads!r}"
        )
    if batch not in ("local", "global"):
        raise ValueError(f"`batch` says whose batch size is meant. Expected 'local' or 'global'. Received: {batch!r}")
    from keras_hpc.configuration import check_wire

    check_wire(wire_dtype)
    for name, value in (("timeout_seconds", timeout_seconds), ("stall_seconds", stall_seconds)):
        if not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"`{name}` is a time. Expected a number of seconds > 0. Received: {name}={value!r}")
    if check_every is not None and (not isinstance(check_every, int) or check_every < 1):
        raise ValueError(
            "`check_replicas_every` is a number of steps. Expected None or an integer >= 1. "
            f"Received: check_replicas_every={check_every!r}"
        )
