# SPDX-License-Identifier: Apache-2.0
"""What ranks do before they look at a model together, or end: apply late averages, and average what is apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.schedules import delayed, local_steps


def plan_schedule(model: Any, total: int | None, done: int = 0) -> None:
    """Tells the engine which of a `fit`'s steps are synchronous.

    Args:
        model: the model that trains.
        total: steps of the whole `fit`; None if nobody knows.
        done: how many of them an earlier process made.

    Raises:
        ValueError: the schedule needs the number of steps, and nobody knows it.
    """
    schedule = current.team_of(model).schedule
    if schedule.kind == "synchronous" or model.optimizer is None:
        return
    steps = schedule.max_steps if total is None else total
    if schedule.pipelined:
        delayed.set_window(model, schedule, steps, done)
    else:
        local_steps.set_window(model, schedule, steps, done)


def settle(model: Any, *, statistics: bool = False) -> None:
    """Give all ranks the same weights of a model, with all gradients applied. Collective on its optimizers' teams.

    Args:
        model: it, or a module of PyTorch.
        statistics: average those of its layers, too, where ranks make local steps.
    """
    if hasattr(model, "variables"):  # else a module of PyTorch, whose optimizers are never late
        delayed.drain(model)
    local_steps.average(model, statistics=statistics)


@contextlib.contextmanager
def settled(model: Any) -> Iterator[None]:
    """Inside, a model is as `settle` would leave it. For saving, which one rank may do alone.

    Late averages of pipelined teams are applied for the time only. In the middle of a period of local steps no rank has
    the mean: then it is collective.

    Raises:
        RuntimeError: a callback that runs on one rank saves in the middle of a period.
    """
    if local_steps.is_apart(model):
        call = running.call()
        if call is not None and call.kind == "fit":
            raise RuntimeError(
                "A callback saves a model in the middle of a period of local steps, when each rank has other weights. "
                "Expected saving at the end of an epoch by ModelCheckpoint, or keras_hpc.callbacks.Checkpoint. "
                f"Received: model `{model.name}`"
            )
        current.team_of(model).meet("Model.save() in the middle of a period of local steps")
        local_steps.average(model, statistics=True)
    with delayed.drained(model):
        yield


def say_what_is_left() -> None:
    """Tells the user of averages that no step has applied, of weights that are apart, and of ranks that were alone."""
    delayed.say_what_is_late()
    local_steps.say_what_is_apart()
    _say_who_was_alone()


def _say_who_was_alone() -> None:
    """Tells the user that ranks have computed by themselves: what averages nothing may be a loop that nobody hooks."""
    job = current.job()
    meant = job.had_local or job.guard.exit_code != 0
    if job.size > 1 and not meant and not any(team.has_joined_values for team in job.all_teams):
        current.notice(
            f"the {job.size} ranks of this job have averaged nothing. If they have trained, each has trained alone: "
            "gradients that no optimizer of Keras or torch.optim applies need keras_hpc.allreduce(gradients)"
        )
