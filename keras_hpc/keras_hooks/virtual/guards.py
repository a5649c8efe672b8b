# SPDX-License-Identifier: Apache-2.0
"""What virtual ranks change of Keras' calls: what they refuse, forget and take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_hpc.job import current


def refuse_batches(name: str) -> None:
    """Raise where a method gets a batch that nobody has cut."""
    if current.job().virtual is not None:
        raise ValueError(
            "With init(virtual_ranks=) a batch is that of all virtual ranks, which `fit` and `evaluate` cut. Received: "
            f"{name}"
        )


def refuse_loops() -> None:
    """Raise where an optimizer applies gradients that are not those of all parts."""
    raise RuntimeError(
        "With init(virtual_ranks=) models are trained by `fit` so far, which knows the samples of all virtual ranks. "
        "Received: a training loop or train_on_batch. Use keras_hpc.init() without virtual_ranks"
    )


def forget() -> None:
    """Of virtual ranks: whatever a training that failed has left, a new one begins with the values of variables."""
    virtual = current.job().virtual
    if virtual is not None:
        virtual.states.clear()


def batches_of_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of an `EpochIterator` that takes a step's batches, where a rank has several (PyTorch)."""

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        turns = getattr(self.data_adapter, "turns", 1)
        if turns == 1:
            return original(self)
        first, last, iterator = next(self._epoch_iterator)
        with self.catch_stop_iteration():
            return first, last, [next(iterator) for _ in range(turns)]
        raise StopIteration

    return __next__
