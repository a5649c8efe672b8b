# SPDX-License-Identifier: Apache-2.0
"""The life of a job: `init` and `finalize`."""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

from keras_hpc.api.teams import check_wire
from keras_hpc.job import current, devices, exit, launch, log, resources
from keras_hpc.job import trace as tracing
from keras_hpc.job.team_making import make_team
from keras_hpc.job.virtual import Virtual
from keras_hpc.job.watchdog import Watchdog
from keras_hpc.spatial.geometry import Grid


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
    trace_from: Literal["start", "demand"] = "start",
    keep_memory: bool = True,
    device: int | Literal["auto", "cpu"] = "auto",
    spatial: int | Sequence[int] | None = None,
    virtual_ranks: int | None = None,
    shard_optimizer: bool = False,
) -> None:
    """Make this Keras script one rank of a data-parallel job. Collective.

    Call it once, before `model.compile` and `model.fit`, which stay as they are, and before anything is computed: it
    also gives each rank of a node its share of the cores, unless you have set the numbers of threads.

    Args:
        comm: an mpi4py communicator whose ranks train together. None: `MPI.COMM_WORLD`.
        teams: number of teams. Each has communicators and communication threads of its own, so that models assigned
            to different teams (`assign_team`) reduce their gradients at the same time.
        threads_per_team: communication threads of each team on each rank. "auto": none where ranks fill the cores of
            a single node; where each node has one rank, one for each 8 cores, and on GPUs one for each 2 cores of a
            rank's share, at most 4 for all teams; else one. JAX always needs one.
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
        trace: path of a JSON file (or `.json.gz`) to which `finalize` writes what was communicated when (Chrome and
            Perfetto show it). Until then each rank writes its part in a folder beside it, `PATH.parts`, from which
            `keras-hpc trace` makes the file of a job that was killed. SIGUSR2 stops or begins the recording of the
            rank that gets it; so does, for all ranks, who removes or makes the file `record` in the job's folder.
        trace_from: "start": record at once. "demand": when a `callbacks.Trace`, the signal or the file asks for it.
        keep_memory: glibc keeps freed memory for the next step, which else needs new pages: on JAX and PyTorch steps
            take up to half as long. Unless you have set glibc's variables, such as `MALLOC_ARENA_MAX`. False leaves
            glibc as it is, for jobs that are short of memory; with `spatial` or `shard_optimizer`, large blocks then go
            back to the kernel as soon as they are freed.
        device: what this rank computes on. "auto": a GPU of its own, by its number on the node, where the backend can
            use GPUs and there are any, else the CPU. "cpu". Or the number of a GPU among those that this process sees.
        spatial: groups of neighbouring ranks compute each sample together, so many parts along each spatial axis of
            images, such as `(2, 1)`: each rank has its rows of every tensor. An int means the first axis. See
            `partition`. None: each rank computes whole samples.
        virtual_ranks: cut every global batch into so many parts, each computed as by one of so many ranks, whatever
            rank computes it, and add up their gradients in one order: `fit` ends with the same bits on any number of
            ranks up to this one, on machines of one kind, and a `Checkpoint` goes on bit for bit on another number.
            `batch_size` is then one part's (`batch="global"`: that of all parts). None: each rank has one part.
        shard_optimizer: each rank keeps its part of the state of every Keras optimizer, 1 / `size()` of it, updates
            that part of the weights, and gets the others' (Rajbhandari et al., "ZeRO", SC 2020, stage 1). Weights are
            the same bits as without. SGD without momentum and `use_ema` keeps nothing, so it works as without.

    Raises:
        RuntimeError: called twice, or Keras is in a state that does not go with keras_hpc.
        LaunchError: the launcher and the MPI library do not fit together, or MPI has no MPI_THREAD_MULTIPLE.
        ValueError: an argument is not as described.
    """
    if current.is_initialized():
        raise RuntimeError("keras_hpc.init() was called twice. Call it once per process, or finalize() in between.")
    with contextlib.ExitStack() as undo:  # gives back what was taken, now if something fails, else in finalize()
        kept = keep_memory and resources.keep_freed()  # first: MPI starts threads
        if (spatial is not None or shard_optimizer) and not keep_memory:
            resources.return_large()
        if kept:
            undo.callback(resources.keep_no_longer)
        world = launch.connect(comm, stall_seconds, timeout_seconds)
        undo.callback(world.close)
        guard = exit.Guard(world.comm, world.rank, world.size)
        undo.callback(guard.remove)
        undo.callback(log.reset)
        undo.enter_context(resources.environment_kept())

        def prepared() -> ModuleType:
            """Do what may be refused on one rank alone."""
            _check_arguments(
                teams, threads_per_team, batch, wire_dtype, timeout_seconds, stall_seconds, check_replicas_every
            )
            _check_trace_from(trace, trace_from)
            devices.check_argument(device)
            _check_spatial(spatial, world.size)
            _check_virtual(virtual_ranks, world.size, shard=shard, spatial=spatial, wire_dtype=wire_dtype, teams=teams)
            _check_shard_optimizer(shard_optimizer, spatial=spatial, virtual_ranks=virtual_ranks)
            launch.check_threads(world)
            from keras_hpc import backends, keras_hooks  # Keras and its backend: nobody needs them to ask for help

            keras_hooks.check()
            return backends.current()

        backend = launch.on_all_ranks(world, prepared)
        cores, fewest = launch.cores_of_nodes(world)
        gpu = devices.of_rank(world, backend, device)

        def started() -> tuple[int, str]:
            if gpu is not None or device == "cpu":
                undo.enter_context(backend.use_device(gpu))
            if shard_optimizer:
                resources.pool_nothing()
            needs_thread = backend.NEEDS_THREAD
            threads = launch.threads_per_team(
                world, threads_per_team, cores, fewest, teams, needs_thread=needs_thread, on_gpus=gpu is not None
            )
            shares = ""
            if world.size > 1 or virtual_ranks is not None:
                limit = functools.partial(backend.limit_threads, teams=teams)
                # Several that nobody has asked for share one core's work: they make it shorter, not more.
                busy = min(threads, 1) if threads_per_team == "auto" else threads
                shares = resources.share_cores(cores, world.local_size, busy * teams, limit, virtual_ranks is not None)
            backend.load()
            return threads, shares

        threads, shares = launch.on_all_ranks(world, started)
        launch.agree(
            world,
            "The arguments of keras_hpc.init()",
            [
                f"teams={teams}",
                f"shard={shard}",
                f"batch={batch}",
                f"wire_dtype={wire_dtype}",
                f"check_replicas_every={check_replicas_every}",
                f"trace={trace is not None}",
                f"trace_from={trace_from}",
                f"threads={threads}",
                f"backend={backend.__name__}",
                f"on a GPU: {gpu is not None}",
                f"spatial={spatial}",
                f"virtual_ranks={virtual_ranks}",
                f"shard_optimizer={shard_optimizer}",
            ],
        )
        job = current.Job(
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
            guard=guard,
            device=gpu,
            virtual=None if virtual_ranks is None else Virtual(virtual_ranks, world.rank, world.size),
            shard_optimizer=shard_optimizer,
            keep_memory=keep_memory,
        )
        if job.virtual is not None and gpu is not None:
            raise ValueError(f"init(virtual_ranks=) computes on CPUs so far; pass device='cpu'. Received: {gpu}")
        if shard_optimizer and gpu is not None:
            raise ValueError(f"init(shard_optimizer=True) computes on CPUs so far; pass device='cpu'. Received: {gpu}")
        for index in range(teams):
            job.teams.append(make_team(world, index, threads, timeout_seconds, stall_seconds))
            undo.callback(_close_team, job, index)
            job.teams[-1].wire_dtype = wire_dtype
            job.teams[-1].device = gpu.ordinal if gpu is not None and backend.PLANS_ON_GPU else None
        if spatial is not None and Grid.of(spatial).size > 1:
            if gpu is not None:
                raise ValueError(f"init(spatial=) computes on CPUs so far; pass device='cpu'. Received: {gpu}")
            from keras_hpc.spatial.group import make_group

            job.group = make_group(world, Grid.of(spatial), teams, timeout_seconds, stall_seconds)
            undo.callback(job.group.team.close)
            for team in job.teams:
                team.parts = job.group.size
        from keras_hpc import keras_hooks

        launch.on_all_ranks(world, functools.partial(keras_hooks.install, job))
        undo.callback(keras_hooks.uninstall, job)
        keras_hooks.begin(job)
        if trace is not None:
            tracing.enable(job, world, trace, record=trace_from == "start")
            undo.callback(tracing.close)
        current.begin(job)
        undo.callback(current.end)
        if job.size > 1:
            job.watchdog = guard.watchdog = Watchdog(job, stall_seconds)
            undo.callback(job.watchdog.close)
            parts = "" if virtual_ranks is None else f" as {virtual_ranks} virtual ones"
            nodes = f"{job.node_count} node{'s' * (job.node_count > 1)}"
            remembers = "; malloc keeps what is freed" * kept
            current.notice(f"{job.size} ranks{parts} on {nodes}, {launch.mpi_version(world)}; {shares}{remembers}")
        if gpu is not None:
            devices.tell(gpu, world.rank)
        job.at_end = undo.pop_all()


