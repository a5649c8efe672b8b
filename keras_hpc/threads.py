# SPDX-License-Identifier: Apache-2.0
"""Gives each rank its share of the node's cores: frameworks would start a thread for every core, on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

# Set for libraries that are loaded later; what the user has set stays.
_OMP = "OMP_NUM_THREADS"


def share_cores(
    cores_of_node: int,
    ranks_of_node: int,
    communication_threads: int,
    limit: Callable[[int], tuple[list[str], list[str]]],
) -> str:
    """Limits this rank's compute threads to its share of the cores, where the user has not set them.

    Args:
        cores_of_node: cores that this node's ranks may use together.
        ranks_of_node: number of ranks on this node.
        communication_threads: threads of this rank that communicate; they come off its share.
        limit: the backend's `limit_threads`.

    Returns:
        What was set, and what could not be, as one line.
    """
    share = max(1, cores_of_node // ranks_of_node - communication_threads)
    done, failed = limit(share)
    if _OMP not in os.environ:
        os.environ[_OMP] = str(share)
        done.append(f"{_OMP}={share}")
    text = f"{ranks_of_node} rank{_s(ranks_of_node)} on {cores_of_node} core{_s(cores_of_node)} of this node"
    if done:
        text += f"; set {', '.join(done)}"
    if failed:
        text += f"; could not set {', '.join(failed)}: the backend had started its threads before keras_hpc.init()"
    return text


def settings(
    names: Sequence[str] = (_OMP, "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "NPROC"),
) -> dict[str, str]:
    """Returns what the environment says of threads."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _s(count: int) -> str:
    return "s" * (count != 1)
