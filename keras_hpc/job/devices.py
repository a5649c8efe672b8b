# SPDX-License-Identifier: Apache-2.0
"""Which GPU each rank computes on: one of its own, as far as there are enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from keras_hpc import _native
from keras_hpc.errors import LaunchError
from keras_hpc.job import log
from keras_hpc.job.launch import World, exchange, on_all_ranks


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        ordinal: its number among those that this process sees.
        name: as its maker calls it.
        uuid: the same in all processes.
        bus_id: where it is in this node.
        ranks: how many ranks of this node compute on it.
        leads: whether this rank is the first of them.
    """

    ordinal: int
    name: str
    uuid: str
    bus_id: str
    ranks: int = 1
    leads: bool = True


def check_argument(device: Any) -> None:
    """Raise ValueError for what is no device."""
    if device in ("auto", "cpu") or (isinstance(device, int) and not isinstance(device, bool) and device >= 0):
        return
    raise ValueError(
        "`device` says what this rank computes on. Expected 'auto', 'cpu' or the number of a GPU, counted from 0 among "
        f"those that this process sees. Received: device={device!r}"
    )


def choose(lists: Sequence[Sequence[str]], local_rank: int) -> int | None:
    """Return which of the GPUs that a process sees is its own, as a position in its list; None if nobody sees any.

    Launchers show each rank all GPUs of the node, or one of its own.

    Args:
        lists: the UUIDs of the GPUs that each rank of the node sees.
        local_rank: the rank, counted on its node.

    Raises:
        LaunchError: they see something else, so that nobody can know which is whose.
    """
    if not any(lists):
        return None
    if all(list(seen) == list(lists[0]) for seen in lists):
        return local_rank % len(lists[0])
    if all(len(seen) == 1 for seen in lists):
        return 0
    shown = "\n".join(f"  local rank {rank}: {', '.join(seen) or 'none'}" for rank, seen in enumerate(lists))
    raise LaunchError(
        "The ranks of this node see different GPUs, so none of them can know which one is its own. Expected that each "
        "sees the same ones, or exactly one. Look at CUDA_VISIBLE_DEVICES and at srun's --gpus-per-task and "
        f"--gpu-bind, or choose with init(device=k). Received:\n{shown}"
    )


def of_rank(world: World, backend: ModuleType, asked: int | Literal["auto", "cpu"]) -> Device | None:
    """Choose the GPU of this rank; None: it computes on the CPU. Collective.

    Args:
        world: the ranks.
        backend: the backend's module. Only where it can use GPUs they are looked for.
        asked: what the user wants of this rank.

    Raises:
        LaunchError: see `choose`; or there is no such GPU.
    """

    def look() -> list[tuple[str, str, str]]:
        try:
            return list(_native.visible_devices()) if asked != "cpu" and backend.sees_gpus() else []
        except _native.Error as error:
            raise LaunchError(str(error)) from error

    seen = on_all_ranks(world, look)
    texts = exchange(world, "\n".join([str(asked), *(uuid for _, uuid, _ in seen)]))
    mine = [text.split("\n") for rank, text in enumerate(texts) if world.node_of_rank[rank] == world.node]
    ranks = [(wish, uuids) for wish, *uuids in mine]

    def decided() -> Device | None:
        number = _number(ranks, world.local_rank)
        if number is None:
            return None
        name, uuid, bus_id = seen[number]
        taken = [_number(ranks, other) for other in range(len(ranks))]
        sharing = [other for other, its in enumerate(taken) if its is not None and ranks[other][1][its] == uuid]
        return Device(number, name, uuid, bus_id, len(sharing), sharing[0] == world.local_rank)

    return on_all_ranks(world, decided)


def _number(ranks: Sequence[tuple[str, Sequence[str]]], local_rank: int) -> int | None:
    """Return which of its GPUs a rank of this node computes on, from what each wishes and sees."""
    wish, seen = ranks[local_rank]
    if wish == "cpu":
        return None
    if wish == "auto":
        others = [other for other, (their_wish, _) in enumerate(ranks) if their_wish == "auto"]
        return choose([ranks[other][1] for other in others], others.index(local_rank))
    if int(wish) >= len(seen):
        raise LaunchError(
            f"Local rank {local_rank} sees {len(seen)} GPUs that its Keras backend can use. "
            f"Received: init(device={wish})"
        )
    return int(wish)


def tell(device: Device, rank: int) -> None:
    """Say on the first rank what it computes on, and once for each GPU that has to do for several ranks."""
    if rank == 0:
        log.info(f"rank 0 computes on GPU {device.ordinal} ({device.name}, {device.uuid})")
    if device.ranks > 1 and device.leads:
        log.warning(
            f"{device.ranks} ranks of this node compute on one GPU ({device.uuid}): they take turns, and share its "
            "memory. Start one rank for each GPU, unless this is a test."
        )


def describe_speeds(device: Device | None, nbytes: int = 64 << 20) -> str:
    """Measure how fast a rank's GPU and the host copy from each other; return it, one line. Empty on the CPU."""
    if device is None:
        return ""
    try:
        to_host, to_device = _native.device_speeds(device.ordinal, nbytes)
    except _native.Error as error:
        return str(error)
    return f"to the host {to_host / 1e9:.1f} GB/s, back {to_device / 1e9:.1f} GB/s ({nbytes >> 20} MiB, pinned)"


def describe_peers(team: Any, device: Device, nbytes: int = 64 << 20) -> str:
    """Measure how fast a rank's GPU copies from that of the next rank on its node; return it, one line. Collective."""
    try:
        speed = _native.peer_speed(team.native, device.ordinal, nbytes)
    except _native.Error as error:
        return str(error)
    nodes = team.world.node_of_rank
    if nodes.count(nodes[team.rank]) == 1:
        return "no other rank on this node"
    return f"from the next rank's {speed / 1e9:.1f} GB/s ({nbytes >> 20} MiB)"


def describe(device: Device | None) -> str:
    """Return what a rank computes on, one line."""
    if device is not None:
        node = Path(f"/sys/bus/pci/devices/{device.bus_id.lower()[-12:]}/numa_node")
        number = node.read_text().strip() if node.is_file() else "-1"
        memory = f", NUMA node {number}" if number != "-1" else ""  # one node, or the BIOS does not say
        version = _native.device_driver_version()
        driver = f"driver for CUDA {version // 1000}.{version % 1000 // 10}"
        return f"GPU {device.ordinal}: {device.name}, {device.uuid}, bus {device.bus_id}{memory}; {driver}"
    try:
        count = len(_native.visible_devices())
    except _native.Error as error:
        return f"the CPU; {error}"
    return f"the CPU; this Keras backend cannot use the {count} GPUs that are here" if count else "the CPU; no GPU"
