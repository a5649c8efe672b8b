# SPDX-License-Identifier: Apache-2.0
"""Before the first update in a loop of the user's own: replicas are made equal, and equal gradients are mentioned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_hpc import backends
from keras_hpc.job import current, log
from keras_hpc.keras_hooks import keras_private, replicas, running
from keras_hpc.keras_hooks import variables as model_variables


def warn_of_equal_gradients(team: Any, gradients: Sequence[Any]) -> None:
    """Says once that all ranks have computed the same in a loop of the user's own. Collective."""
    job = current.job()
    if team.size == 1 or "equal gradients" in job.said:
        return
    known = [gradient for gradient in gradients if gradient is not None and not hasattr(gradient, "dense_shape")]
    if not known or any(map(backends.current().is_traced, known)):
        return
    job.said.add("equal gradients")
    everyone = team.allgather(model_variables.digests(known)[None])
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
