# SPDX-License-Identifier: Apache-2.0
"""What callbacks remember from epoch to epoch. Keras has no protocol for it: its own are known by their attributes.

What a file says is put back only where this callback would have saved it, and of the kind that it saves: who can write
the file cannot set anything else of a callback.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.callbacks import RootOnly

_NUMBER, _WEIGHTS = "a number, or nothing", "a list of arrays, or nothing"
_COUNTED = {"_batches_seen_since_last_saving": _NUMBER, "_last_batch_seen": _NUMBER}
_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: {
        **dict.fromkeys(("wait", "stopped_epoch", "best", "best_epoch"), _NUMBER),
        "best_weights": _WEIGHTS,
    },
    keras.callbacks.ReduceLROnPlateau: dict.fromkeys(("best", "wait", "cooldown_counter"), _NUMBER),
    keras.callbacks.ModelCheckpoint: {"best": _NUMBER, **_COUNTED},
    keras.callbacks.SwapEMAWeights: {"_ema_weights_in_model": _NUMBER},
}


def take(callbacks: Any) -> tuple[list[Any], list[np.ndarray]]:
    """Return what callbacks remember: names and states that JSON can hold, and the arrays among them.

    Args:
        callbacks: a `CallbackList`.
    """
    arrays: list[np.ndarray] = []

    def packed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):  # weights, of which some may have no axes
            arrays.extend(np.asarray(item, order="C") for item in value)
            return [{"array": number} for number in range(len(arrays) - len(value), len(arrays))]
        return value.item() if hasattr(value, "item") else value

    states = []
    for name, callback in _named(callbacks):
        if _has_own_state(callback):
            states.append([name, _for_json(name, callback.get_state())])
        else:
            kept = [attribute for attribute in _attributes(callback) if hasattr(callback, attribute)]
            states.append([name, {attribute: packed(getattr(callback, attribute)) for attribute in kept}])
    return [state for state in states if state[1]], arrays


def put_back(callbacks: Any, states: list[Any], arrays: list[np.ndarray]) -> None:
    """Let callbacks remember what `take` returned. Those that this rank does not have are left out.

    Raises:
        ValueError: a state holds what its callback does not save. No callback has been changed then.
    """

    def unpacked(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [arrays[item["array"]] if isinstance(item, dict) else np.asarray(item) for item in value]

    known = dict(states)
    found = [(name, callback, known[name]) for name, callback in _named(callbacks) if name in known]
    for name, callback, state in found:
        _check(name, callback, state, len(arrays))
    for _, callback, state in found:
        if _has_own_state(callback):
            callback.set_state(state)
            continue
        for attribute, value in state.items():
            setattr(callback, attribute, unpacked(value))


def _for_json(name: str, state: Any) -> Any:
    """Return a state, or raise where a file would not hold it as it is."""
    try:
        json.dumps(state)
        wrong = [key for key in state if not isinstance(key, str)] if isinstance(state, dict) else []
        received = f"the key {wrong[0]!r}" if wrong else ""
    except (TypeError, ValueError) as error:
        received = str(error)
    if received:
        raise ValueError(
            f"`get_state()` of {name} returns what the checkpoint cannot hold. Expected what JSON can: text, numbers, "
            f"None, lists, and dictionaries whose keys are text. Received: {received}"
        )
    return state


def _check(name: str, callback: Any, state: Any, arrays: int) -> None:
    kinds = _attributes(callback)
    if _has_own_state(callback):
        now = callback.get_state()
        if isinstance(state, dict) and isinstance(now, dict):
            _refuse_others(name, state, list(now))
        return
    if not isinstance(state, dict):
        raise ValueError(f"The checkpoint's state of {name} is no dictionary. Received: {type(state).__name__}")
    _refuse_others(name, state, [attribute for attribute in kinds if hasattr(callback, attribute)])
    for attribute, value in state.items():
        fits = value is None or (
            isinstance(value, (int, float))
            if kinds[attribute] is _NUMBER
            else isinstance(value, list) and all(_is_array(item, arrays) for item in value)
        )
        if not fits:
            raise ValueError(
                f"`{attribute}` of {name} in the checkpoint is not what the callback saves. Expected "
                f"{kinds[attribute]}. Received: {str(value)[:100]}"
            )


def _refuse_others(name: str, state: dict[str, Any], expected: Sequence[str]) -> None:
    others = sorted(set(state) - set(expected))
    if others:
        raise ValueError(
            f"The checkpoint's state of {name} holds what the callback does not save (the keys of a `get_state()` are "
            f"always the same). Expected some of {sorted(expected)}. Received: {others}"
        )


def _is_array(item: Any, arrays: int) -> bool:
    """Whether an item of a list of weights is one: before December 2026 those without axes were numbers."""
    if isinstance(item, dict):
        return list(item) == ["array"] and type(item["array"]) is int and 0 <= item["array"] < arrays
    return isinstance(item, (int, float))


def _has_own_state(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _named(callbacks: Any) -> list[tuple[str, Any]]:
    """The callbacks with names, which are the same in every process: `EarlyStopping 1`, `EarlyStopping 2`, ..."""
    named, counts = [], dict[str, int]()
    for given in callbacks.callbacks:
        # Of what the first rank alone has, others count nothing.
        inside = isinstance(given, RootOnly)
        callback = given.callback if inside else given
        name = type(callback).__name__ if not inside else f"RootOnly({type(callback).__name__})"
        counts[name] = counts.get(name, 0) + 1
        named.append((f"{name} {counts[name]}", callback))
    return named


def _attributes(callback: Any) -> dict[str, str]:
    """The attributes that are saved of a callback, with their kinds."""
    return next((names for kind, names in _ATTRIBUTES.items() if isinstance(callback, kind)), {})
