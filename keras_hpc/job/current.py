# SPDX-License-Identifier: Apache-2.0
"""The job of this process: who and where it is, its teams, and what works for this rank alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from keras_hpc.errors import NotInitializedError
from keras_hpc.job import log
from keras_hpc.job.devices import Device
from keras_hpc.job.model_state import Known
from keras_hpc.job.team import Team
from keras_hpc.job.virtual import Virtual

_local = threading.local()
_counting = threading.Lock()
_in_local = 0  # how many `local()` have begun and are not over, in all threads
_before_leaving: set[Callable[[], object]] = set()
_job: Job | None = None
_had_job = False
# Of a forked child: kept, because to free it would close what the parent uses.
_of_parent: Job | None = None


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
        delayed: whether a team is not synchronous: then one rank alone has something to do, too.
        guard: the `exit.Guard` of this process.
        shard_optimizer: whether each rank keeps its part of the state of optimizers.
        keep_memory: whether memory may be taken where it makes steps faster.
        group: the `spatial.group.Group` of this rank; None: each rank computes whole samples.
        device: the `Device` that this rank computes on; None: the CPU.
        virtual: the fixed parts of every global batch; None: each rank has one, of its own size.
        watchdog: the `Watchdog`, which reports waits that take long; None with one rank.
        known: what is known of the user's models and optimizers.
        streams: this rank's states of random streams that have others outside of steps.
        said: what the user was told and needs to be told once only.
        had_local: whether the user has called `local`.
        marks: of the files that this rank has saved.
        meters: what teams with `report_every` have done, by their number.
        checkpoints: those that loops of the user's own keep.
        at_end: gives back, in the reverse order, what `init` has taken.
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
    guard: Any
    shard_optimizer: bool = False
    keep_memory: bool = True
    group: Any = None
    device: Device | None = None
    delayed: bool = False
    virtual: Virtual | None = None
    watchdog: Any = None
    known: Known = dataclasses.field(default_factory=Known)
    streams: dict[str, Any] = dataclasses.field(default_factory=dict)
    said: set[str] = dataclasses.field(default_factory=set)
    had_local: bool = False
    marks: Any = None
    meters: dict[int, Any] = dataclasses.field(default_factory=dict)
    checkpoints: Any = None
    at_end: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def all_teams(self) -> list[Team]:
        """The teams, and that of this rank's group."""
        return [*self.teams, *([] if self.group is None else [self.group.team])]

    @property
    def shares_samples(self) -> bool:
        """Whether results are to be those of one rank, and ranks have other samples of the batch: not one group."""
        return self.batch == "global" and (self.group is None or self.group.count > 1)

    @property
    def members(self) -> dict[int, Sequence[int]]:
        """The ranks of each team, and of the teams of all groups, by their numbers."""
        found: dict[int, Sequence[int]] = {team.index: team.ranks for team in self.teams}
        if self.group is not None:
            size = self.group.size
            for number in range(self.group.count):
                found[len(self.teams) + number] = range(number * size, (number + 1) * size)
        return found


def begin(job: Job) -> None:
    """Make `job` the job of this process."""
    global _job, _had_job
    _job, _had_job = job, True


def had_job() -> bool:
    """Return whether this process has, or had, a job."""
    return _had_job


def end() -> None:
    """Forgets the job, and with it all that was known of models."""
    global _job
    _job = None


def _forget_in_child() -> None:
    """A forked child is no rank: its parent goes on as one."""
    global _job, _of_parent
    _of_parent, _job = _job, None


os.register_at_fork(after_in_child=_forget_in_child)


def of_parent() -> Job | None:
    """Return the job of the process that forked this one; None in a process that is a rank itself, or has no job."""
    return _of_parent


def job() -> Job:
    """Return the job.

    Raises:
        NotInitializedError: before `init` or after `finalize`.
    """
    if _job is None:
        raise NotInitializedError("Call keras_hpc.init() first: there is no job yet, or finalize() has ended it.")
    return _job


def is_initialized() -> bool:
    """Return whether there is a job: `init` was called, `finalize` was not."""
    return _job is not None


def rank() -> int:
    """Return this process' number, 0 to `size() - 1`."""
    return job().rank


