# SPDX-License-Identifier: Apache-2.0
"""Local steps in checkpoints: each rank's weights in the middle of a period, and what the engine keeps beside them.

Saving averages nothing: so it changes nothing, and training goes on bit for bit. Weights that are apart, and what
optimizers keep for them, are each rank's own there, as its statistics are. On another number of ranks they become their
mean, and a new period begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current
from keras_hpc.job.local_plan import State
from keras_hpc.keras_hooks.state import variables as model_variables

_COMMON, _OWN = ("anchor", "velocity", "mean"), "sent"


@dataclasses.dataclass
class Restored:
    """What an earlier process has left of an optimizer's local steps, until the first step of this one.

    Attributes:
        is_apart: whether ranks hold different weights.
        state: of its plan.
        memory: of its plan, by kind and tensor.
        weights: that it trains.
        slots: what it keeps for them.
        expected: whether they are about to get values that are apart.
    """

    is_apart: bool
    state: State
    memory: dict[tuple[str, int], np.ndarray]
    weights: Sequence[Any]
    slots: Sequence[Any]
    expected: bool = False


def own_variables(models: Sequence[Any]) -> list[Any]:
    """Return the variables of which each rank has values of its own."""
    found = []
    for optimizer in model_variables.unique(o for m in models for o in model_variables.optimizers_of(m)):
        line = current.job().known.optimizer(optimizer).local
        if line is None:
            continue
        _finish_step(optimizer)
        if line.is_apart or line.expected:
            found += [*line.weights, *line.slots]
    return found


def take(models: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, np.ndarray], list[tuple[str, np.ndarray]]]:
    """Return what a checkpoint holds of local steps. Collective.

    Returns:
        For JSON, of each optimizer that makes some; arrays that are alike on all ranks, by name; and this rank's own.
    """
    facts, common, own = [], dict[str, np.ndarray](), []
    for number, optimizer in enumerate(_optimizers_of(models)):
        line = current.job().known.optimizer(optimizer).local
        if line is None:
            continue
        _finish_step(optimizer)
        if isinstance(line, Restored):
            state, memory, team = line.state, line.memory, current.team_of(optimizer)
        else:
            state, team = line.plan.state(), line.plan.plan.team
            memory = {
                (kind, tensor): line.plan.memory(kind, tensor).copy()
                for kind, tensors in line.plan.kinds.items()
                for tensor in range(tensors)
                if kind == "velocity" or (state.anchored if kind == "anchor" else state.travelling)
            }
        facts.append(
            {
                "number": number,
                "is_apart": line.is_apart,
                "state": dataclasses.asdict(state),
                "samples": team.allgather_object(state.samples, "Checkpoint: samples of local steps"),
                "memory": [[kind, tensor, array.size] for (kind, tensor), array in memory.items()],
            }
        )
        for (kind, tensor), array in memory.items():
            if kind == _OWN:
                own.append((f"{kind}{number}_{tensor}", array))
            else:
                common[f"local{number}_{kind}{tensor}"] = array
    return facts, common, own


def expect(models: Sequence[Any], facts: Sequence[dict[str, Any]]) -> None:
    """Let `own_variables` say what it said when `take` gave these facts. On every rank.

    Args:
        models: built ones, with built optimizers.
        facts: of `take`.

    Raises:
        ValueError: the team that trains has another schedule.
    """
    optimizers = _optimizers_of(models)
    local = [o for o in optimizers if current.team_of(o).schedule.local is not None]
    if facts and not local:
        raise ValueError(
            "The checkpoint is of a training with local steps. Expected keras_hpc.configure_team(schedule='local') "
            "before it goes on. Received: another schedule"
        )
    for fact in facts:
        optimizer = optimizers[fact["number"]]
        known = current.job().known.optimizer(optimizer)
        if known.local is None or isinstance(known.local, Restored):
            hidden = model_variables.known_local()
            weights = [v for v in model_variables.trained_by(optimizer) if id(v) not in hidden]
            slots = [v for v in model_variables.slots_of(optimizer) if id(v) not in hidden]
            known.local = Restored(False, State(), {}, weights, slots)
        known.local.expected = fact["is_apart"]


def restore(
    models: Sequence[Any], facts: Sequence[dict[str, Any]], arrays: dict[str, np.ndarray], *, anew: bool
) -> None:
    """Go on from what `take` gave. On every rank; variables have their values.

    Args:
        models: as for `take`.
        facts: its facts.
        arrays: its arrays, those of all ranks and this rank's own.
        anew: the number of ranks is another one: a new period begins.
    """
    optimizers = _optimizers_of(models)
    for fact in facts:
        number, optimizer = fact["number"], optimizers[fact["number"]]
        known = current.job().known.optimizer(optimizer)
        memory = {}
        for kind, tensor, _ in fact["memory"]:
            if not anew or kind == "velocity":
                name = f"{kind}{number}_{tensor}" if kind == _OWN else f"local{number}_{kind}{tensor}"
                memory[kind, tensor] = arrays[name]
        rank = current.team_of(optimizer).rank
        state = State() if anew else State(**{**fact["state"], "samples": fact["samples"][rank]})
        is_apart = fact["is_apart"] and not anew
        if isinstance(known.local, Restored):
            known.local = dataclasses.replace(
                known.local, is_apart=is_apart, state=state, memory=memory, expected=False
            )
        else:
            put(known.local, state, memory, is_apart=is_apart)
            known.local.expected = False
        known.synchronized = True
    if facts:
        for model in models:
            current.job().known.model(model).synchronized = len(model_variables.replicated_variables(model))


def put(line: Any, state: State, memory: dict[tuple[str, int], np.ndarray], *, is_apart: bool) -> None:
    """Give a line what an earlier process has left. On every rank.

    Raises:
        ValueError: it was made with another `outer` or `overlap_steps`.
    """
    kinds = line.plan.kinds
    for (kind, tensor), array in memory.items():
        if tensor >= kinds.get(kind, 0):
            raise ValueError(
                "The checkpoint is of other local steps. Expected the same `outer`, `overlap_steps` and "
                f"`average_optimizer`. Received: what was kept of '{kind}', which these do not have"
            )
        line.plan.memory(kind, tensor)[:] = array
    line.plan.restore(state)
    line.settled_at = -1 if is_apart else line.plan.taken()


def shared(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of the arrays that are alike on all ranks."""
    return [f"local{f['number']}_{kind}{tensor}" for f in facts for kind, tensor, _ in f["memory"] if kind != _OWN]


def _finish_step(optimizer: Any) -> None:
    """Wait for the last step, which JAX may be computing still."""
    keras.ops.convert_to_numpy(optimizer._iterations)


def _optimizers_of(models: Sequence[Any]) -> list[Any]:
    return model_variables.unique(o for model in models for o in model_variables.optimizers_of(model))
