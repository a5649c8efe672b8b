# SPDX-License-Identifier: Apache-2.0
"""What runs in this thread: which step, which `fit`, `evaluate` or `predict`.

All of it is kept for each thread, as a job may train models of several teams in threads of their own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

from keras_hpc.backends import samples
from keras_hpc.spatial.run import Order


@dataclasses.dataclass
class Step:
    """The training or test step that runs, or is being traced.

    Args:
        model: the model whose step it is; None in a loop of the user's own.
        key: names the model's plans, the same on every rank.
        in_lockstep: whether all ranks run as many of these steps, so that they may exchange something in each.
        count: samples in this rank's batch, a number or a scalar tensor; None if the data has no batch axis.
        total: samples of all ranks, once they were exchanged.
        share: what the loss was multiplied with before its gradients were taken; None: with nothing.
        offset: of a virtual rank, what its random seeds are folded with, a number or a scalar tensor; None: of a rank.
        part: the number of the virtual rank, where it is known.
        weight: of a virtual rank, what its gradients are multiplied with where a plan adds them up; None: none does.
        twin: whether one other rank with the same samples is imagined, instead of asking the others.
        shares_states: whether what layers of the user's own keep becomes that of all ranks (layer_states.py).
        order: of the exchanges inside of models in parts.
        uses: how often each kind of exchange was used so far.
    """

    model: Any
    key: str
    in_lockstep: bool
    count: Any
    total: Any = None
    share: Any = None
    offset: Any = None
    part: int | None = None
    weight: float | None = None
    twin: bool = False
    shares_states: bool = False
    order: Order = dataclasses.field(default_factory=Order)
    uses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def next_use(self, what: str) -> int:
        """Return how often an exchange was used in this step before: 0, then 1, the same on every rank."""
        self.uses[what] += 1
        return self.uses[what] - 1


@dataclasses.dataclass
class Call:
    """The `fit`, `evaluate` or `predict` that runs.

    Args:
        kind: which of them; "train_on_batch" and the like have none of the attributes below.
        model: the model.
        active: whether it works together with other ranks.
        adapter: of the data that it reads; None in `train_on_batch` and `test_on_batch`.
        own_data: whether each rank evaluates data of its own, alone.
        settles: whether weights must be equal at the end of an epoch, as a callback saves the model.
        agree_each_batch: whether a callback may stop training after any batch.
        merges_logs: whether a callback looks at logs after a batch, which become those of all ranks.
        batches: of the epoch, after which ranks were at the last look.
        wants_to_stop: whether a callback of this rank has ended training where ranks did not ask each other.
        initial_epoch: number of the first epoch.
        epochs: number of the last epoch, plus one.
        session: the `Session` of a `Checkpoint`.
        announced: whether rank 0 has said how the data are shared out.
    """

    kind: Literal["fit", "evaluate", "predict", "train_on_batch", "test_on_batch"]
    model: Any
    active: bool
    adapter: Any = None
    own_data: bool = False
    settles: bool = False
    agree_each_batch: bool = False
    merges_logs: bool = False
    batches: int = 0
    wants_to_stop: bool = False
    initial_epoch: int = 0
    epochs: int = 0
    session: Any = None
    announced: bool = False


@dataclasses.dataclass
class Trial:
    """A step that is tried and changes nothing: see own_steps.py.

    Args:
        factor: what gradients are multiplied with where they are computed.
        gradients: what an optimizer would apply, a list for each call of one.
        takes_means: whether the step itself has asked for a mean over ranks.
        communicates: whether it has asked ranks for any reduction.
    """

    factor: float = 1.0
    gradients: list[list[Any]] = dataclasses.field(default_factory=list)
    takes_means: bool = False
    communicates: bool = False


class _Running(threading.local):
    step: Step | None = None
    call: Call | None = None
    building: bool = False
    trial: Trial | None = None
    writing_is_off: bool = False
    summed: bool = False


_running = _Running()


def step() -> Step | None:
    """Return the running step; None in a loop of the user's own."""
    return _running.step


def call() -> Call | None:
    """Return the innermost running call."""
    return _running.call


def building() -> bool:
    """Return whether a step is only traced to create its variables, so that nothing may be communicated."""
    return _running.building


def trial() -> Trial | None:
    """Return the trial of a step that runs; None: gradients are applied."""
    return _running.trial


def writing_is_off() -> bool:
    """Return whether models are not to be saved: in a callback that writes on another rank only."""
    return _running.writing_is_off


def running_step(value: Step | None) -> contextlib.AbstractContextManager[None]:
    """Context in which `value` is the running step."""
    return _with(step=value)


@contextlib.contextmanager
def running_call(value: Call) -> Iterator[None]:
    """Context in which `value` is the running call."""
    with samples.uncounted(), _with(call=value, step=None):
        yield


def only_building() -> contextlib.AbstractContextManager[None]:
    """Context in which a step is only traced to create its variables."""
    return _with(building=True)


@contextlib.contextmanager
def trying(factor: float = 1.0) -> Iterator[Trial]:
    """Context of the trial of a step."""
    found = Trial(factor)
    with _with(trial=found):
        yield found


def is_summed() -> bool:
    """Return whether gradients that are applied are those of all virtual ranks."""
    return _running.summed


def summing() -> contextlib.AbstractContextManager[None]:
    """Context in which gradients that are applied are those of all virtual ranks."""
    return _with(summed=True)


def without_writing() -> contextlib.AbstractContextManager[None]:
    """Context in which saving a model does nothing."""
    return _with(writing_is_off=True)


@contextlib.contextmanager
def _with(**values: Any) -> Iterator[None]:
    before = {name: getattr(_running, name) for name in values}
    vars(_running).update(values)
    try:
        yield
    finally:
        vars(_running).update(before)


def plain_name(variable: Any) -> str:
    """Return a variable's name as it is on every rank.

    That is neither its path, which is another one for a model that was loaded, nor the number that Keras may append.
    """
    return re.sub(r"(_\d+)?(:0)?$", "", str(getattr(variable, "name", "")))