def size() -> int:
    """Return the number of ranks."""
    return job().size


def replicas() -> int:
    """Return how many replicas, or virtual ranks, train on samples of their own; 1 without a job."""
    if not is_initialized():
        return 1
    virtual = job().virtual
    return job().teams[0].replicas if virtual is None else virtual.count


def local_rank() -> int:
    """Return this rank's number on its node, 0 to `local_size() - 1`."""
    return job().local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return job().local_size


def node() -> int:
    """Return the number of this node, 0 to `node_count() - 1`."""
    return job().node


def node_count() -> int:
    """Return the number of nodes."""
    return job().node_count


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Work for this rank alone: inside, Keras behaves in this thread as if keras_hpc were not there.

    ```python
    with keras_hpc.local():
        history = probe.fit(x, y)  # not collective
    ```
    """
    if _job is not None:
        _job.had_local = True
    with unhooked():
        yield


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """Do as `local` does, where it is not the user who asks for it."""
    global _in_local
    _local.depth = getattr(_local, "depth", 0) + 1
    with _counting:
        _in_local += 1
    try:
        yield
        for wait in list(_before_leaving):
            wait()
    finally:
        _local.depth -= 1
        with _counting:
            _in_local -= 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Do as `unhooked`, where other ranks do not do the same: what would wait for them is an error."""
    _local.alone = True
    try:
        with unhooked():
            yield
    finally:
        _local.alone = False


def is_local() -> bool:
    """Return whether this thread is inside `local()`."""
    return getattr(_local, "depth", 0) > 0


def anyone_is_local() -> bool:
    """Return whether some thread is inside `local()`: a framework may call back from a thread of its own."""
    return _in_local > 0


def before_leaving_local(wait: Callable[[], object]) -> None:
    """Call `wait` at the end of each `local()`: a framework may run later what was called inside."""
    _before_leaving.add(wait)


def active() -> bool:
    """Return whether this call works together with other ranks, or with other steps."""
    if _job is None or is_local():
        return False
    # A rank that stands in for a group (`tools.alone`) has no others in its job.
    return _job.size > 1 or _job.delayed or _job.virtual is not None or _job.group is not None


def notice(text: str) -> None:
    """Log one line of information on rank 0."""
    if _job is None or _job.rank == 0:
        log.info(text)


def assign_team(model_or_optimizer: Any, team: int) -> None:
    """Lets a model train on a team of its own; team 0 is the default. Call it right after `compile`.

    Args:
        model_or_optimizer: a compiled model, or an optimizer that a custom training step owns.
        team: number of a team, 0 to `teams - 1` of `keras_hpc.init(teams=...)`. The same on all ranks.

    Raises:
        ValueError: there is no such team.
        TypeError: neither a compiled model nor an optimizer.
    """
    team_number(team)
    optimizer = getattr(model_or_optimizer, "optimizer", model_or_optimizer)
    if not hasattr(optimizer, "apply"):
        raise TypeError(f"Expected a compiled model or an optimizer. Received: {model_or_optimizer!r}")
    assigned = job().known.teams
    assigned[optimizer] = assigned[model_or_optimizer] = team
    for held in (getattr(optimizer, "inner_optimizer", None), *(getattr(optimizer, "optimizers", None) or ())):
        if held is not None:
            assigned[held] = team


def team_number(team: Any) -> Team:
    """Return a team by its number.

    Raises:
        ValueError: there is no such team.
    """
    if getattr(_local, "alone", False):
        raise RuntimeError("keras_hpc tries something on this rank alone, so ranks cannot communicate in it")
    teams = job().teams
    if not isinstance(team, int) or not 0 <= team < len(teams):
        raise ValueError(
            f"There is no such team. Expected a number from 0 to {len(teams) - 1}; keras_hpc.init(teams=...) sets how "
            f"many there are. Received: team={team!r}"
        )
    return teams[team]


def team_of(owner: Any) -> Team:
    """Return the team of a model, an optimizer or a layer: as assigned, else team 0."""
    this = job()
    number = this.known.teams.get(owner)
    optimizer = getattr(owner, "optimizer", None)
    if number is None and optimizer is not None:
        number = this.known.teams.get(optimizer)
    return this.teams[number or 0]
