# SPDX-License-Identifier: Apache-2.0
"""What follows when `fit`, `evaluate` or `predict` ends in an exception, which a script may catch to go on.

All ranks must leave such a call, or one trains its next model while another still trains this one. The rank that
fails tells the others as soon as it communicates again, not at once: where nobody catches the exception, it ends the
job. The others then raise a `PlanMismatchError` out of the same call. What ranks knew of the model goes, as each may
have come to another point, and so do the names that the call has given: the next call finds ranks as if they had never
begun this one.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

from keras_hpc import _native
from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.spatial.plan import functional_of

_OF_SHAPES = re.compile(r"shape|size of tensor|dimension|must be equal|broadcast", re.IGNORECASE)


@contextlib.contextmanager
def running_call(call: running.Call) -> Iterator[None]:
    """Context in which `call` runs, as in `running.running_call`. Ranks are told of an exception that leaves it."""
    if not call.active or running.call() is not None:  # what fails in the midst of a call may be caught there
        with running.running_call(call):
            yield
        return
    job = current.job()
    first, handled = job.known.named, sys.exc_info()[1]
    try:
        with running.running_call(call):
            yield
    except Exception as error:
        if current.is_initialized() and current.job() is job:
            is_told = _is_told(error, handled)
            if not is_told:  # those of the engine say themselves what they are about
                _explain(job, error)
            _forget(job, call.model, first)
            current.team_of(call.model).tell_later(f"Model.{call.kind}()", None if is_told else error)
        raise


def agree_on_names(team: Any) -> None:
    """Let all ranks count on from one number where a call has failed, and end the plans of what is gone. Collective.

    Raises:
        RuntimeError: on every rank, where an earlier call has ended in the midst of a step.
    """
    known = current.job().known
    everyone = team.allgather_object([known.named, known.has_failed], "Model.fit()")
    if any(failed for _, failed in everyone):
        known.named = max(number for number, _ in everyone)
        _check_steps(team)
    known.has_failed = False
    team.retire(known.gone)


def _check_steps(team: Any) -> None:
    """Raise where some ranks have begun a step that others never will. Collective."""
    reached = team.native.progress()
    mine = [[what, step, bool(missing)] for what, (step, missing) in reached.items() if what.startswith("plan")]
    everyone = team.allgather_object(mine, "steps begun before Model.fit()")
    for plans in zip(*everyone, strict=True):
        if len(set(map(tuple, plans))) > 1 or any(is_open for *_, is_open in plans):
            steps = ", ".join(f"step {step} on rank {rank}" for rank, (_, step, _) in enumerate(plans))
            raise RuntimeError(
                "A call before this one ended by an exception on some rank while others were in the midst of a step, "
                "which they can never end: this job can train no more. Expected an exception that all ranks raise, or "
                f"that none catches. Received: {plans[0][0]}, {steps} of the team"
            )


def _explain(job: current.Job, error: BaseException) -> None:
    """Add to an error of shapes what a script that was written for one rank may not know."""
    if job.batch == "global" and job.size > 1 and _OF_SHAPES.search(str(error)):
        error.add_note(
            f"If this works without keras_hpc: each of the {job.size} ranks has its part of a batch. A step, layer or "
            "loss that has the batch size written into it must ask for it, as in keras.ops.shape(x)[0]."
        )


def _forget(job: current.Job, model: Any, first: int) -> None:
    state = job.known.model(model)
    if state.early_start is not None:
        state.early_start.remove()
    if job.virtual is not None:
        job.virtual.states.clear()
    job.known.forget(model, first)
    job.known.model(functional_of(model)).checked_calls = 0
    # They may hold plans by names that are gone.
    model.train_function = model.test_function = None


def _is_told(error: BaseException | None, handled: BaseException | None) -> bool:
    """Return whether other ranks know of an error, or of one that it came from: those of the engine all ranks get.

    `handled`: what the script was handling when it began the call, of which the error may not have come.
    """
    seen = {id(handled)}  # an error may be its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, _native.Error) or hasattr(error, "_keras_hpc_is_told"):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
