# SPDX-License-Identifier: Apache-2.0
"""N1: plans that are reduced from GPU to GPU, as a job: `mpiexec -n 2 python -m benchmarks.gpu.direct nccl`, or `peer`.

Ranks that share a GPU can use NVIDIA's NCCL from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1, which this sets. With an
older one the plan has to be refused on all ranks alike, with NCCL's or our reason. The engine's kernel, `peer`, needs
NVRTC and ranks of one node.
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
from keras_hpc.job import launch, nccl, peer
from keras_hpc.job.plan import Plan, TensorSpec
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team

_COUNTS = [7, 1000, 300_000, 4096, 70_001]


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("nccl", "peer"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--largest", type=int, default=256 << 20, help="bytes, of the table")
    arguments = parser.parse_args()
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    world = launch.connect(None)
    ordinal = world.local_rank % len(_native.visible_devices())
    team = make_team(world, 0, 1, 60.0, 30.0)
    try:
        specs = [TensorSpec(f"t{number}", (count,), "float32") for number, count in enumerate(_COUNTS)]
        plan = team.plan("direct", specs, in_segment=True, device=-1)
        problem, about = _open(plan, ordinal, arguments.way), _VERSIONS[arguments.way]()
        if team.rank == 0:
            sys.stderr.write(f"{about}: {problem or 'reduces from GPU to GPU'}\n")
            say("N1", f"{about} with {team.size} ranks here: used, or refused on all", 1 - bool(problem), "")
        if not problem:
            _check_values(team, plan, ordinal, arguments)
            _measure(team, ordinal, arguments)
    finally:
        team.close()
        world.close()


def _version_of_nccl() -> str:
    try:
        return f"NCCL {nccl.load()}"
    except _native.Error as error:
        return str(error)


def _version_of_nvrtc() -> str:
    try:
        return "kernel by NVRTC {}.{}".format(*_native.load_nvrtc(peer.compiler()))
    except _native.Error as error:
        return str(error)


_VERSIONS = {"nccl": _version_of_nccl, "peer": _version_of_nvrtc}


def _open(plan: Plan, ordinal: int, way: str) -> str:
    """Return why the plan is not reduced in this way, if it is not. Collective."""
    try:
        if way == "nccl":
            plan.open_nccl(ordinal, nccl.agree(plan, ordinal))
        else:
            plan.open_peer(ordinal, peer.compiler())
    except _native.Error as error:
        return str(error)
    return ""


def _check_values(team: Team, plan: Plan, ordinal: int, arguments: argparse.Namespace) -> None:
    """Weighted means are those of NumPy but for rounding, and the same bits on all ranks."""
    places = [_native.DeviceArray(ordinal, 4 * count) for count in _COUNTS]
    largest, digest = 0.0, hashlib.sha256()
    for step in range(arguments.steps):
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
        what = f"{arguments.way}: largest difference to NumPy, {arguments.steps} steps"
        say("N1", what, largest, "", "<= 1e-6", holds=largest <= 1e-6)
        say("N1", f"{arguments.way}: ranks with other bits than rank 0", 0 if equal else 1, "", "0", holds=equal)


def _measure(team: Team, ordinal: int, arguments: argparse.Namespace) -> None:
    size = 4096
    while size <= arguments.largest:
        place = _native.DeviceArray(ordinal, size)
        plan = team.plan(f"{size} B", [TensorSpec("x", (size // 4,), "float32")], in_segment=True, device=-1)
        _open(plan, ordinal, arguments.way)

        def step(place=place, plan=plan, size=size) -> None:  # type: ignore[no-untyped-def]
            plan.start_on(0, place.address, size, 1.0, place.stream)
            plan.wait_on(place.stream)
            place.finish()

        for name, milliseconds in times_of(team, {f"plan, {arguments.way}": step}):
            if team.rank == 0:
                say("allreduce", f"{size >> 10} KiB, {name}", milliseconds, "ms")
        plan.end()
        size *= 8


if __name__ == "__main__":
    main()
