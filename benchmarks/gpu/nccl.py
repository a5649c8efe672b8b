# SPDX-License-Identifier: Apache-2.0
"""N1: NVIDIA's NCCL below a plan, as a job: `mpiexec -n 2 python -m benchmarks.gpu.nccl`.

Ranks that share a GPU can use NCCL from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1, which this sets. With an older one
the plan has to be refused on all ranks alike, with NCCL's or our reason.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys

import numpy as np

from benchmarks.gpu import say
from benchmarks.gpu.staged import times_of
from keras_hpc import _native
from keras_hpc.job import launch, nccl
from keras_hpc.job.plan import Plan, TensorSpec
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team

_COUNTS = [7, 1000, 300_000, 4096, 70_001]


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--largest", type=int, default=256 << 20, help="bytes, of the table")
    arguments = parser.parse_args()
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    world = launch.connect(None)
    ordinal = world.local_rank % len(_native.visible_devices())
    team = make_team(world, 0, 1, 60.0, 30.0)
    try:
        specs = [TensorSpec(f"t{number}", (count,), "float32") for number, count in enumerate(_COUNTS)]
        plan = team.plan("by NCCL", specs, in_segment=True, device=-1)
        version, problem = _open(plan, ordinal)
        if team.rank == 0:
            sys.stderr.write(f"NCCL {version}: {problem or 'reduces from GPU to GPU'}\n")
            say("N1", f"NCCL {version} with {team.size} ranks here: used, or refused on all", 1 - bool(problem), "")
        if not problem:
            _check_values(team, plan, ordinal, arguments.steps)
            _measure(team, ordinal, arguments.largest)
    finally:
        team.close()
        world.close()


def _open(plan: Plan, ordinal: int) -> tuple[int, str]:
    """Return the version of NCCL, and why it does not reduce the plan, if it does not. Collective."""
    problem = ""
    try:
        plan.open_nccl(ordinal, nccl.agree(plan, ordinal))
    except _native.Error as error:
        problem = str(error)
    try:
        return nccl.load(), problem
    except _native.Error:
        return 0, problem


def _check_values(team: Team, plan: Plan, ordinal: int, steps: int) -> None:
    """Weighted means are those of NumPy but for rounding, and the same bits on all ranks."""
    places = [_native.DeviceArray(ordinal, 4 * count) for count in _COUNTS]
    largest, digest = 0.0, hashlib.sha256()
    for step in range(steps):
        arrays = [
            [np.random.default_rng([step, rank]).standard_normal(count, np.float32) for count in _COUNTS]
            for rank in range(team.size)
        ]
        weights = [float((step + rank) % 3) for rank in range(team.size)]
        if not any(weights):
            weights[0] = 1.0
        for number, place in enumerate(places):
            mine = arrays[team.rank][number] if weights[team.rank] else np.full(_COUNTS[number], np.nan, np.float32)
            place.write(mine.view(np.uint8))
            plan.start_on(number, place.address, mine.nbytes, weights[team.rank], places[0].stream)
        plan.wait_on(places[0].stream)
        for number, place in enumerate(places):
            found = np.empty(_COUNTS[number], np.float32)
            place.read(found.view(np.uint8))
            expected = np.average([a[number] for a in arrays], axis=0, weights=weights)
            largest = float(np.maximum(largest, np.abs(found - expected).max()))  # NaN stays
            digest.update(found.tobytes())
    equal = len(set(team.allgather_object(digest.hexdigest(), "N1"))) == 1
    if team.rank == 0:
        say("N1", f"largest difference to NumPy, {steps} steps", largest, "", "<= 1e-6", holds=largest <= 1e-6)
        say("N1", "ranks with other bits than rank 0", 0 if equal else 1, "", "0", holds=equal)


def _measure(team: Team, ordinal: int, largest: int) -> None:
    size = 4096
    while size <= largest:
        place = _native.DeviceArray(ordinal, size)
        plan = team.plan(f"NCCL {size}", [TensorSpec("x", (size // 4,), "float32")], in_segment=True, device=-1)
        plan.open_nccl(ordinal, nccl.agree(plan, ordinal))

        def step(place=place, plan=plan, size=size) -> None:  # type: ignore[no-untyped-def]
            plan.start_on(0, place.address, size, 1.0, place.stream)
            plan.wait_on(place.stream)
            place.finish()

        for name, milliseconds in times_of(team, {"plan, NCCL": step}):
            if team.rank == 0:
                say("allreduce", f"{size >> 10} KiB, {name}", milliseconds, "ms")
        plan.end()
        size *= 8


if __name__ == "__main__":
    main()