def finalize() -> None:
    """End the job and take every hook out of Keras again. Collective. The end of the process does it, too.

    Whatever of it fails, the rest is done.
    """
    if not current.is_initialized():
        return
    job = current.job()
    with job.at_end:
        from keras_hpc import keras_hooks

        job.at_end.callback(exit.leave, job)
        job.at_end.callback(tracing.finish, job)
        job.at_end.callback(keras_hooks.say_what_is_left)
        if job.guard.exit_code == 0:
            job.at_end.callback(job.checkpoints.finish)


@atexit.register
def _at_exit() -> None:
    parent = current.of_parent()
    if parent is not None and parent.comm is not None:
        exit.leave_child(parent)
    finalize()


def _close_team(job: current.Job, index: int) -> None:
    job.teams[index].close()  # whatever `configure_team` has put there


def _check_trace_from(trace: Any, begin: Any) -> None:
    if begin not in ("start", "demand"):
        raise ValueError(
            f"`trace_from` says when recording begins. Expected 'start' or 'demand'. Received: trace_from={begin!r}"
        )
    if trace is None and begin != "start":
        raise ValueError(f"`trace_from` needs a file: init(trace=PATH). Received: trace_from={begin!r} without `trace`")


def _check_spatial(spatial: Any, size: int) -> None:
    if spatial is None:
        return
    parts = Grid.of(spatial).size
    if size % parts:
        raise ValueError(
            f"`spatial` splits each sample among {parts} ranks. Expected a number of ranks that {parts} divides. "
            f"Received: spatial={spatial!r} with {size} rank{'s' * (size > 1)}"
        )


