# SPDX-License-Identifier: Apache-2.0
"""When a team applies which gradients: those of the step, or those of the step before."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a team applies which gradients; see `configure_team`."""

    kind: Literal["synchronous", "pipelined"] = "synchronous"
    synchronous_steps: int | float = 0
    cooldown_steps: int | float = 0
    max_steps: int | None = None

    @property
    def pipelined(self) -> bool:
        """Whether there are pipelined steps."""
        return self.kind == "pipelined"

    def window(self, steps: int | None) -> tuple[int, int]:
        """Return how many of a training's `steps` are synchronous at its start, and how many then are pipelined.

        Raises:
            ValueError: that depends on the number of steps, and it is None.
        """
        first, last = self.synchronous_steps, self.cooldown_steps
        if steps is None:
            if isinstance(first, float) or last:
                raise ValueError(
                    "Fractions of the training, and a cool-down at its end, need its number of steps, which the data "
                    "do not tell. Expected keras_hpc.configure_team(..., max_steps=...). Received: max_steps=None"
                )
            return int(first), 2**62
        counts = [round(x * steps) if isinstance(x, float) else min(int(x), steps) for x in (first, last)]
        return counts[0], max(0, steps - sum(counts)) if last else 2**62
