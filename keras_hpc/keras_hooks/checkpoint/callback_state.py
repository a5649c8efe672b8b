# SPDX-License-Identifier: Apache-2.0
"""What callbacks remember from epoch to epoch. Keras has no protocol for it: its own are known by their attributes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

_COUNTED = ("_batches_seen_since_last_saving", "_last_batch_seen")
_ATTRIBUTES = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: ("best", *_COUNTED),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
}


def take(callbacks: Any) -> tuple[list[Any], list[np.ndarray]]:
    """Return what callbacks remember: names and states that JSON can hold, and the arrays among them.

    Args:
        callbacks: a `CallbackList`.
    """
    arrays: list[np.ndarray] = []

    def packed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [packed(item) for item in value]
        if isinstance(value, np.ndarray) and value.ndim:
            arrays.append(np.asarray(value, order="C"))
            return {"array": len(arrays) - 1}
        return value.item() if hasattr(value, "item") else value

    states = []
    for name, callback in _named(callbacks):
        if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
            states.append([name, callback.get_state()])
        else:
            values = {attribute: packed(getattr(callback, attribute, None)) for attribute in _attributes(callback)}
            states.append([name, values])
    return [state for state in states if state[1]], arrays


def put_back(callbacks: Any, states: list[Any], arrays: list[np.ndarray]) -> None:
    """Lets callbacks remember what `take` returned. Those that this rank does not have are left out."""

    def unpacked(value: Any) -> Any:
        if isinstance(value, list):
            return [unpacked(item) for item in value]
        return arrays[value["array"]] if isinstance(value, dict) else value

    known = dict(states)
    for name, callback in _named(callbacks):
        if name not in known:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(known[name])
            continue
        for attribute in _attributes(callback):  # and no other that somebody has put into the file
            if attribute in known[name]:
                setattr(callback, attribute, unpacked(known[name][attribute]))


def _named(callbacks: Any) -> list[tuple[str, Any]]:
    """The callbacks with names, which are the same in every process: `EarlyStopping`, `EarlyStopping 2`, ..."""
    named, counts = [], dict[str, int]()
    for callback in callbacks.callbacks:
        name = type(callback).__name__
        counts[name] = counts.get(name, 0) + 1
        named.append((f"{name} {counts[name]}", callback))
    return named


def _attributes(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in _ATTRIBUTES.items() if isinstance(callback, kind)), ())
