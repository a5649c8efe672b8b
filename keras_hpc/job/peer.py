# SPDX-License-Identifier: Apache-2.0
"""The engine's kernel, which adds up gradients of one node's ranks from GPU to GPU: whether it can reduce a plan."""

from __future__ import annotations

from typing import Any

from keras_hpc import _native
from keras_hpc.job import nccl

MOST_RANKS = 32


def compiler() -> str:
    """Return where a wheel of the framework has NVRTC, CUDA's compiler; empty: no wheel has it."""
    return nccl.in_wheels("libnvrtc.so.*")


def describe() -> str:
    """Return the version of the compiler, and when plans use the kernel; or why they cannot. One line."""
    try:
        major, minor = _native.load_nvrtc(compiler())
    except _native.Error as error:
        return str(error)
    return f"{major}.{minor}, for the way 'peer' of plans on one node, where it is the fastest"


def obstacle(plan: Any) -> str:
    """Return why the kernel cannot reduce such a plan; empty: it can. The same on all ranks."""
    if plan.team.node_count > 1:
        return "ranks are on several nodes"
    if plan.team.size > MOST_RANKS:
        return f"there are more than {MOST_RANKS} ranks"
    return nccl.unknown_to_gpus(plan)
