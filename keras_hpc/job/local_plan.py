# SPDX-License-Identifier: Apache-2.0
"""Plans of weights that ranks average after periods of local steps; see native/engine/local_steps.hpp."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.schedule import Local

# What a step has to do, bits of its mode.
SYNCHRONOUS, ANCHOR, EXCHANGE, LAST = 1, 2, 4, 8


@dataclasses.dataclass(frozen=True)
class State:
    """What a checkpoint holds of a plan, beside its tensors.

    Attributes:
        since: steps of the running period.
        samples: of this rank in it.
        anchored: whether the arrays "anchor" count.
        travelling: whether "mean" and "sent" do.
    """

    since: int = 0
    samples: float = 0.0
    anchored: bool = False
    travelling: bool = False


class LocalPlan:
    """A plan of weights, and of what an optimizer keeps for them.

    Args:
        team: whose ranks average.
        key: names it, the same on every rank.
        tensors: the weights first.
        weights: how many they are.
        options: how local steps go.
        period: steps of a period; 0: only `finish` ends one.
    """

    def __init__(
        self, team: Any, key: str, tensors: Sequence[TensorSpec], weights: int, options: Local, period: int
    ) -> None:
        self.plan = team.plan(key, tensors)
        self.id: int = self.plan.id
        self.tensors = self.plan.tensors
        self.weights = weights
        self.options = options
        self._native = self.plan._native
        outer = options.outer is not None
        rates = (options.outer_rate, options.outer_momentum) if outer else (1.0, 0.0)
        self._native.make_local(period, options.overlap_steps, weights, outer, *rates)

    def set_schedule(self, synchronous: int, local: int) -> None:
        """So many steps from now are synchronous, so many then local, the rest synchronous again."""
        self._native.set_local_schedule(synchronous, local)

    def begin_local(self, samples: float) -> int:
        """Begin a step with so many samples of this rank; return what it has to do."""
        mode: int = self._native.begin_local(samples)
        return mode

    def set_anchor(self, tensor: int, weights: np.ndarray) -> None:
        """Give it a weight before the first update of a period, as bytes."""
        self._native.set_anchor(tensor, weights)

    def finish(self) -> bool:
        """Return whether tensors differ from their mean; then `exchange` makes them equal on all ranks."""
        differ: bool = self._native.finish_local()
        return differ

    def taken(self) -> int:
        """Return how many local steps there were."""
        taken: int = self._native.local_taken()
        return taken

    def exchange(self, arrays: Sequence[np.ndarray]) -> None:
        """Do what `finish`, or a step, has asked for, in place. Collective.

        Args:
            arrays: the values of all tensors.
        """
        for number, array in enumerate(arrays):
            self.plan.start(number, array)
        self.plan.wait_all()

    def state(self) -> State:
        """Return its state between steps; waits for an average that is on its way."""
        return State(*self._native.local_state())

    def restore(self, state: State) -> None:
        """Go on from a state of an earlier process. Between steps."""
        self._native.restore_local(state.since, state.samples, state.anchored, state.travelling)

    def memory(self, kind: str, tensor: int) -> np.ndarray:
        """Return the bytes of the "anchor" or "velocity" of a weight, or of what was "sent" and its "mean"."""
        memory: np.ndarray = self._native.local_memory(kind, tensor)
        return memory

    @property
    def kinds(self) -> dict[str, int]:
        """What memory it has, and of how many tensors."""
        found = {} if self.options.outer is None else dict.fromkeys(("anchor", "velocity"), self.weights)
        return found | ({} if not self.options.overlap_steps else dict.fromkeys(("mean", "sent"), len(self.tensors)))
