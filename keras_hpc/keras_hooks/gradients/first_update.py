# SPDX-License-Identifier: Apache-2.0
"""Before the first update in a loop of the user's own: replicas are made equal, and equal gradients are mentioned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current, log
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.keras_hooks.state import replicas
from keras_hpc.keras_hooks.state import variables as model_variables


def warn_of_equal_gradients(team: Any, gradients: Sequence[Any]) -> None:
    """Says once that all ranks have computed the same in a loop of the user's own. Collective."""
    job = current.job()
    if team.size == 1 or "equal gradients" in job.said:
        return
    gradients = [gradient for gradient in gradients if not hasattr(gradient, "dense_shape")]
    known = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if not gradients or any(backends.current().is_traced(gradients[index]) for index in known):
        return
    digests = np.zeros((len(gradients), model_variables.DIGEST_BYTES), np.uint8)  # one rank alone may have none
    if known:
        digests[known] = model_variables.digests([gradients[index] for index in known])
    everyone = team.allgather(digests[None])
    if not everyone.any():
        return
    job.said.add("equal gradients")
    if (everyone == everyone[0]).all() and team.rank == 0:
        log.warning(
            "All ranks have computed the same gradients: in a training loop of your own, each reads all of the data. "
            "Give each rank its part: keras_hpc.shard(data)."
        )


def make_equal(optimizer: Any, variables: list[Any], stateless: bool) -> None:
    """Give replicas equal variables before the first update that `fit` and `train_on_batch` did not prepare."""
    step = running.step()
    backend = keras.backend.backend()
    if backend == "torch":
        # Gradients were computed already. In `fit`, replicas were made equal before.
        if not replicas.is_synchronized(optimizer):
            replicas.check_equal(optimizer, [*variables, *optimizer.variables])
        return
    model = None if step is None else step.model
    if replicas.is_synchronized(optimizer if model is None else model):
        return
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.init_scope():  # at trace time, before the traced function runs for the first time
            if model is None or not tf.executing_eagerly():
                replicas.synchronize_optimizer(optimizer, variables)
            elif not replicas.is_synchronized(optimizer):
                if not optimizer.built:
                    optimizer.build(variables)
                replicas.synchronize_optimizer(optimizer, variables)
    elif model is None:
        if stateless or keras_private.get(keras_private.IN_STATELESS_SCOPE)():
            replicas.check_equal(optimizer, model_variables.trained_by(optimizer))
        else:
            replicas.synchronize_optimizer(optimizer, variables)
