# SPDX-License-Identifier: Apache-2.0
"""Embeddings on TensorFlow, whose gradients are rows: gathers these, and keeps replicas on GPUs equal.

A GPU adds up rows of the same index in no fixed order. So ranks that apply the same rows round otherwise, and their
embeddings drift apart, with what optimizers keep of them. They become the root's where replicas are looked at.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks.state.variables import differing_variables, known_apart, optimizers_of, trained_by, unique

# Of the largest value. What is further apart is not rounding, and left for those who compare.
_ROUNDING = 1e-3


def note(optimizer: Any) -> None:
    """Remember that gradients of an optimizer come as rows: the same on all ranks, as all run one program."""
    current.job().known.optimizer(optimizer).adds_rows = True


def gather(team: Any, gradient: Any, share: Any) -> Any:
    """Return a sparse gradient with the rows of all ranks, as one rank has it on the global batch. Collective.

    Adding up rows into a dense gradient instead would change Adam, which Keras gives every row of its own.

    Args:
        team: the `Team`.
        gradient: this rank's, a `tf.IndexedSlices`.
        share: this rank's samples over those of all ranks, a scalar tensor.
    """
    import tensorflow as tf

    kept = tf.where(share > 0, tf.shape(gradient.indices)[0], 0)
    values = gradient.values[:kept] * tf.cast(share, gradient.values.dtype)
    rows = backends.current().allgather_rows
    return tf.IndexedSlices(rows(team, values), rows(team, gradient.indices[:kept]), gradient.dense_shape)


def align(model: Any) -> None:
    """Give all ranks the root's values of what GPUs have rounded otherwise. Collective on the model's team.

    Args:
        model: the model; nothing is sent if its gradients have not come as rows, or no rank has a GPU.
    """
    job, team = current.job(), current.team_of(model)
    optimizers = [optimizer for optimizer in optimizers_of(model) if job.known.optimizer(optimizer).adds_rows]
    if not optimizers or team.size == 1:
        return
    if not any(team.allgather_object(job.device is not None, "rows that GPUs add up")):
        return
    backend, apart = backends.current(), known_apart()
    held = unique(v for optimizer in optimizers for v in (*trained_by(optimizer), *optimizer.variables))
    shared = [v for v in held if id(v) not in apart and keras.backend.is_float_dtype(v.dtype)]
    for index in differing_variables(team, shared):
        mine = np.ascontiguousarray(backend.to_numpy(shared[index].value))
        roots = mine.copy()
        team.broadcast(roots.view(np.uint8))
        distance = np.abs(mine.astype(np.float64) - roots.astype(np.float64)).max()
        is_rounding = bool(distance <= _ROUNDING * np.abs(roots.astype(np.float64)).max())
        if all(team.allgather_object(is_rounding, "rows that GPUs add up")):
            backend.assign(shared[index], roots)
