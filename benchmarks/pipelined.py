# SPDX-License-Identifier: Apache-2.0
"""Where a pipelined step pays: on hosts whose link takes nearly as long as a step computes.

Computing is a sleep with the timeline of a real model, so that hosts which share this machine's cores do not slow each
other down; what travels is real.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks.steps import step_of
from keras_hpc.job import launch
from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team
from keras_hpc.tools.timeline import Timeline

Row = dict[str, Any]
_WAYS = ("alone", "synchronous", "pipelined")
_WARM_UP = 2  # steps; the first pipelined one has nothing to wait for


def measure(world: launch.World, timeline: Timeline, lanes: int, steps: int) -> list[Row]:
    """Times steps without communication, with it, and with that of the step before. Collective.

    Args:
        world: the ranks.
        timeline: of a step.
        lanes: communication threads of each rank.
        steps: timed of each way.

    Returns:
        One dictionary per way: `step_ms`, the median of the slowest rank, and `efficiency` against a step alone.
    """
    rows: list[Row] = []
    for way in _WAYS:
        team = make_team(world, 0, threads=lanes, timeout_seconds=300, stall_seconds=60)
        took = _median_ms(team, timeline, way, steps)
        team.barrier()
        team.close()
        alone = rows[0]["step_ms"] if rows else took
        rows.append({"way": way, "step_ms": round(took, 2), "efficiency": round(alone / took, 4)})
    return rows


def table(rows: list[Row], *, header: bool = True) -> str:
    """Returns the rows as text."""
    return "\n".join(f"{row['way']:14}{row['step_ms']:>10.1f} ms{row['efficiency']:>8.1%}" for row in rows)


def _median_ms(team: Team, timeline: Timeline, way: str, steps: int) -> float:
    specs = [TensorSpec(f"{i}", (n,), "float32") for i, n in enumerate(timeline.elements)]
    plan = team.plan("step", specs, pipelined=way == "pipelined")
    if plan.pipelined:
        plan.set_schedule(0, 1 << 62)
    run = step_of(plan, timeline, reduces=way != "alone")
    team.barrier()
    took = []
    for _ in range(steps + _WARM_UP):
        begin = time.perf_counter()
        run()
        time.sleep(timeline.update_s)
        took.append(time.perf_counter() - begin)
    if plan.pipelined:
        plan.take()  # what is still on its way
    slowest = team.allgather(np.array([took[_WARM_UP:]])).max(axis=0)
    return 1e3 * statistics.median(slowest.ravel())
