# SPDX-License-Identifier: Apache-2.0
"""NCCL, which comes with the framework: whether a team's GPUs can reduce by it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keras_hpc import _native

_FLOATS = ("float16", "bfloat16", "float32", "float64")
# NCCL's own switch, from 2.30: several ranks of a communicator may share a GPU.
_SHARING, _SHARES_FROM = "NCCL_MULTI_RANK_GPU_ENABLE", 23000


def load() -> int:
    """Load the library, unless the framework has, and return its version, such as 23004.

    Raises:
        CommunicationError: there is none, or it is too old.
    """
    return int(_native.load_nccl(in_wheels("libnccl.so.2")))


def in_wheels(name: str) -> str:
    """Return where NVIDIA's wheels have a library, whose name may be a pattern; empty: none has it."""
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        for library in sorted(Path(folder).glob(f"*/lib/{name}")):
            return str(library)
    return ""


def describe() -> str:
    """Return the version of the library, and when plans use it; or why there is none. One line."""
    try:
        version = load()
    except _native.Error as error:
        return str(error)
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return (
        f"{number}, where it is faster than through the host, or KERAS_HPC_ALLREDUCE=device:0-=nccl asks for it, or "
        "device:0-=hierarchical, which uses it within nodes"
    )


def agree(plan: Any, device: int, within_nodes: bool = False) -> bytes:
    """Return what lets the ranks' GPUs find each other, for `Plan.open_nccl`. Collective.

    Args:
        plan: a new plan.
        device: the number of this rank's GPU.
        within_nodes: those of a node find each other, and no others.

    Raises:
        CommunicationError: NCCL cannot reduce this plan; on all ranks, with the first rank's reason.
    """
    team, problem, number, may_share = plan.team, "", b"", False
    node_of_rank = team.world.node_of_rank if within_nodes else [0] * team.size
    first = node_of_rank.index(node_of_rank[team.rank])
    try:
        problem = obstacle(plan, within_nodes)
        if not problem:
            may_share = load() >= _SHARES_FROM and os.environ.get(_SHARING, "0") != "0"
            number = _native.nccl_id() if team.rank == first else b""
        uuid = _native.visible_devices()[device][1]
    except _native.Error as error:
        problem, uuid = f"rank {team.ranks[team.rank]}: {error}", ""
    everyone = team.allgather_object([problem, uuid, number, may_share], "open_nccl")
    problems = [text for text, *_ in everyone if text]
    if not problems and _share((uuid, may) for _, uuid, _, may in everyone):
        problems = [f"ranks share a GPU, and NCCL wants one for each; from 2.30 on {_SHARING}=1 lets them share"]
    if problems:
        raise _native.Error(problems[0])
    found: bytes = everyone[first][2]
    return found


def obstacle(plan: Any, within_nodes: bool = False) -> str:
    """Return why NCCL cannot reduce such a plan, or not within nodes; empty: it can. The same on all ranks."""
    if within_nodes and plan.team.node_count == 1:
        return "there is only one node"
    if within_nodes and not plan.team.world.nodes_are_alike:
        return "nodes have different numbers of ranks"
    if within_nodes and plan.team.node_count == plan.team.size:
        return "each node has one rank only"
    if plan.wire_dtype and plan.team.node_count > 1 and not within_nodes:
        return f"between nodes its values are rounded to {plan.wire_dtype}"
    return unknown_to_gpus(plan)


def unknown_to_gpus(plan: Any) -> str:
    """Return what of such a plan no way from GPU to GPU knows; empty: nothing."""
    if plan.nbytes == 0:
        return "it has no elements"
    if plan.pipelined:
        return "its steps are pipelined"
    if plan.op not in ("mean", "sum") or any(t.dtype not in _FLOATS for t in plan.tensors):
        return "only sums and means of floats are known to us there"
    return ""


def share_gpus(team: Any, device: int) -> bool:
    """Return whether ranks share a GPU, and nothing says that NCCL may let them. Collective.

    Args:
        team: the ranks.
        device: the number of this rank's GPU.
    """
    mine = [_native.visible_devices()[device][1], os.environ.get(_SHARING, "0") != "0"]
    return _share(team.allgather_object(mine, "share_gpus"))


def _share(of_ranks: Iterable[tuple[str, bool]]) -> bool:
    uuids, may = zip(*of_ranks, strict=True)
    return len(set(uuids)) < len(uuids) and not all(may)
