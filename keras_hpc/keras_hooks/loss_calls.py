# SPDX-License-Identifier: Apache-2.0
"""Asks losses whose class has a `__call__` of its own, as that of supervised contrastive learning in Keras' examples.

Such a class reduces its loss itself, where nobody else looks, to one number for a batch. It is asked as a function is
that returns one number (`losses`): with `init(batch="global")` it must be a mean or a sum over samples.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_hpc.keras_hooks import keras_private, losses, running
from keras_hpc.keras_hooks.trials import pair_losses


def install(job: Any, patcher: Any) -> None:
    """Hooks `compile`, which finds such classes."""
    hooked: set[type] = set()

    def look(original: Any) -> Any:
        @functools.wraps(original)
        def compile_(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            for loss in keras.tree.flatten(getattr(self, "loss", None)):
                owner = _owner_of_call(loss)
                if owner is not None and owner not in hooked:
                    hooked.add(owner)
                    patcher.patch(owner, "__call__", _asking)
            return result

        return compile_

    if job.shares_samples:
        patcher.patch(keras_private.get(keras_private.TRAINER), "compile", look)


def _owner_of_call(loss: Any) -> Any:
    """Return the class of the user's own that says how a loss is called; None: it is Keras."""
    if not isinstance(loss, keras.losses.Loss):
        return None
    owner = next(kind for kind in type(loss).__mro__ if "__call__" in vars(kind))
    return None if owner.__module__.split(".")[0] == "keras" else owner


def _asking(original: Any) -> Any:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        losses.asked.reduced = False
        value = original(self, *args, **kwargs)
        by_keras, losses.asked.reduced = losses.asked.reduced, True  # then it was asked there
        step = running.step()
        if by_keras or not losses.exchanges(step) or len(args) < 2 or len(getattr(value, "shape", ())) > 0:
            return value
        more = args[2] if len(args) > 2 else kwargs.get("sample_weight")
        call = functools.partial(original, self)
        pair_losses.check_number(self, args[0], args[1], call)
        given = args[:2] if more is None else (*args[:2], more)
        return losses.scaled_if_sum(step, value, value, self, *given, function=call)

    return __call__
