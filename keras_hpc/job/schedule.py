# SPDX-License-Identifier: Apache-2.0
"""When a team applies which gradients, those of the step or those of the step before; or averages weights instead."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Local:
    """How local steps go; see `configure_team`."""

    every: int | Literal["epoch"]
    outer: Literal["nesterov"] | None = None
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    average_optimizer: bool = False
    overlap_steps: int = 0

    @classmethod
    def of(
        cls,
        kind: str,
        every: Any,
        outer: Any,
        outer_rate: Any,
        outer_momentum: Any,
        average_optimizer: Any,
        overlap_steps: Any,
    ) -> Local | None:
        """Return what the arguments of `configure_team` say; None for other schedules.

        Raises:
            ValueError: an argument is not as described there.
        """
        if kind != "local":
            given = {"every": every, "outer": outer, "outer_rate": outer_rate, "outer_momentum": outer_momentum}
            found = [f"{name}={value!r}" for name, value in given.items() if value is not None]
            found += ["average_optimizer=True"] * bool(average_optimizer)
            found += [f"overlap_steps={overlap_steps!r}"] * bool(overlap_steps)
            if found:
                raise ValueError(
                    f"These arguments are of local steps. Expected schedule='local' beside them. Received: "
                    f"schedule={kind!r}, {', '.join(found)}"
                )
            return None
        if every != "epoch" and not _is_count(every, 1):
            raise ValueError(
                "`every` says after how many local steps weights are averaged. Expected an integer >= 1, or 'epoch'. "
                f"Received: every={every!r}"
            )
        if outer not in (None, "nesterov"):
            raise ValueError(
                "`outer` is the optimizer that takes the averages of weights. Expected None or 'nesterov'. Received: "
                f"outer={outer!r}"
            )
        if outer is None and (outer_rate is not None or outer_momentum is not None):
            raise ValueError(
                "Without an outer optimizer weights become their mean. Expected outer='nesterov' beside its rate and "
                f"momentum. Received: outer_rate={outer_rate!r}, outer_momentum={outer_momentum!r}"
            )
        rate = 0.7 if outer_rate is None else outer_rate
        momentum = 0.9 if outer_momentum is None else outer_momentum
        if not _is_number(rate) or not rate > 0:
            raise ValueError(f"`outer_rate` is a learning rate. Expected a number > 0. Received: {outer_rate!r}")
        if not _is_number(momentum) or not 0 <= momentum < 1:
            raise ValueError(f"`outer_momentum` is a number from 0 to below 1. Received: {outer_momentum!r}")
        if not isinstance(average_optimizer, bool):
            raise ValueError(f"`average_optimizer` is True or False. Received: {average_optimizer!r}")
        if not _is_count(overlap_steps, 0) or (overlap_steps and (every == "epoch" or overlap_steps >= every)):
            raise ValueError(
                "`overlap_steps` is how many steps run while an average is on its way. Expected an integer >= 0, less "
                f"than `every`, which is a number of steps then. Received: overlap_steps={overlap_steps!r}, "
                f"every={every!r}"
            )
        return cls(every, outer, float(rate), float(momentum), average_optimizer, overlap_steps)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a team applies which gradients; see `configure_team`."""

    kind: Literal["synchronous", "pipelined", "local"] = "synchronous"
    synchronous_steps: int | float = 0
    cooldown_steps: int | float = 0
    max_steps: int | None = None
    local: Local | None = None

    @property
    def pipelined(self) -> bool:
        """Whether there are pipelined steps."""
        return self.kind == "pipelined"

    def window(self, steps: int | None, done: int = 0) -> tuple[int, int]:
        """Return how many of a training's `steps` are synchronous at its start, and how many then are not.

        Args:
            steps: of the whole training; None if nobody knows.
            done: how many of them are over; those that are left are counted.

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
            begin, length = int(first), 2**62
        else:
            begin, end = (round(x * steps) if isinstance(x, float) else min(int(x), steps) for x in (first, last))
            length = max(0, steps - begin - end) if last else 2**62
        return max(0, begin - done), max(0, length - max(0, done - begin))


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
