# SPDX-License-Identifier: Apache-2.0
"""What the hooks know of the call they are in: is communication on, which step runs, which `fit`.

All of it is kept for each thread, as a job may train models of several teams in threads of their own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Step:
    """The training or test step that runs, or is being traced.

    Args:
        model: the model whose step it is.
        key: names the model's plans, the same on every rank.
        together: whether all ranks run as many of these steps, so that they may exchange something in each.
        count: samples in this rank's batch, a number or a scalar tensor; None if the data has no batch axis.
        total: samples of all ranks, once they were exchanged.
        uses: how often each kind of exchange was used so far.
    """

    model: Any
    key: str
    together: bool
    count: Any
    total: Any = None
    uses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def next_use(self, what: str) -> int:
        """Returns how often an exchange was used in this step before: 0, then 1, the same on every rank."""
        self.uses[what] += 1
        return self.uses[what] - 1


@dataclasses.dataclass
class Fit:
    """The `fit` that runs.

    Args:
        model: the model that trains.
        saves: whether a callback of the user's saves the model at the end of an epoch.
        agree_each_batch: whether a callback may stop training after any batch.
        initial_epoch: number of the first epoch.
        epochs: number of the last epoch, plus one.
    """

    model: Any
    saves: bool = False
    initial_epoch: int = 0
    agree_each_batch: bool = False
    epochs: int = 0


class _Scope(threading.local):
    step: Step | None = None
    fit: Fit | None = None
    adapter: Any = None  # of the data that was last opened; None in train_on_batch


_scope = _Scope()


def plain_name(variable: Any) -> str:
    """Returns a variable's name as it is on every rank.

    That is neither its path, which is another one for a model that was loaded, nor the number that Keras may append.
    """
    return re.sub(r"(_\d+)?(:0)?$", "", str(variable.name))


def forget() -> None:
    """Forgets the data that was opened."""
    _scope.adapter = None


def step() -> Step | None:
    """Returns the running step; None in a loop of the user's own."""
    return _scope.step


def fit() -> Fit | None:
    """Returns the running `fit`."""
    return _scope.fit


def adapter() -> Any:
    """Returns the adapter of the data set that was last opened."""
    return _scope.adapter


def set_adapter(value: Any) -> None:
    """Remembers the adapter of the data set that was opened."""
    _scope.adapter = value


@contextlib.contextmanager
def running_step(value: Step) -> Iterator[Step]:
    """Makes `value` the running step."""
    before, _scope.step = _scope.step, value
    try:
        yield value
    finally:
        _scope.step = before


@contextlib.contextmanager
def running_fit(value: Fit) -> Iterator[Fit]:
    """Makes `value` the running `fit`."""
    before, _scope.fit = _scope.fit, value
    try:
        yield value
    finally:
        _scope.fit = before
