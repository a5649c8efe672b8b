# SPDX-License-Identifier: Apache-2.0
"""What many ranks on few cores, plans that do nothing, and large segments cost."""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np

from keras_hpc.job.plan import Plan, TensorSpec
from keras_hpc.job.team import Team

Row = dict[str, Any]
_SMALL = 4096  # bytes
_BATCHES = 5  # of steps; the best counts, because others may use the machine


def measure(team: Team, idle_plans: int, mebibytes: int, steps: int) -> list[Row]:
    """Times a step of one small plan, alone and beside plans that do nothing, and the start of a large one. Collective.

    Args:
        team: of all ranks.
        idle_plans: made beside the one that is timed.
        mebibytes: of each rank, of a plan whose tensors live in the ranks' segment.
        steps: of each of the batches.

    Returns:
        One dictionary per kind: `wall_us` of a step, and `cpu_us`, of all ranks together; or `seconds` of a start.
    """
    plan, data = _small(team, "small"), np.ones(_SMALL // 4, np.float32)
    rows = [{"what": f"a step of a plan of {_SMALL:,} bytes"} | _step(team, plan, data, steps)]
    idle = [_small(team, f"idle {number}") for number in range(idle_plans)]
    rows.append({"what": f"the same beside {len(idle)} idle plans"} | _step(team, plan, data, steps))
    team.barrier()
    begin = time.perf_counter()
    team.plan("large", [TensorSpec("large", (mebibytes << 18,), "float32")], in_segment=True)
    seconds = _of_all(team, time.perf_counter() - begin).max()
    rows.append({"what": f"making a plan of {mebibytes} MiB of each rank", "seconds": round(float(seconds), 2)})
    return rows


def table(rows: list[Row], *, header: bool = True) -> str:
    """Returns the rows as text."""
    lines = []
    for row in rows:
        took = (
            f"{row['seconds']:.2f} s"
            if "seconds" in row
            else f"{row['cpu_us']:.1f} us CPU of all ranks, {row['wall_us']:.1f} us"
        )
        lines.append(f"{row['what']:46}{took}")
    return "\n".join(lines)


def _small(team: Team, name: str) -> Plan:
    return team.plan(name, [TensorSpec("a", (_SMALL // 4,), "float32")], op="sum")


def _of_all(team: Team, value: float) -> np.ndarray[Any, Any]:
    return team.allgather(np.array([value]))


def _step(team: Team, plan: Plan, data: np.ndarray[Any, Any], steps: int) -> Row:
    best: list[tuple[float, float]] = []
    for _ in range(_BATCHES + 1):  # the first warms up
        team.barrier()
        cpu, begin = _cpu_seconds(), time.perf_counter()
        for _ in range(steps):
            plan.start(0, data)
            plan.wait(0)
        wall, used = time.perf_counter() - begin, _cpu_seconds() - cpu
        best.append((float(_of_all(team, used).sum()), float(_of_all(team, wall).max())))
    cpu, wall = (1e6 * min(batch[i] for batch in best[1:]) / steps for i in (0, 1))
    return {"cpu_us": round(cpu, 2), "wall_us": round(wall, 2)}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
