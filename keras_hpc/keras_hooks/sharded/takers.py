# SPDX-License-Identifier: Apache-2.0
"""Which rank alone needs which elements of the gradients: whoever updates them, where nobody looks at more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_hpc.job import current
from keras_hpc.keras_hooks.sharded import update
from keras_hpc.keras_hooks.state import variables as model_variables


def can_be(optimizer: Any) -> bool:
    """Return whether ranks can do with the gradients of what they update. The same on all ranks.

    Norms of gradients, waiting gradients, and the search of a loss scale for infinities need whole ones.
    """
    return bool(
        current.job().shard_optimizer
        and isinstance(optimizer, keras.optimizers.Optimizer)
        and not model_variables.held_optimizers(optimizer)
        and not optimizer.gradient_accumulation_steps
        and optimizer.clipnorm is None
        and optimizer.global_clipnorm is None
    )


def of_gradients(optimizer: Any, variables: Sequence[Any]) -> list[tuple[tuple[int, int], ...]] | None:
    """Return for each variable which rank needs its gradient up to which element, `(end, rank)`; None: all need all.

    Args:
        optimizer: the outermost one that applies them; it is built, if it was not.
        variables: whose gradients they are; empty where Keras does not say.
    """
    if not variables or not can_be(optimizer):
        return None
    shards = update.shards_for_update(optimizer, variables)
    if shards is None:
        return None
    positions = [shards.index_of(variable) for variable in variables]
    if None in positions:  # `apply` says what is wrong
        return None
    return [tuple((piece.stop, piece.rank) for piece in shards.pieces[p]) for p in positions if p is not None]