def _check_virtual(count: Any, size: int, *, shard: bool, **others: Any) -> None:
    if count is None:
        return
    if not isinstance(count, int) or isinstance(count, bool) or count < size:
        raise ValueError(
            "`virtual_ranks` is how many parts a global batch has. Expected an integer, at least the number of ranks. "
            f"Received: virtual_ranks={count!r} with {size} rank{'s' * (size > 1)}"
        )
    plain = {"spatial": None, "wire_dtype": None, "teams": 1}
    given = [f"{name}={value!r}" for name, value in others.items() if value != plain[name]]
    given += [] if shard else ["shard=False"]
    if given:
        raise ValueError(
            "init(virtual_ranks=) shares out the data, to one team, whose gradients travel as they are. Received: "
            f"virtual_ranks={count} with {', '.join(given)}"
        )


def _check_shard_optimizer(shard_optimizer: Any, **others: Any) -> None:
    if not isinstance(shard_optimizer, bool):
        raise ValueError(
            "`shard_optimizer` says whether ranks share out the state of optimizers. Expected True or False. "
            f"Received: shard_optimizer={shard_optimizer!r}"
        )
    given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
    if shard_optimizer and given:
        raise ValueError(
            "init(shard_optimizer=True) does not go with virtual ranks, or with models in parts, so far. Received: "
            f"shard_optimizer=True with {', '.join(given)}"
        )


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
    check_wire(wire_dtype)
    for name, value in (("timeout_seconds", timeout_seconds), ("stall_seconds", stall_seconds)):
        if not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"`{name}` is a time. Expected a number of seconds > 0. Received: {name}={value!r}")
    if check_every is not None and (not isinstance(check_every, int) or check_every < 1):
        raise ValueError(
            "`check_replicas_every` is a number of steps. Expected None or an integer >= 1. "
            f"Received: check_replicas_every={check_every!r}"
        )
