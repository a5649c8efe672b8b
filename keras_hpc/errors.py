# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as exceptions."""

from keras_hpc._native import Error as CommunicationError
from keras_hpc._native import PlanMismatchError
from keras_hpc._native import TimeoutError as CommunicationTimeoutError

__all__ = [
    "CommunicationError",
    "CommunicationTimeoutError",
    "LaunchError",
    "NotInitializedError",
    "PlanMismatchError",
    "ReplicaMismatchError",
]


class NotInitializedError(RuntimeError):
    """A function that needs a job was called before `keras_hpc.init()`."""


class LaunchError(RuntimeError):
    """The processes were not started as one MPI job, or MPI cannot serve it."""


class ReplicaMismatchError(RuntimeError):
    """Ranks hold different values where they must hold the same."""


# As users find them, so that a traceback gives the name to catch.
for _name in ("CommunicationError", "CommunicationTimeoutError", "PlanMismatchError"):
    globals()[_name].__name__ = globals()[_name].__qualname__ = _name
    globals()[_name].__module__ = "keras_hpc"
