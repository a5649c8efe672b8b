# SPDX-License-Identifier: Apache-2.0
"""Says what is wrong with targets and sample weights of a model in parts whose extents do not fit its outputs.

A loss of the user's own may take targets of any shape, so nothing is refused that works. But where a step fails, what
the framework says of shapes tells nobody that a reader has cut an axis that is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras_hpc import errors
from keras_hpc.keras_hooks import parts


@contextlib.contextmanager
def explained(model: Any, batch: Callable[[], Any]) -> Iterator[None]:
    """Context in which a model computes what may fail for the extents of a batch.

    Args:
        model: the model.
        batch: returns the batch.

    Raises:
        ValueError: it failed, and targets or sample weights do not fit the outputs.
    """
    try:
        yield
    except (errors.CommunicationError, errors.CommunicationTimeoutError, errors.PlanMismatchError):
        raise
    except Exception as error:
        if reason := parts.fault_of_extents(model, batch()):
            raise ValueError(reason) from error
        raise
