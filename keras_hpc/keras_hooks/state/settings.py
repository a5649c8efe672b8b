# SPDX-License-Identifier: Apache-2.0
"""What layers and `compile` were told beside weights: vocabularies and numbers, which each process makes itself.

Weights become the root's, but these do not. Where they differ, each rank trains another network, and none of them is
what one rank trains: a set of words, of which a vocabulary is made, has another order in each process of Python. A
learning rate becomes the root's, too, and a search that has drawn another one on each rank would note the wrong one.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import xxhash

from keras_hpc.job import current, log

_OF_PROCESS = "name", "seed", "shared_object_id", "vocabulary"  # names may be counted, random seeds drawn
_COMPILED = "optimizer", "loss", "loss_weights"
_WORDS = 4  # that an error shows


def check(model: Any) -> None:
    """Compare what `compile` was told and, once, what layers were. Collective, before the model is made equal.

    Raises:
        ValueError: on every rank, if ranks have other vocabularies. Of other settings rank 0 warns.
    """
    state, team = current.job().known.model(model), current.team_of(model)
    if team.size == 1:
        return
    layers = [] if state.settings_compared else _layers(model)
    mine = [[f"layer `{layer.name}`", *_vocabulary(layer), _settings(layer)] for layer in layers]
    # Where one rank alone has loaded a model, with what it was compiled with, the others take it over.
    compiled = {} if state.has_loaded else _compiled(model)
    mine += [[f"`{name}` of compile()", "", 0, [], compiled.get(name, "")] for name in _COMPILED]
    everyone = team.allgather_object(mine, "the settings of layers")
    state.settings_compared = all(layer.built for layer in layers)
    if any(len(theirs) != len(everyone[0]) for theirs in everyone):
        return
    told = False
    for rank, theirs in enumerate(everyone):
        for (what, words, size, head, settings), other in zip(everyone[0], theirs, strict=True):
            if words != other[1]:
                raise ValueError(
                    "Ranks must have the same vocabularies, or the same word is another number on each of them. A set "
                    "of Python has another order in each process: sort it, as in `sorted(set(words))`, and adapt "
                    f"layers to the same data on all ranks. Received: {what} with {size} words, {head}, ... on "
                    f"rank 0 of the team, and {other[2]} words, {other[3]}, ... on rank {rank}"
                )
            if settings and other[4] and settings != other[4] and not told and team.rank == 0:
                told = True
                log.warning(
                    f"model `{model.name}`: {what} was made with other arguments on rank 0 than on rank {rank}, so "
                    "ranks do not train the same. Draw what is random from `random` or `np.random`, or from a "
                    "generator with a seed; np.random.default_rng() without one is another on each rank, and so is "
                    "what a search of hyperparameters suggests to a rank without a seed."
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


def _compiled(model: Any) -> dict[str, str]:
    """Return digests of what `compile` was told, by its arguments; none where it cannot be said."""
    try:
        config = model.get_compile_config() or {}
        return {name: _digest(_plain(config[name])) for name in _COMPILED if config.get(name) is not None}
    except Exception:  # noqa: BLE001  as of layers
        return {}


def _plain(value: Any) -> Any:
    """Return the numbers, texts and arrays in a configuration."""
    if isinstance(value, dict) and value.get("class_name") == "__lambda__":
        return "code"  # whose bytes each process may write in another way
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in sorted(value.items()) if name not in _OF_PROCESS}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str)) else None


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(repr(value).encode())
