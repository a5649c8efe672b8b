# SPDX-License-Identifier: Apache-2.0
"""Finds out what numbers a `test_step` of the user's own gives to its metrics, as own_steps.py does for training.

And what layers, `call` and `compute_metrics` of the user's own give to metrics that they keep, in the steps of Keras.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.trials import calm, made_up, metric_kinds, own_steps, tries
from keras_hpc.keras_hooks.trials.tries import Tries

Method = Literal["train_step", "test_step"]


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
    metrics = (metric_kinds.of_layers if own_steps.has_own(model, "test_step") else metric_kinds.of_model)(model)
    # Of what training has told already nothing more is asked.
    asked = [metric for metric in metrics if not metric_kinds.kinds.get(metric, metric_kinds.UNKNOWN)]
    if not asked:
        return arguments
    state.test_step_was_tried = True
    return ask(model, "test_step", asked, arguments)


def check_training(model: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Do the same for layers of a model that trains as Keras does, before its first step in a `fit`, once. Collective.

    Args:
        model: a model whose replicas are equal.
        arguments: of its train function: on JAX the state, then this rank's batches.

    Returns:
        The arguments, with nothing taken from the batches.
    """
    call, this, state = running.call(), current.job(), current.job().known.model(model)
    in_fit = call is not None and call.kind == "fit"
    if not in_fit or state.step_was_tried or this.batch != "global" or this.size == 1:
        return arguments
    asked = metric_kinds.of_layers(model)
    if not asked:
        return arguments
    state.step_was_tried = True
    return ask(model, "train_step", asked, arguments)


def ask(model: Any, method: Method, asked: list[Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Try a step to learn what numbers metrics get. Collective on the model's team.

    Args:
        model: a model whose replicas are equal.
        method: its step.
        asked: some of `metric_kinds.of_model`, the same on all ranks.
        arguments: of its train or test function.

    Returns:
        The arguments, with nothing taken from the batches.
    """
    rest, batch, arguments = tries.look_at(arguments)
    found = np.array(_kinds(model, method, asked, rest, batch), np.float64)
    current.team_of(model).allreduce(found, op="max", what=f"what a {method} gives to metrics")
    metric_kinds.tell(model, method, asked, found.astype(int).tolist())
    return arguments


def _kinds(model: Any, method: Method, asked: list[Any], rest: list[Any], batch: Any) -> list[int]:
    unknown = [metric_kinds.UNKNOWN] * len(asked)
    if not all(layer.built for layer in model._flatten_layers()):
        return unknown
    try:
        samples = made_up.batch(batch)
        with tries.unchanged_model(model), calm.layers():
            rank = Tries(model, rest, tries.twin_step(model), method=method)
            alone = Tries(model, rest, None, method=method)
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
