# SPDX-License-Identifier: Apache-2.0
"""Gives layers other attributes while they compute a part, and again where that is computed again.

In a `keras.RematScope` what a layer has computed is not kept: its `call` runs once more backward, when all that was set
for the first time is over. So there the `call` itself sets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_MISSING = object()


def is_recomputed(layer: Any) -> bool:
    """Return whether a layer, or an operation, may compute all of its output again, backward."""
    mode = getattr(layer, "_remat_mode", None)  # older Keras has none
    return mode is not None and mode.mode not in (None, "activations")


@contextlib.contextmanager
def with_settings(layer: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Give a layer other attributes meanwhile, past Keras' tracking, and whenever it computes the same again."""
    with _given(layer, settings), again_in(layer, lambda: _given(layer, settings)):
        yield


@contextlib.contextmanager
def once(layer: Any, settings: dict[str, Any]) -> Iterator[None]:
    """Give a layer other attributes meanwhile, and keep what it computes, for others take part in computing it."""
    with _given(layer, {**settings, "_remat_mode": None} if is_recomputed(layer) else settings):
        yield


@contextlib.contextmanager
def again_in(layer: Any, context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Have what a layer computes meanwhile computed in a context, also where that is done again."""
    if not is_recomputed(layer):
        yield
        return
    compute = layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return compute(*args, **kwargs)

    with _given(layer, {"call": call}):
        yield


@contextlib.contextmanager
def _given(layer: Any, settings: dict[str, Any]) -> Iterator[None]:
    before = {name: vars(layer).get(name, _MISSING) for name in settings}
    for name, value in settings.items():
        object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                object.__delattr__(layer, name)
            else:
                object.__setattr__(layer, name, value)
