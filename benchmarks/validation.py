# SPDX-License-Identifier: Apache-2.0
"""How near the simulator comes to the engine, where the engine can be measured: on a few hosts with slow links.

Computing is a sleep, so that hosts which share cores do not slow each other down; what travels is real. Nothing is
fitted: a link has the bandwidth that it was given, less the headers of TCP, and the latency that a message of MPI has.
TCP of all hosts runs on the cores of one machine: messages share what an alltoall moves where no link has a limit.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.steps import step_of
from keras_hpc.job import launch
from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team
from keras_hpc.tools import simulator
from keras_hpc.tools.timeline import Timeline

_PAYLOAD = 1448 / 1514  # of an Ethernet frame of 1,500 bytes, as the link's limit counts it
_MIB = 1 << 20
_REPEATS, _ROUNDS = 7, 8
_NEAR = 0.1  # an error that was asked for
ALGORITHM = "rabenseifner"
SIZES = (4 << 10, 16 * _MIB)  # of allreduces: one bound by latency, one by bandwidth


def measure(world: launch.World, timeline: Timeline, mbit: int, repeats: int) -> list[dict[str, Any]]:
    """Times messages, allreduces and steps of the engine; on all ranks the same rows. Collective."""
    team = make_team(world, 0, threads=1, timeout_seconds=300, stall_seconds=60)
    team.native.add_choice("network", 0, 1 << 62, ALGORITHM)
    rows: list[dict[str, Any]] = []

    def look() -> list[float]:
        return [] if mbit else [_together(world, team)]

    speeds = look()
    for nbytes in SIZES:
        run = _steps(team, f"{nbytes} bytes", _at_once(nbytes))
        rows.append({"what": f"{nbytes:,} bytes", "nbytes": nbytes, "measured_ms": _median(team, run, repeats)})
        speeds += look()
    for seconds in _computing(mbit):
        run = _steps(team, f"step of {seconds} s", dataclasses.replace(timeline, compute_s=seconds, update_s=0.0))
        took = _median(team, run, repeats)
        rows.append(
            {
                "what": f"a step that computes for {1e3 * seconds:g} ms",
                "compute_ms": 1e3 * seconds,
                "measured_ms": took,
                "measured_exposed_ms": took - 1e3 * seconds,
            }
        )
        speeds += look()
    for row, around in zip(rows, itertools.pairwise(speeds), strict=False):
        row["together_gb_per_s"] = statistics.harmonic_mean(around)
    team.barrier()
    network = {"latency_us": _latency(world)} | ({} if mbit else {"together_gb_per_s": statistics.median(speeds)})
    team.close()
    return [network, *rows]


def _at_once(nbytes: int) -> Timeline:
    """As much as an allreduce of so many bytes, in tensors of at most 1 MiB."""
    count = max(1, nbytes // _MIB)
    return Timeline((nbytes // 4 // count,) * count, (0.0,) * count, 0.0, 0.0, ())


def _computing(mbit: int) -> list[float]:
    """Seconds of the steps to time on such a link: in the first not all of the reduction can hide."""
    return [800 / mbit, 2400 / mbit] if mbit else [0.2, 0.6]


def _latency(world: launch.World) -> float:
    """Of a message between the first two ranks, one way, microseconds."""
    buffer, took = np.zeros(8, np.uint8), []
    for _ in range(300):
        begin = time.perf_counter()
        if world.rank == 0:
            world.comm.Send(buffer, 1)
            world.comm.Recv(buffer, 1)
        elif world.rank == 1:
            world.comm.Recv(buffer, 0)
            world.comm.Send(buffer, 0)
        took.append(time.perf_counter() - begin)
    return float(world.comm.bcast(1e6 * statistics.median(took) / 2))


def _together(world: launch.World, team: Team) -> float:
    """What all ranks send at once, GB/s: each 1 MiB to each other one, as buckets travel in such pieces."""
    splits = [0 if rank == world.rank else _MIB for rank in range(world.size)]
    pieces, took = np.ones(sum(splits), np.uint8), []
    for _ in range(_REPEATS):
        team.barrier()
        begin = time.perf_counter()
        for _ in range(_ROUNDS):
            team.alltoall(pieces, splits)
        took.append(float(team.allgather(np.array([time.perf_counter() - begin])).max()))
    return _ROUNDS * len(pieces) * world.size / statistics.median(took) / 1e9


def _steps(team: Team, name: str, timeline: Timeline) -> Callable[[], float]:
    plan = team.plan(name, [TensorSpec(f"{i}", (n,), "float32") for i, n in enumerate(timeline.elements)])
    step = step_of(plan, timeline)

    def run() -> float:
        team.barrier()
        return step()

    return run


def _median(team: Team, run: Callable[[], float], repeats: int) -> float:
    run()
    slowest = [float(team.allgather(np.array([run()])).max()) for _ in range(repeats)]
    return 1e3 * statistics.median(slowest)


def add_simulated(
    program: Path, rows: list[dict[str, Any]], hosts: int, mbit: int, together: float, timeline: Timeline, folder: Path
) -> list[dict[str, Any]]:
    """Returns the rows with what the simulator says; `together`: GB/s, of links without a limit."""
    latency_us = rows[0]["latency_us"]
    options = ["--algorithm", ALGORITHM]
    found = []
    for row in rows[1:]:
        # A message passes two links, and between them what all share: as was measured just before and after it.
        all_share = row.get("together_gb_per_s", together)
        speed = mbit / 8e3 * _PAYLOAD if mbit else all_share
        shared = f'bb_bw="{all_share}GBps" bb_lat="0us"'
        platform = simulator.Platform("namespaces", hosts, speed, latency_us / 2, shared)
        if "nbytes" in row:
            steps = _at_once(row["nbytes"])
        else:
            steps = dataclasses.replace(timeline, compute_s=row["compute_ms"] / 1e3, update_s=0.0, variation=())
        said = simulator.simulate_steps(program, platform, hosts, folder, steps, options)
        found.append(
            row
            | {"hosts": hosts, "mbit": mbit, "latency_us": latency_us, "together_gb_per_s": all_share}
            | {"simulated_ms": said["step_ms"]}
            | ({"simulated_exposed_ms": said["exposed_ms"]} if "compute_ms" in row else {})
        )
    return found


def error(row: dict[str, Any], what: str = "ms") -> float:
    """Of what was simulated, as a share of what was measured."""
    share: float = row[f"simulated_{what}"] / row[f"measured_{what}"] - 1
    return share


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns how near the simulator came, in a sentence that stands beside what it says."""
    steps = [row for row in rows if "compute_ms" in row]
    errors = [error(row) for row in steps]
    exposed = [error(row, "exposed_ms") for row in steps]
    near, hosts = sum(abs(share) <= _NEAR for share in errors), max(row["hosts"] for row in steps)
    return (
        f"Against the engine on up to {hosts} hosts, {near} of {len(steps)} steps are within "
        f"{_NEAR:.0%} (error {min(errors):+.1%} to {max(errors):+.1%}); of exposed time "
        f"{sum(abs(share) <= _NEAR for share in exposed)} are ({min(exposed):+.0%} to {max(exposed):+.0%})"
    )
