# SPDX-License-Identifier: Apache-2.0
"""Names variables of TensorFlow, which Keras does not know, that ranks have moved apart: they are each rank's own.

A step may keep a probability or a mean of losses in a `tf.Variable` among the attributes of its model, and compute with
it. Where it moves by a rank's own samples, the next steps of ranks are not those of one. A variable of Keras moves in
each step as on one rank (layer_states.py).
"""

from __future__ import annotations

from typing import Any

import keras

from keras_hpc.job import current, log
from keras_hpc.keras_hooks.state.variables import digests, known_local


def warn_if_apart(model: Any) -> None:
    """Warn once of those that are among the attributes of layers of the user's own. Collective on the model's team."""
    state, team = current.job().known.model(model), current.team_of(model)
    if keras.backend.backend() != "tensorflow" or state.told_raw or team.size == 1:
        return
    found = _of(model)
    mine = {name: digest.tobytes() for name, digest in zip(found, digests(list(found.values())), strict=True)}
    everyone = team.allgather_object(mine, "variables of TensorFlow, for keras_hpc to compare")
    apart = [name for name, digest in mine.items() if any(theirs.get(name, digest) != digest for theirs in everyone)]
    if not apart and all(theirs == everyone[0] for theirs in everyone):
        return
    state.told_raw = True
    if team.rank == 0:
        log.warning(
            f"model `{model.name}`: a step moves variables of TensorFlow, each rank its own by its own samples, and "
            "nothing makes them equal. What steps compute of them is not what one rank computes. Make them by "
            "add_weight(..., trainable=False) or keras.Variable(..., trainable=False): then each step moves numbers as "
            f"on one rank. Received: {', '.join(apart) or 'other ones on other ranks'}"
        )


def _of(model: Any) -> dict[str, Any]:
    import tensorflow as tf

    local = known_local()
    layers = [layer for layer in model._flatten_layers() if not type(layer).__module__.startswith("keras.")]
    return {
        f"{layer.name}.{name}": value
        for layer in layers
        if local.isdisjoint(map(id, layer.variables))
        for name, value in vars(layer).items()
        if isinstance(value, tf.Variable) and (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool)
    }
