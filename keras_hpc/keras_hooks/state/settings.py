# SPDX-License-Identifier: Apache-2.0
"""What layers were told beside their weights: vocabularies and numbers, which each process of a script makes itself.

Weights become the root's, but these do not. Where they differ, each rank trains another network, and none of them is
what one rank trains: a set of words, of which a vocabulary is made, has another order in each process of Python.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import xxhash

from keras_hpc.job import current, log

_OF_PROCESS = "name", "seed", "shared_object_id", "vocabulary"  # names may be counted, random seeds drawn
_WORDS = 4  # that an error shows


def check(model: Any) -> None:
    """Compare, once, what the layers of a model were told. Collective on its team.

    Raises:
        ValueError: on every rank, if ranks have other vocabularies. Of other settings rank 0 warns.
    """
    state, team = current.job().known.model(model), current.team_of(model)
    if team.size == 1:
        return
    layers = _layers(model)
    mine = (
        None if state.settings_compared else [[layer.name, *_vocabulary(layer), _settings(layer)] for layer in layers]
    )
    everyone = team.allgather_object(mine, "the settings of layers")
    state.settings_compared = all(layer.built for layer in layers)
    if any(theirs is None or len(theirs) != len(everyone[0]) for theirs in everyone):
        return
    told = False
    for rank, theirs in enumerate(everyone):
        for (name, words, size, head, settings), other in zip(everyone[0], theirs, strict=True):
            if words != other[1]:
                raise ValueError(
                    "Ranks must have the same vocabularies, or the same word is another number on each of them. A set "
                    "of Python has another order in each process: sort it, as in `sorted(set(words))`, and adapt "
                    f"layers to the same data on all ranks. Received: layer `{name}` with {size} words, {head}, ... on "
                    f"rank 0 of the team, and {other[2]} words, {other[3]}, ... on rank {rank}"
                )
            if settings != other[4] and not told and team.rank == 0:
                told = True
                log.warning(
                    f"model `{model.name}`: layer `{name}` was made with other arguments on rank 0 than on rank "
                    f"{rank}, so ranks train different networks. Draw what is random from `random` or `np.random`, or "
                    "from a generator with a seed; np.random.default_rng() without one is another on each rank."
                )


def _layers(model: Any) -> list[Any]:
    """Return the layers of a model that compute something themselves and belong to all ranks."""
    local = {id(inner) for layer in current.job().known.local_layers() for inner in layer._flatten_layers()}
    kinds = (keras.Model, keras.layers.Lambda)  # whose configuration is that of their layers, or code
    return [layer for layer in model._flatten_layers() if not isinstance(layer, kinds) and id(layer) not in local]


def _vocabulary(layer: Any) -> tuple[str, int, list[str]]:
    """Return a digest of a layer's vocabulary, the number of its words, and the first ones."""
    if not isinstance(layer, (keras.layers.StringLookup, keras.layers.IntegerLookup)):
        return "", 0, []
    words = [str(word) for word in layer.get_vocabulary()]
    return _digest(words), len(words), words[:_WORDS]


def _settings(layer: Any) -> str:
    """Return a digest of what a layer was made with; an empty text where it does not say."""
    try:
        config = _plain(layer.get_config())
        if isinstance(layer, keras.layers.InputLayer):  # Keras may make it of the first batch, of this rank's size
            config["batch_shape"] = config["batch_shape"][1:]
        return _digest(config)
    except Exception:  # noqa: BLE001  it cannot be saved either, which is not for this warning to say
        return ""


def _plain(value: Any) -> Any:
    """Return the numbers, texts and arrays in a configuration."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in sorted(value.items()) if name not in _OF_PROCESS}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str)) else None


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(value).encode())
