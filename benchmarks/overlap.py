# SPDX-License-Identifier: Apache-2.0
"""How much of a reduction hides behind computing: what a training step costs with it, and without.

A step computes in as many pieces as there are tensors and starts one tensor after each, as backward does. Each way to
wait has its own measurements of computing alone, just before and just after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.team import Team

# How the tensors lie, communication threads, and how whoever waits for another rank does so.
STRATEGIES = {
    "segment, no thread": ("segment", 0, "auto"),
    "private, no thread": ("private", 0, "auto"),
    "private, thread spins 20 us, then sleeps": ("private", 1, "auto"),
    "private, thread sleeps": ("private", 1, "sleep"),
    "private, thread yields": ("private", 1, "yield"),
    "private, thread spins": ("private", 1, "spin"),
    "pipelined, thread spins 20 us, then sleeps": ("pipelined", 1, "auto"),
}
Row = dict[str, Any]
_WARM_UP = 3  # steps


def measure(
    make_team: Callable[[int, str], Team],
    tensors: int,
    nbytes: int,
    compute_seconds: float,
    steps: int,
    done: Callable[[Row], None],
) -> list[Row]:
    """Times steps with a reduction behind them. Collective.

    A pipelined step waits for the reduction of the step before, which has had all of a step's time.

    Args:
        make_team: makes a team with so many communication threads that wait so.
        tensors: reduced in each step.
        nbytes: of each of them.
        compute_seconds: about how long a step computes.
        steps: timed steps of each kind.
        done: called with each row as soon as it is known.

    Returns:
        One dictionary per way, the same on all ranks: `compute_ms`, a step without communication, half of them timed
        before and half after there was a team for it; `alone_ms`, the reduction without computing; `step_ms`, both;
        medians over the steps, of the slowest rank. `ratio` is `step_ms / compute_ms`, `hidden` the share of the
        reduction's time that the step does not take longer.
    """
    base = make_team(0, "auto")
    piece = _computing(base, compute_seconds / tensors)
    rows = []
    for strategy, (place, threads, waiting) in STRATEGIES.items():
        compute = _times(base, steps // 2, _step(tensors, piece, None))
        team = make_team(threads, waiting)
        start, wait = _reduction(team, tensors, nbytes, place)
        alone = _times(base, steps, _step(tensors, None, (start, wait)))
        step = _times(base, steps, _step(tensors, piece, (start, wait)))
        base.barrier()
        team.close()
        compute += _times(base, steps - steps // 2, _step(tensors, piece, None))
        slowest = [1e3 * float(np.median(base.allgather(np.array([s])).max(axis=0))) for s in (compute, alone, step)]
        row: Row = {"strategy": strategy, "tensors": tensors, "bytes": nbytes}
        row |= {key: round(value, 3) for key, value in zip(("compute_ms", "alone_ms", "step_ms"), slowest, strict=True)}
        row["ratio"] = round(slowest[2] / slowest[0], 3)
        row["hidden"] = round(1 - (slowest[2] - slowest[0]) / slowest[1], 2)
        done(row)
        rows.append(row)
    base.barrier()
    base.close()
    return rows


def table(row: Row, *, header: bool) -> str:
    """Returns a row as text."""
    line = (
        f"{row['strategy']:42}{row['compute_ms']:>11.3f}{row['alone_ms']:>14.3f}{row['step_ms']:>9.3f}"
        f"{row['ratio']:>7.2f}{row['hidden']:>8.0%}"
    )
    names = f"{'tensors, way to wait':42}{'compute ms':>11}{'reduction ms':>14}{'step ms':>9}{'ratio':>7}{'hidden':>8}"
    return f"{names}\n{line}" if header else line


def _step(
    tensors: int,
    piece: Callable[[], None] | None,
    reduction: tuple[Callable[[int], None], Callable[[int], None]] | None,
) -> Callable[[], None]:
    def run() -> None:
        for i in range(tensors):
            if piece:
                piece()
            if reduction:
                reduction[0](i)
        for i in range(tensors):
            if reduction:
                reduction[1](i)

    return run


def _times(team: Team, steps: int, run: Callable[[], None]) -> list[float]:
    """Seconds of each step on this rank; all ranks begin together. Collective."""
    together = np.zeros(1, np.float32)
    seconds = []
    for number in range(steps + _WARM_UP):
        team.allreduce(together)
        begin = time.perf_counter()
        run()
        if number >= _WARM_UP:
            seconds.append(time.perf_counter() - begin)
    return seconds


def _reduction(
    team: Team, tensors: int, nbytes: int, place: str
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    specs = [TensorSpec(f"t{i}", (nbytes // 4,), "float32") for i in range(tensors)]
    plan = team.plan("overlap", specs, in_segment=place == "segment", pipelined=place == "pipelined")
    if place == "pipelined":
        plan.set_schedule(0, 2**62)
    own = [np.empty(nbytes // 4, np.float32) for _ in specs]
    arrays = [plan.array(i) for i in range(tensors)] if place == "segment" else own
    for array in arrays:
        array[:] = 1

    def start(i: int) -> None:
        plan.start(i, arrays[i])

    return start, plan.wait


def _computing(team: Team, seconds: float) -> Callable[[], None]:
    """Returns a function that computes for about so long; the same work on all ranks. Collective."""
    x = np.ones(4096, np.float32)

    def multiply(times: int) -> None:
        for _ in range(times):
            np.multiply(x, np.float32(1.0), out=x)

    speeds = []
    for _ in range(50):  # the first ones on a core that is still waking up
        begin = time.perf_counter()
        multiply(1000)
        speeds.append(1000 / (time.perf_counter() - begin))
    count = np.array([np.median(speeds[10:]) * seconds])
    team.allreduce(count, "min")
    return lambda: multiply(int(count[0]))
