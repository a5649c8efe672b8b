# SPDX-License-Identifier: Apache-2.0
"""Embeddings on TensorFlow, whose gradients are rows: gathers these, and keeps replicas on GPUs equal.

A GPU adds up rows of the same index in no fixed order. So ranks that apply the same rows round otherwise, and their
embeddings drift apart, with what optimizers keep of them. They become the root's where replicas are looked at. Other
weights get the same gradients, and must be the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks.state.variables import differing_variables, known_apart, optimizers_of, trained_by, unique

# Of the largest value. What is further apart is not rounding, and left for those who compare.
_ROUNDING = 1e-3


def note(optimizer: Any, shape: Sequence[int]) -> None:
    """Remember that a gradient of this shape comes to an optimizer as rows."""
    current.job().known.optimizer(optimizer).row_shapes.add(tuple(shape))


def gather(team: Any, gradient: Any, share: Any) -> Any:
    """Return a sparse gradient with the rows of all ranks, as one rank has it on the global batch. Collective.

    Adding up rows into a dense gradient instead would change Adam, which Keras gives every row of its own.
    Rows that ranks look up alike, whatever their samples, are one on one rank: they are added up. So are rows that were
    gathered before, as those of gradients that a script then clips: all ranks have them.

    Args:
        team: the `Team`.
        gradient: this rank's, a `tf.IndexedSlices`.
        share: this rank's samples over those of all ranks, a scalar tensor.
    """
    import tensorflow as tf

    again = _is_gathered(gradient.indices)
    kept = tf.where(share > 0, tf.shape(gradient.indices)[0], 0)
    values = gradient.values[:kept] * tf.cast(share, gradient.values.dtype)
    everyones = backends.current().allgather_rows
    if again:
        number, values = tf.shape(gradient.indices)[0], everyones(team, values)
        places = tf.range(tf.shape(values)[0]) % tf.maximum(number, 1)
        return tf.IndexedSlices(
            tf.math.unsorted_segment_sum(values, places, number), gradient.indices, gradient.dense_shape
        )
    count = gradient.indices.shape[0] or 0  # else their number depends on the batch
    counts = everyones(team, tf.stack([[count, kept]]))[:, 0]
    values, indices = everyones(team, values), everyones(team, gradient.indices[:kept])

    def asked() -> Any:
        return tf.reshape(indices, (-1, count))

    # Ranks that look up the same, as positions: one rank has one row of each, for all samples.
    alike = tf.cond(
        tf.reduce_all(counts == counts[0]) & (counts[0] > 0),
        lambda: tf.reduce_all(asked() == asked()[:1]),
        lambda: False,
    )
    both = tf.cond(
        alike,
        lambda: (tf.reduce_sum(tf.reshape(values, (-1, count, *values.shape[1:])), axis=0), asked()[0]),
        lambda: (values, indices),
    )
    _remember(both[1])
    return tf.IndexedSlices(*both, gradient.dense_shape)


_gathered: dict[int, Any] = {}  # by their ids: tensors of the numbers of gathered rows, weak


def _remember(indices: Any) -> None:
    key = id(indices)
    _gathered[key] = weakref.ref(indices, lambda _: _gathered.pop(key, None))


def _is_gathered(indices: Any) -> bool:
    known = _gathered.get(id(indices))
    return known is not None and known() is indices


def align(model: Any, team: Any, call: str) -> None:
    """Give all ranks the root's embeddings, and what optimizers keep of them, where GPUs differ. Collective.

    Args:
        model: the model; nothing is sent but this question if no gradient came to it as rows, or no rank has a GPU.
        team: whose ranks take part.
        call: what looks at replicas, for the message where another rank calls something else.
    """
    if keras.backend.backend() != "tensorflow" or team.size == 1:
        return
    job, optimizers = current.job(), optimizers_of(model)
    mine = sorted({shape for optimizer in optimizers for shape in job.known.optimizer(optimizer).row_shapes})
    everyone = team.allgather_object([job.device is not None, list(map(list, mine))], call)
    shapes = {tuple(shape) for _, theirs in everyone for shape in theirs}
    if not shapes or not any(on_gpu for on_gpu, _ in everyone):
        return
    backend, apart = backends.current(), known_apart()
    held = unique(v for optimizer in optimizers for v in (*trained_by(optimizer), *optimizer.variables))
    shared = [v for v in held if tuple(v.shape) in shapes and id(v) not in apart]
    for index in differing_variables(team, shared):
        own = np.array(backend.to_numpy(shared[index].value), order="C")
        roots = own.copy()
        team.broadcast(roots.reshape(-1).view(np.uint8))
        distance = np.abs(own.astype(np.float64) - roots.astype(np.float64)).max()
        is_rounding = bool(distance <= _ROUNDING * np.abs(roots.astype(np.float64)).max())
        if all(team.allgather_object(is_rounding, call)):
            backend.assign(shared[index], roots)
