# SPDX-License-Identifier: Apache-2.0
"""One line, `keras_hpc.init()`, turns a Keras 3 script into a data-parallel MPI job."""

import importlib as _importlib
import importlib.util as _util
import typing as _typing

if _util.find_spec("keras_hpc._native") is None:
    raise ImportError(
        "The native engine of keras_hpc is missing: keras_hpc is on the path but was not built. Install it with "
        "`pip install .` in its repository (it needs a C++17 compiler), and do not start Python in the repository's "
        f"root unless you installed with `pip install -e`. Received: keras_hpc from {__path__[0]}"
    )

from keras_hpc.api.collectives import allreduce, average, barrier, check_replicas, empty, reduce_scatter
from keras_hpc.api.exchange import allgather, allgather_object, alltoall, broadcast, broadcast_object
from keras_hpc.api.lifecycle import finalize, init
from keras_hpc.api.loops import average_statistics, keep_local, shard, step
from keras_hpc.api.parts import group, group_count, part, partition
from keras_hpc.api.teams import configure_team, drain
from keras_hpc.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    LaunchError,
    NotInitializedError,
    PlanMismatchError,
    ReplicaMismatchError,
)
from keras_hpc.job.current import (
    assign_team,
    is_initialized,
    local,
    local_rank,
    local_size,
    node,
    node_count,
    rank,
    size,
)

__version__ = "0.1.0"

__all__ = [
    "CommunicationError",
    "CommunicationTimeoutError",
    "LaunchError",
    "NotInitializedError",
    "PlanMismatchError",
    "ReplicaMismatchError",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "assign_team",
    "average",
    "average_statistics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "callbacks",
    "check_replicas",
    "configure_team",
    "data",
    "drain",
    "empty",
    "finalize",
    "group",
    "group_count",
    "init",
    "is_initialized",
    "keep_local",
    "local",
    "local_rank",
    "local_size",
    "node",
    "node_count",
    "optimizers",
    "part",
    "partition",
    "rank",
    "reduce_scatter",
    "schedules",
    "shard",
    "size",
    "spatial",
    "step",
]

if not _typing.TYPE_CHECKING:

    def __getattr__(name: str):
        """Import these when they are asked for: they need Keras, and `python -m keras_hpc plan` does not."""
        if name in ("callbacks", "data", "optimizers", "schedules", "spatial"):
            return _importlib.import_module(f"keras_hpc.{name}")
        raise AttributeError(f"module 'keras_hpc' has no attribute {name!r}")
