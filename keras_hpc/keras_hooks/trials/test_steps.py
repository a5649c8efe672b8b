# SPDX-License-Identifier: Apache-2.0
"""Finds out what numbers a `test_step` of the user's own gives to its metrics, as own_steps.py does for training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.trials import calm, made_up, metric_kinds, own_steps, tries
from keras_hpc.keras_hooks.trials.tries import Tries


def check(model: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Try the test step of a model before its first one in an `evaluate`, once. Collective on its team.

    Args:
        model: a model whose replicas are equal.
        arguments: of its test function: on JAX the state, then this rank's batches.

    Returns:
        The arguments, with nothing taken from the batches.
    """
    call, this, state = running.call(), current.job(), current.job().known.model(model)
    # Only where data are shared out have all ranks as many steps.
    together = call is not None and call.kind == "evaluate" and hasattr(call.adapter, "may_be_empty")
    if not together or state.test_step_was_tried or this.batch != "global" or this.size == 1:
        return arguments
    # Of what training has told already nothing more is asked.
    asked = [m for m in metric_kinds.of_model(model) if not metric_kinds.kinds.get(m, metric_kinds.UNKNOWN)]
    if not asked or own_steps.has_own(model, "test_step"):
        return arguments
    state.test_step_was_tried = True
    rest, batch, arguments = tries.look_at(arguments)
    found = np.array(_kinds(model, asked, rest, batch), np.float64)
    current.team_of(model).allreduce(found, op="max", what="what a test_step gives to metrics")
    metric_kinds.tell(model, "test_step", asked, found.astype(int).tolist())
    return arguments


def _kinds(model: Any, asked: list[Any], rest: list[Any], batch: Any) -> list[int]:
    unknown = [metric_kinds.UNKNOWN] * len(asked)
    if not all(layer.built for layer in model._flatten_layers()):
        return unknown
    try:
        samples = made_up.batch(batch)
        with tries.unchanged_model(model), calm.layers():
            rank = Tries(model, rest, tries.twin_step(model), method="test_step")
            alone = Tries(model, rest, None, method="test_step")
            first, again = (rank.moved_by(samples) for _ in range(2))
            twice = alone.moved_by(tries.joined(samples, samples))
            moved = list(_moved(rank, alone, samples, batch))
    except Exception:  # noqa: BLE001  it may refuse made-up samples; what is wrong with it, it raises again
        return unknown
    if alone.communicates or any((first[key] != again[key]).any() for key in first):  # random
        return unknown
    limit = tries.tolerance(model)
    kinds = [metric_kinds.kind_of(metric, first, twice) for metric in asked]
    return metric_kinds.checked_in(moved, asked, kinds, limit)


def _moved(rank: Tries, alone: Tries, samples: Any, batch: Any) -> Iterator[list[dict[int, Any]]]:
    """Yield by how much variables of metrics move for two parts of a batch, and for both together, of each batch."""
    for number, parts in enumerate(tries.pairs_of_parts(rank, samples, batch)):
        try:
            yield [*map(rank.moved_by, parts), alone.moved_by(tries.joined(*parts))]
        except Exception:
            if not number:
                raise  # else it may refuse numbers below zero, and those that are none
