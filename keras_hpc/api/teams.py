# SPDX-License-Identifier: Apache-2.0
"""How teams reduce: their schedules, ranks and reports, as the user sets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from keras_hpc.job import current, launch, log
from keras_hpc.job.current import team_number
from keras_hpc.job.schedule import Local, Schedule
from keras_hpc.job.team import NonMemberTeam, Team
from keras_hpc.job.team_making import make_team

_MIN_BUCKET, _MAX_BUCKET = 4096, 2**30  # bytes


def configure_team(
    team: int = 0,
    *,
    schedule: Literal["synchronous", "pipelined", "local"] = "synchronous",
    synchronous_steps: int | float = 0,
    cooldown_steps: int | float = 0,
    max_steps: int | None = None,
    wire_dtype: Literal["float32", "float16", "bfloat16"] | None = None,
    bucket_bytes: int | None = None,
    report_every: int | None = None,
    ranks: Sequence[int] | None = None,
    every: int | Literal["epoch"] | None = None,
    outer: Literal["nesterov"] | None = None,
    outer_rate: float | None = None,
    outer_momentum: float | None = None,
    average_optimizer: bool = False,
    overlap_steps: int = 0,
) -> None:
    """Says how a team reduces gradients. Call it before the first step of its models. Collective on the team.

    "synchronous": every step applies the average of its own gradients. "pipelined": a step applies the average of the
    gradients of the step before, whose reduction has had a whole step's time; the first one applies nothing. Every
    gradient is applied exactly once: what is outstanding is applied at the end of `fit`, before `evaluate`, `predict`,
    `save` and checkpoint callbacks, and, where steps become synchronous again, before that step's own average. Stale
    gradients can cost accuracy: begin synchronously, and end so.

    "local" (local SGD, arXiv:1805.09767): ranks apply their own gradients and send nothing; every so many steps their
    weights become the mean over ranks, weighted by the samples that each has seen since the last time. At the end of
    `fit`, before `evaluate`, `predict`, `save` and checkpoint callbacks, and in `drain`, weights and what optimizers
    keep are averaged, too: then all ranks hold the same. `save` is collective in the middle of a period. Losses, sample
    weights and masks are those of each rank's own batch.

    Args:
        team: number of the team.
        schedule: "synchronous", "pipelined" or "local".
        synchronous_steps: steps at the start of each `fit` that are synchronous, a number, or a fraction (a float) of
            its steps. With gradient accumulation, updates are counted.
        cooldown_steps: likewise at the end.
        max_steps: steps of the whole training, where no `fit` says so: with `train_on_batch` and loops of your own, and
            with data of unknown length.
        wire_dtype: gradients of float32 are rounded to it on their way between nodes. None: as `init` was told.
        bucket_bytes: gradients are reduced in buckets of at most so many bytes; the first can begin when its last
            gradient is there, and the last one ends when all are. Fewer, larger messages suit many nodes, smaller ones
            the caches of nodes with many ranks. None: 1 MiB, and 4 MiB from 32 nodes, but for the last tenth.
        report_every: after so many steps rank 0 prints what the team's reductions cost: bytes, time, how much of it
            steps waited, and how they went. None: never.
        ranks: the ranks of the job that belong to the team, in ascending order: its models are broadcast, reduced and
            shared out among them alone, and no other rank may use them. Collective on all ranks of the job then. Not
            for team 0, which always has all of them. None: as they are.
        every: with "local", after how many steps weights are averaged, counted from the last time; "epoch": at the end
            of each epoch of `fit` (DeepEx), and where `drain` is called. With gradient accumulation, updates.
        outer: with "local", what is done with the average of the weights: None takes it as it is; "nesterov" takes the
            way from the weights at the period's start to it as a gradient for SGD with Nesterov momentum, as in DiLoCo
            (arXiv:2311.08105): d = start - average, v = momentum v + d, weights = start - rate (d + momentum v).
        outer_rate: its learning rate. None: 0.7.
        outer_momentum: its momentum. None: 0.9.
        average_optimizer: with "local", whether what optimizers keep for each weight (momenta) is averaged with it;
            else it is each rank's own until the end.
        overlap_steps: with "local", so many steps run while an average is on its way; what they change is kept:
            weights = weights + (average - weights that were sent). Fewer than `every`. 0: steps wait for it.

    Raises:
        ValueError: an argument is not as described.
        RuntimeError: the team has reduced gradients already.
        PlanMismatchError: ranks pass different arguments.
    """
    members = team_number(team)
    if current.job().group is not None and (schedule == "local" or ranks is not None):
        raise ValueError(
            "With init(spatial=) ranks that compute a sample together have the same weights in each step, and a team "
            "has all ranks. Expected schedule='synchronous' or 'pipelined', and ranks=None. Received: "
            f"schedule={schedule!r}, ranks={ranks!r}"
        )
    if current.job().virtual is not None and (schedule != "synchronous" or ranks is not None or wire_dtype is not None):
        raise ValueError(
            "With init(virtual_ranks=) a team is synchronous, has all ranks, and gradients travel as they are. "
            f"Received: schedule={schedule!r}, ranks={ranks!r}, wire_dtype={wire_dtype!r}"
        )
    if schedule not in ("synchronous", "pipelined", "local"):
        raise ValueError(f"`schedule` is 'synchronous', 'pipelined' or 'local'. Received: schedule={schedule!r}")
    local = Local.of(schedule, every, outer, outer_rate, outer_momentum, average_optimizer, overlap_steps)
    for name, steps in (("synchronous_steps", synchronous_steps), ("cooldown_steps", cooldown_steps)):
        whole = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
        if not whole and not (isinstance(steps, float) and 0 <= steps <= 1):
            raise ValueError(
                f"`{name}` is a number of steps, or a fraction of all of them. Expected an integer >= 0 or a float "
                f"from 0.0 to 1.0. Received: {name}={steps!r}"
            )
    if max_steps is not None and (not isinstance(max_steps, int) or max_steps < 1):
        raise ValueError(f"`max_steps` is a number of steps. Expected an integer >= 1. Received: {max_steps!r}")
    if wire_dtype != "float32":
        check_wire(wire_dtype)
    if bucket_bytes is not None and (
        not isinstance(bucket_bytes, int) or not _MIN_BUCKET <= bucket_bytes <= _MAX_BUCKET
    ):
        raise ValueError(
            f"`bucket_bytes` is the size of a bucket. Expected an integer from {_MIN_BUCKET:,} to {_MAX_BUCKET:,}. "
            f"Received: {bucket_bytes!r}"
        )
    if report_every is not None and (not isinstance(report_every, int) or report_every < 1):
        raise ValueError(f"`report_every` is a number of steps. Expected an integer >= 1. Received: {report_every!r}")
    if ranks is not None:
        members = _restrict(team, ranks)
    if isinstance(members, NonMemberTeam):
        return
    _check_unused(members)
    chosen = Schedule(schedule, synchronous_steps, cooldown_steps, max_steps, local)
    if schedule != "synchronous" and current.job().shard_optimizer:
        raise ValueError(
            "A sharded optimizer updates weights on all ranks in each step, with the gradients of that step. Expected "
            f"schedule='synchronous', or init(shard_optimizer=False). Received: schedule={schedule!r}"
        )
    members.agree("The arguments of keras_hpc.configure_team", [f"{chosen}, {wire_dtype=!s}, {bucket_bytes=}"])
    members.schedule, members.report_every = chosen, report_every
    if chosen.pipelined and members.node_count == 1 < members.size and members.rank == 0:
        log.warning(
            f"All ranks of team {team} are on one node: there synchronous steps wait little for gradients, and "
            "pipelined steps, which apply them one step late, may take longer."
        )
    if bucket_bytes is not None:
        members.bucket_bytes = bucket_bytes
    if wire_dtype is not None:
        members.wire_dtype = None if wire_dtype == "float32" else wire_dtype
    current.job().delayed = any(t.schedule.kind != "synchronous" for t in current.job().teams)


def _check_unused(team: Team) -> None:
    if team.has_gradients:
        raise RuntimeError(
            f"Team {team.index} has reduced gradients already. Call keras_hpc.configure_team right after compile, "
            "before the first step."
        )


def _restrict(index: int, ranks: Sequence[int]) -> Team:
    """Make a team anew, of some ranks. Collective on all ranks of the job."""
    from mpi4py import MPI

    this = current.job()
    chosen = [int(rank) for rank in ranks]
    if index == 0 or not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < this.size:
        raise ValueError(
            "`ranks` are the ranks of a team other than team 0, which has all. Expected different numbers from 0 to "
            f"{this.size - 1}, ascending. Received: team={index}, ranks={ranks!r}"
        )
    old = this.teams[index]
    if len(old.ranks) < this.size:
        raise ValueError(f"A team gets its ranks once. Received: team={index}, which has {list(old.ranks)} already")
    _check_unused(old)
    this.teams[0].agree("The arguments of keras_hpc.configure_team", [f"team={index}, ranks={chosen}"])
    if len(chosen) == this.size:
        return old
    options = old.options
    old.close()
    comm = this.comm.Split(0 if this.rank in chosen else MPI.UNDEFINED, this.rank)
    team: Team
    if this.rank in chosen:
        nodes = [this.node_of_rank[rank] for rank in chosen]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        world = launch.World(comm, comm.rank, comm.size, [numbers[node] for node in nodes])
        team = make_team(world, index, **options)
        team.ranks, team.comm = tuple(chosen), comm
        team.wire_dtype, team.bucket_bytes, team.device = old.wire_dtype, old.bucket_bytes, old.device
    else:
        team = NonMemberTeam(index, this.rank, chosen)
    this.teams[index] = team
    return team


def drain(model: Any) -> None:
    """Apply the averages that pipelined teams still hold back from a model's variables, or average them. Collective.

    Of teams with local steps it averages weights, what optimizers keep, and statistics. `fit`, `evaluate` and `predict`
    do so themselves. For loops of your own: before they keep the state of a training, and at their end.
    """
    from keras_hpc.keras_hooks.state import settling

    current.job()
    settling.settle(model, statistics=True)


def check_wire(wire_dtype: Any) -> None:
    """Raise ValueError unless it is None or a dtype of 16 bits."""
    if wire_dtype not in (None, "float16", "bfloat16"):
        raise ValueError(
            "`wire_dtype` is what gradients are rounded to between nodes. Expected None, 'float16' or 'bfloat16'. "
            f"Received: wire_dtype={wire_dtype!r}"
        )
