# SPDX-License-Identifier: Apache-2.0
"""An MPI library that takes memory of GPUs: whether a team's gradients can go between nodes by it."""

from __future__ import annotations

from typing import Any

from keras_hpc.job import nccl, peer


def takes_memory(team: Any) -> bool:
    """Return whether it says so on all ranks. Collective."""
    return all(team.allgather_object(team.native.takes_device_memory, "takes_memory"))


def describe(team: Any) -> str:
    """Return whether it does, and when plans use it. One line."""
    if not team.native.takes_device_memory:
        return "the MPI library does not say that it takes memory of GPUs"
    return "the MPI library takes memory of GPUs, for the way 'mpi' of plans on several nodes, where it is faster"


def obstacle(plan: Any) -> str:
    """Return why such a plan cannot be reduced that way; empty: it can. The same on all ranks."""
    if plan.team.size > peer.MOST_RANKS:
        return f"there are more than {peer.MOST_RANKS} ranks"
    if plan.wire_dtype and plan.team.node_count > 1:
        return f"between nodes its values are rounded to {plan.wire_dtype}"
    return nccl.unknown_to_gpus(plan)
