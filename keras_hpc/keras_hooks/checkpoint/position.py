# SPDX-License-Identifier: Apache-2.0
"""Where training is in its data, and how another process gets there.

Of data whose order is ours (those with `passes`) the pass begins right there. Of others the batches that were trained
on are read again and dropped. Each iterator of a `tf.data` pipeline that shuffles has the next order of its seed: so as
many are made as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras

from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.data import tf_datasets

_is_tf_dataset = keras_private.adapter(":is_tf_dataset")


class Count:
    """Counts the iterators over the data of an `EpochIterator` that have begun.

    Args:
        iterator: the `EpochIterator` of `fit`.
    """

    def __init__(self, iterator: Any) -> None:
        self.begun = 0
        self._iterator = iterator
        if keras.backend.backend() == "tensorflow":  # which begins them when they are made, others with the first batch
            get_iterator = iterator._get_iterator

            def counted() -> Any:
                self.begun += 1
                return get_iterator()

            iterator._get_iterator = counted

    def step(self) -> None:
        """Must be called for each step of the epoch, once Keras has counted it."""
        own = self._iterator
        if keras.backend.backend() != "tensorflow" and own._steps_seen <= own.steps_per_execution:
            self.begun += 1


def tell(iterator: Any, step: int, team: Any, begun: int = 0) -> dict[str, Any]:
    """Return where training is in its data, as JSON can hold it.

    Args:
        iterator: the `EpochIterator` of `fit`.
        step: steps of the epoch that are done.
        team: that of the model.
        begun: how many iterators over the data have begun.
    """
    adapter = iterator.data_adapter
    # Without `steps_per_epoch` each epoch is a pass of its own.
    seen = iterator._steps_seen if step or iterator.steps_per_epoch else 0
    passes = getattr(adapter, "passes", None)
    return {
        "step": step,
        "seen": seen,
        "begun": begun,
        "pass": None if passes is None else passes.running if seen else passes.next,
        "seed": getattr(adapter, "seed", None),
        "step_size": _step_size(adapter, team),
        "data": getattr(adapter, "fingerprint", type(adapter).__name__),
    }


def translate(position: dict[str, Any], iterator: Any, team: Any) -> dict[str, Any]:
    """Return a position as it is with the ranks and batches of this process.

    That is after as many samples, or ready-made batches, rounded down to whole steps; the beginning of the epoch where
    nobody knows how many those are.
    """
    size = _step_size(iterator.data_adapter, team)
    if size == position["step_size"]:
        return position
    known = size is not None and position["step_size"] is not None
    step, seen = (position[name] * position["step_size"] // size if known else 0 for name in ("step", "seen"))
    if step >= (iterator.num_batches or math.inf):
        step = seen = 0
    return position | {"step": step, "seen": seen}


def seek(iterator: Any, position: dict[str, Any]) -> int:
    """Lets the next pass be the one of the position, and begin there. Returns how many iterators have begun."""
    adapter = iterator.data_adapter
    begun: int = position["begun"] - (position["seen"] > 0)
    dataset: Any = getattr(adapter, "_dataset", None)
    if _is_tf_dataset(dataset) and tf_datasets.shuffles(dataset):
        for _ in range(begun):
            iter(dataset)
    if hasattr(adapter, "passes") and position["pass"] is not None:
        adapter.passes.next, adapter.passes.first = position["pass"], position["seen"]
        if position["seed"] is not None:
            adapter.seed = position["seed"]
    return begun


def order_is_known(iterator: Any) -> bool:
    """Return whether we know in which order the data come."""
    adapter = iterator.data_adapter
    return hasattr(adapter, "passes") or _is_tf_dataset(getattr(adapter, "_dataset", None))


def skipped(iterator: Any, steps: Iterator[Any], position: dict[str, Any]) -> Iterator[Any]:
    """Yield what is left of the epoch's steps.

    Args:
        iterator: the `EpochIterator` of `fit`.
        steps: of the whole epoch, as `_enumerate_iterator` yields them.
        position: to which `seek` has gone.
    """
    step, seen = position["step"], position["seen"]
    behind = seen - step  # what earlier epochs took from the same pass
    ours = hasattr(iterator.data_adapter, "passes")
    if iterator.steps_per_epoch:  # then Keras goes on with the pass that it finds
        iterator._current_iterator = iter(iterator._get_iterator())
        iterator._steps_seen = behind
        if not ours:
            _drop(iterator._current_iterator, behind * _turns(iterator))
    for item in steps:
        if item[0] >= step:
            yield item
        elif not ours:
            _drop(item[-1], iterator.steps_per_execution * _turns(iterator))


def _turns(iterator: Any) -> int:
    """How many batches this rank takes in a step: one, or one for each of its virtual ranks."""
    turns: int = getattr(iterator.data_adapter, "turns", 1)
    return turns


def _drop(batches: Iterator[Any], count: int) -> None:
    for _ in range(count):
        next(batches, None)


def _step_size(adapter: Any, team: Any) -> int | None:
    """What a step of all ranks takes: samples of arrays, or ready-made batches. None: of data that are not shared."""
    size: int | None = getattr(adapter, "step_size", 1 if team.size == 1 else None)
    return size
