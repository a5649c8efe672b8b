# SPDX-License-Identifier: Apache-2.0
"""What a team's reductions cost a training: how long they took, and how much of that its steps had to wait."""

from __future__ import annotations

import dataclasses

from keras_hpc.job import current, log
from keras_hpc.job.team import Team


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a team's reductions cost over some steps, on this rank.

    Attributes:
        steps: executions of plans; a step of a model with one optimizer is one.
        bytes: reduced, of this rank.
        wire_seconds: from the start of the first tensor until the last is reduced, summed over the steps.
        exposed_seconds: that steps waited.
        algorithm: how.
    """

    steps: int
    bytes: int
    wire_seconds: float
    exposed_seconds: float
    algorithm: str

    @property
    def hidden(self) -> float:
        """The share of the reductions' time that no step waited, 0 to 1."""
        return max(0.0, 1 - self.exposed_seconds / self.wire_seconds) if self.wire_seconds > 0 else 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes over time of reductions, in GB/s."""
        return self.bytes / self.wire_seconds / 1e9 if self.wire_seconds > 0 else 0.0

    def logs(self, team: int) -> dict[str, float]:
        """Return them as values for a callback's `logs`: per step, in milliseconds and megabytes."""
        steps = max(self.steps, 1)
        name = f"communication/team{team}"
        return {
            f"{name}_mb": self.bytes / steps / 1e6,
            f"{name}_ms": self.wire_seconds / steps * 1e3,
            f"{name}_exposed_ms": self.exposed_seconds / steps * 1e3,
            f"{name}_hidden": self.hidden,
            f"{name}_gb_per_s": self.gigabytes_per_second,
        }

    def __str__(self) -> str:
        steps = max(self.steps, 1)
        return (
            f"{self.bytes / steps / 1e6:.2f} MB a step in {self.wire_seconds / steps * 1e3:.2f} ms "
            f"({self.gigabytes_per_second:.2f} GB/s), exposed {self.exposed_seconds / steps * 1e3:.2f} ms, "
            f"{self.hidden:.0%} hidden; {self.algorithm}"
        )


class Meter:
    """Figures of a team since the last look."""

    def __init__(self, team: Team, *, from_the_start: bool = False) -> None:
        self._team = team
        report = team.report()
        self._last = dict.fromkeys(report, 0) if from_the_start else report

    @property
    def steps(self) -> int:
        """Of the team at the last look."""
        return int(self._last["steps"])

    def read(self) -> Figures:
        """Return the figures since the last call, or since the meter was made."""
        now, last = self._team.report(), self._last
        self._last = now
        return Figures(
            steps=now["steps"] - last["steps"],
            bytes=now["bytes"] - last["bytes"],
            wire_seconds=now["wire_seconds"] - last["wire_seconds"],
            exposed_seconds=now["exposed_seconds"] - last["exposed_seconds"],
            algorithm=now["algorithm"],
        )


def after_step() -> None:
    """Log what teams with `report_every` have done since their last report. On each team's first rank."""
    job = current.job()
    for team in job.teams:
        if team.report_every is None or team.rank != 0:
            continue
        if team.index not in job.meters:
            job.meters[team.index] = Meter(team, from_the_start=True)
        meter = job.meters[team.index]
        first = meter.steps + 1
        if team.report()["steps"] - meter.steps >= team.report_every:
            figures = meter.read()
            log.info(f"team {team.index}, steps {first} to {meter.steps}: {figures}")
