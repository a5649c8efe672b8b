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
_CALLS = {"train": "fit", "test": "evaluate"}  # in which a step is tried


def check(model: Any, kind: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Try a step of a model before its first one in a `fit` or an `evaluate`, once. Collective on its team.

    Args:
        model: a model whose replicas are equal.
        kind: of the step.
        arguments: of its train or test function: on JAX the state, then this rank's batches.

    Returns:
        The arguments, with nothing taken from the batches.
    """
    call, this, tried = running.call(), current.job(), current.job().known.model(model).metrics_were_tried
    # Only where data are shared out have all ranks as many steps of an `evaluate`.
    together = (
        call is not None
        and call.kind == _CALLS.get(kind)
        and (kind == "train" or hasattr(call.adapter, "may_be_empty"))
    )
    if not together or kind in tried or this.batch != "global" or this.size == 1:
        return arguments
    tried.add(kind)
    method: Method = f"{kind}_step"  # type: ignore[assignment]
    is_keras_own = own_steps.has_own(model, method)
    if kind == "train" and not (is_keras_own and own_steps.has_keras_loss(model)):
        return arguments  # own_steps.py has tried it
    metrics = (metric_kinds.of_layers if is_keras_own else metric_kinds.of_model)(model)
    # Of what training has told already nothing more is asked.
    asked = [metric for metric in metrics if not metric_kinds.kinds.get(metric, metric_kinds.UNKNOWN)]
    if not asked:
        return arguments
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
