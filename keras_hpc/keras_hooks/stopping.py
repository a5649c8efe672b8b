# SPDX-License-Identifier: Apache-2.0
"""Ranks end a `fit` together, whichever of them has a callback that ends it."""

from __future__ import annotations

import numpy as np

from keras_hpc.job import current
from keras_hpc.keras_hooks import running


def is_time_to_agree(call: running.Call, batch: int) -> bool:
    """Return whether ranks ask each other after this batch. If they do not, none may stop alone: it remembers."""
    local = current.team_of(call.model).schedule.local
    if local is None:
        return True
    before, call.batches = call.batches, batch + 1
    if local.every != "epoch" and (batch + 1) // local.every > (before if before <= batch else 0) // local.every:
        return True
    call.wants_to_stop |= bool(call.model.stop_training)
    call.model.stop_training = False
    return False


def agree(call: running.Call) -> None:
    """Let training end on all ranks if it does on one. Collective."""
    stop = np.array([bool(call.model.stop_training) or call.wants_to_stop], np.int64)
    current.team_of(call.model).allreduce(stop, op="max", what="whether training ends")
    call.model.stop_training = bool(stop[0])
