# SPDX-License-Identifier: Apache-2.0
"""Plans with tensors on GPUs: through the host, or from GPU to GPU, whichever was measured to be fastest.

Ways are "staged", which goes through the host; "peer", a kernel of the engine's, on one node; "nccl"; "hierarchical":
NCCL within nodes, the engine's network between them; and "mpi", by an MPI library that takes memory of GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_hpc import _native
from keras_hpc.job import gpu_aware_mpi, log, nccl, peer, tuning_cache
from keras_hpc.job.plan import Plan, TensorSpec

# Classes of sizes reach up to a power of four of this many bytes; what is larger goes the way of the largest.
_SMALLEST, _LARGEST = 64 << 10, 64 << 20
_TENSORS, _ROUNDS, _TOLERANCE = 8, 7, 1e-6
_BY_NCCL = {"nccl": False, "hierarchical": True}  # way: whether NCCL connects only the GPUs of each node
# What adds up in an order of its own, so that bits are not the CPU's, must be faster by this much to be worth it.
_GAIN, _OWN_ORDER = 1.2, (*_BY_NCCL, "mpi")
_NAMES = {
    "peer": "The kernel between GPUs",
    "nccl": "NCCL",
    "hierarchical": "NCCL within nodes",
    "mpi": "MPI from GPU to GPU",
}


def open_device(plan: Plan, device: int) -> None:
    """Let a plan use the GPUs that have its tensors, if every rank can. Collective.

    Args:
        plan: a new plan, in its segment or pipelined.
        device: the number of this rank's GPU; -1: the tensors are on the host, or on several GPUs.

    Raises:
        PlanMismatchError: some ranks have them on a GPU and some on the host.
    """
    team = plan.team
    team.agree(f"Where the tensors of '{plan.name}' are", ["on a GPU" if device >= 0 else "on the host"])
    if device < 0:
        return
    if plan.is_idle:
        plan.device = device
        return
    way = _way(plan, device)
    if way != "staged":
        problem = _open(plan, device, way)
        if not problem:
            return
        _say(team, f"{_NAMES[way]} does not reduce the tensors of '{plan.name}', which are staged; {problem}")
    if problem := _open(plan, device, "staged"):
        _say(team, f"the tensors of '{plan.name}' are copied to the host while nothing else is done; {problem}")


def _way(plan: Plan, device: int) -> str:
    """Return how such a plan is reduced: as is known of its size, or as is measured now. Collective."""
    team = plan.team
    known = tuning_cache.way_on_devices(team.native, plan.nbytes)
    if known or team.index != 0:  # other teams reduce beside this one: kernels of NCCL may wait for each other for ever
        return known or "staged"
    ways = _ways(plan, device)
    if not ways:
        return "staged"
    begin, end, nbytes = _size_class(plan.nbytes)
    specs = [TensorSpec(str(number), (nbytes // _TENSORS // 4,), "float32") for number in range(_TENSORS)]
    memory: list[Any] = []  # had before any trial: a rank that has none must not leave the others in one
    trial = Plan(team, "a trial", specs, "mean", False, None, True, False)
    no_trial = _try_on_all(trial, lambda: memory.append(_native.DeviceArray(device, nbytes)))
    seconds: dict[str, float] = {}
    for way in ("staged", *ways):
        problem = no_trial or _open(trial, device, way)
        if not problem:
            taken, problem = _seconds(trial, memory[0]), "" if way == "staged" else _check(trial, memory[0])
            trial.close_device()
        if not problem:
            seconds[way] = taken
        elif way == "staged":
            no_trial = problem
        else:
            _say(team, f"{_NAMES[way]} is not used; {problem}")
            team.lacks_ways.add(way)  # not kept for the next job, which may have it
    trial.end()
    fastest = min(seconds, key=lambda way: seconds[way] * (_GAIN if way in _OWN_ORDER else 1), default="staged")
    if fastest != "staged" or not team.lacks_ways:
        team.native.add_choice("device", begin, end, fastest)
    return fastest


def _ways(plan: Plan, device: int) -> list[str]:
    """Return the ways from GPU to GPU that may reduce such a plan. Collective."""
    ways = [] if peer.obstacle(plan) else ["peer"]
    by_nccl = [way for way, within_nodes in _BY_NCCL.items() if not nccl.obstacle(plan, within_nodes)]
    if by_nccl and not nccl.share_gpus(plan.team, device):
        ways += by_nccl
    if plan.team.node_count > 1 and not gpu_aware_mpi.obstacle(plan) and gpu_aware_mpi.takes_memory(plan.team):
        ways.append("mpi")
    return [way for way in ways if way not in plan.team.lacks_ways]


def _size_class(nbytes: int) -> tuple[int, int, int]:
    """Return which sizes go the same way, from a first one to before an end, and the size to measure."""
    largest = _SMALLEST
    while largest < min(nbytes, _LARGEST):
        largest *= 4
    return (
        0 if largest == _SMALLEST else largest // 4 + 1,
        tuning_cache.ANY if largest == _LARGEST else largest + 1,
        largest,
    )


def _seconds(plan: Plan, memory: Any) -> float:
    """Return how long a step takes on the slowest rank, whose tensors are in this memory of its GPU. Collective."""
    taken = []
    for _ in range(_ROUNDS):
        plan.team.barrier()
        begin = time.perf_counter()
        _step(plan, memory)
        taken.append(time.perf_counter() - begin)
    slowest: float = max(plan.team.allgather_object(statistics.median(taken[1:]), "a trial"))
    return slowest


def _check(plan: Plan, memory: Any) -> str:
    """Return what is wrong with the means of a step, if anything is. Collective."""
    team = plan.team
    found = np.full(plan.nbytes // 4, team.rank + 1, np.float32)
    memory.write(found.view(np.uint8))
    _step(plan, memory)
    memory.read(found.view(np.uint8))
    wrong = not np.allclose(found, (team.size + 1) / 2, rtol=_TOLERANCE, atol=0)  # also where there is a NaN
    ranks = [team.ranks[rank] for rank, is_wrong in enumerate(team.allgather_object(wrong, "a trial")) if is_wrong]
    return f"its means are wrong on ranks {ranks}" if ranks else ""


def _step(plan: Plan, memory: Any) -> None:
    each = plan.nbytes // len(plan.tensors)
    for number in range(len(plan.tensors)):
        plan.start_on(number, memory.address + number * each, each, 1.0, memory.stream)
    plan.wait_on(memory.stream)
    memory.finish()


def _open(plan: Plan, device: int, way: str) -> str:
    """Open a plan's device, to be reduced in this way; where one rank cannot, return why. Collective."""
    if way == "staged":
        return _try_on_all(plan, lambda: plan.open_device(device))
    if way == "peer":
        return peer.obstacle(plan) or _try_on_all(plan, lambda: plan.open_peer(device, peer.compiler()))
    if way == "mpi":
        return gpu_aware_mpi.obstacle(plan) or _try_on_all(plan, lambda: plan.open_mpi(device, peer.compiler()))
    within_nodes = _BY_NCCL[way]
    try:
        number = nccl.agree(plan, device, within_nodes)
    except _native.Error as error:  # of all ranks
        return str(error)
    peers = _peers_of(plan.team) if within_nodes else None
    return _try_on_all(plan, lambda: plan.open_nccl(device, number, peers))


def _peers_of(team: Any) -> _native.Team:
    """Return what reduces between nodes what NCCL has reduced within them. Collective."""
    if team.peers is None:
        world, options = team.world.peers(), team.options
        waits = options["timeout_seconds"], options["stall_seconds"]
        # Nobody but threads of its own sends and receives.
        native = _native.Team(world.transport(), team.index, max(1, options["threads"]), *waits)
        team.peers = type(team)(team.index, native, range(world.size))
        team.peers.comm = world.comm
    for place, begin, end, way in tuning_cache.known(team.native):
        if place == "network":
            team.peers.native.add_choice(place, begin, end, way)
    return team.peers.native


def _try_on_all(plan: Plan, opening: Callable[[], None]) -> str:
    """Open a plan's device; where one rank cannot, close it on all, and return why, with that rank."""
    team, problem = plan.team, ""
    try:
        opening()
    except (_native.Error, MemoryError) as error:
        problem = f"rank {team.ranks[team.rank]}: {error or type(error).__name__}"
    problems = [text for text in team.allgather_object(problem, "open_device") if text]
    if problems and plan.device is not None:
        plan.close_device()
    return problems[0] if problems else ""


def _say(team: Any, text: str) -> None:
    if team.rank == 0:
        log.info(text)
