# SPDX-License-Identifier: Apache-2.0
"""Refuses losses that compare the samples of a batch with each other: a rank has only the pairs of its own part.

A function that returns a loss for each sample does not say whether other samples have a part in it, as the negatives of
a contrastive loss. With `init(batch="global")` it is asked, once: the losses of made-up samples are the same beside
other samples if each depends on its own sample alone.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.keras_hooks import own_steps

_TOLERANCE = 0.02  # of the largest loss
_DRAWS = 3  # one that is cut off at 0 may be 0 for all samples of one

_known: weakref.WeakSet[Any] = weakref.WeakSet()  # of which nobody needs to ask again


def check(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Ask a loss of the user's own, if it was not asked before. Without communication: ranks ask and find the same.

    Args:
        loss: a `keras.losses.Loss` that returns a value for each sample.
        y_true: what it gets in a step, of which only shapes and dtypes matter.
        y_pred: likewise.

    Raises:
        ValueError: other samples have a part in the loss of a sample.
    """
    if loss in _known or not _is_users(loss):
        return
    for draw in range(_DRAWS):
        samples, others = (_made_up((y_true, y_pred), 4 * draw + more) for more in (0, 2))
        try:
            both = keras.tree.map_structure(lambda x, y: np.concatenate([x, y]), samples, others)
            with backends.current().outside_programs():
                alone, again, beside = (_values(loss, given) for given in (samples, samples, both))
        except Exception:  # noqa: BLE001  it may refuse made-up samples; what is wrong with it, it raises again
            return
        if beside.shape != (2 * len(alone), *alone.shape[1:]) or not (again == alone).all():
            return  # no loss of each sample, or not a number, or random
        if (abs(beside[: len(alone)] - alone) > _TOLERANCE * abs(alone).max(initial=0)).any():
            raise ValueError(
                f"The loss `{loss.name}` gives a sample another loss beside other samples. So it compares the samples "
                "of a batch, of which each rank has a part, and ranks cannot compute what one rank computes. With "
                'init(batch="global"), return a loss for each sample that depends on this sample alone; or use '
                'batch="local". Received: losses that change beside other samples'
            )
    _known.add(loss)  # not one that was refused: it is refused again


def _is_users(loss: Any) -> bool:
    of_keras = type(loss).__module__.startswith("keras.")
    function = getattr(loss, "fn", None)
    return not of_keras or (function is not None and not str(function.__module__).startswith("keras."))


def _made_up(given: tuple[Any, Any], seed: int) -> tuple[Any, ...]:
    """Return samples like `y_true` and `y_pred`, which are not alike."""
    return tuple(
        keras.tree.map_structure(functools.partial(own_steps.made_up, seed=seed + number), y)
        for number, y in enumerate(given)
    )


def _values(loss: Any, samples: tuple[Any, ...]) -> np.ndarray:
    tensors = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), samples)
    values: np.ndarray = backends.current().to_numpy(loss.call(*tensors))
    return values.astype(np.float64)
