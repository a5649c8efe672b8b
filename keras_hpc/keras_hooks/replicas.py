# SPDX-License-Identifier: Apache-2.0
"""Compares the ranks' replicas of a model, bit for bit: a flipped bit, or a bug, makes them differ."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import xxhash

from keras_hpc import backends
from keras_hpc.errors import ReplicaMismatchError
from keras_hpc.job import current
from keras_hpc.keras_hooks import state

_DIGEST_BYTES = 16
_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # that a model has made


def forget() -> None:
    """Forgets every model."""
    _steps.clear()


def compare(team: Any, variables: Sequence[Any], values: Sequence[Any], when: str = "") -> None:
    """Raises on all ranks if values differ between them, naming the first variable. Collective on the team.

    Args:
        team: whose ranks compare.
        variables: as many and of the same shapes on every rank.
        values: theirs, tensors of the backend.
        when: for the message.

    Raises:
        ReplicaMismatchError: they differ.
    """
    view = backends.current().view
    digests = np.empty((1, len(variables), _DIGEST_BYTES), dtype=np.uint8)
    for i, value in enumerate(values):
        content = np.ascontiguousarray(view(value)).reshape(-1).view(np.uint8)
        # Nobody forges a weight to look like another; XXH3 reads as fast as memory delivers.
        digests[0, i] = np.frombuffer(xxhash.xxh3_128_digest(content.data), dtype=np.uint8)
    everyone = team.allgather(digests)
    for i, variable in enumerate(variables):
        theirs = everyone[:, i]
        if (theirs == theirs[0]).all():
            continue
        alike = [int((theirs == mine).all(axis=1).sum()) for mine in theirs]
        right = int(np.argmax(alike))  # one of the majority; of two halves, the lower rank
        odd = np.flatnonzero((theirs != theirs[right]).any(axis=1)).tolist()
        raise ReplicaMismatchError(
            f"The replicas differ{when}: variable {variable.path!r} holds other values on rank "
            f"{', '.join(map(str, odd))} than on the other{'s' * (team.size - len(odd) > 1)}."
        )


def after_step(model: Any, results: Any) -> None:
    """Compares the replicas of a model every so many of its steps, if `init` was told so. Collective on its team.

    Statistics that each rank takes from its own data are left out: they become alike at the end of an epoch.

    Args:
        model: the model.
        results: of its train function; on JAX, they hold the state.
    """
    every = current.job().check_replicas_every
    if every is None:
        return
    before = _steps.get(model, 0)
    _steps[model] = now = before + model.steps_per_execution
    if before // every == now // every:
        return
    own = set(map(id, state.per_rank_state(model)))
    wanted = [variable for variable in state.replicated_variables(model) if id(variable) not in own]
    held = _values_in(model, results)
    # The optimizer of another model may be among its attributes: what a step does not move, is what it was.
    values = {id(variable): held.get(id(variable), variable._value) for variable in wanted}
    known = [variable for variable in wanted if values[id(variable)] is not None]
    compare(current.team_of(model), known, [values[id(variable)] for variable in known], f" after step {now}")


def _values_in(model: Any, results: Any) -> dict[int, Any]:
    """Returns the values of variables that are not in them: on JAX, steps hand their state on."""
    if keras.backend.backend() != "jax":
        return {}
    trainable, non_trainable, optimizer, _ = results[1]
    variables = [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]
    return {id(v): value for v, value in zip(variables, [*trainable, *non_trainable, *optimizer], strict=True)}
