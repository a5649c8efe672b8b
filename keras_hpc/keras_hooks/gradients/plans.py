# SPDX-License-Identifier: Apache-2.0
"""The plans by which an optimizer's gradients become those of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec
from keras_hpc.keras_hooks import float8, running
from keras_hpc.keras_hooks.sharded import takers
from keras_hpc.keras_hooks.state import variables as model_variables


def key_of(optimizer: Any) -> str:
    """Return the name of an optimizer's plans, the same on every rank."""
    return current.job().known.key_of(optimizer, "optimizer")


def of_means(
    team: Any, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], means: Sequence[int]
) -> Any:
    """Return the plan of gradients all of which exist: on the GPU that has the variables, where there is one.

    Args:
        team: the team that reduces them.
        optimizer: the outermost that applies them.
        gradients: this rank's.
        variables: theirs; empty where Keras does not say.
        means: whose mean is wanted, in the order in which backward computes them.
    """
    needed = takers.of_gradients(optimizer, variables)
    specs = [spec_of(index, gradients[index], variables, needed) for index in means]
    ask = functools.partial(team.plan, key_of(optimizer), specs, wire_dtype=team.wire_dtype)
    device = backends.current().device_of(variables)
    if device is not None:
        plan = ask(in_segment=True, device=device)
        if plan.device is not None or backends.current().PLANS_ON_GPU:
            return plan
    return ask()


def in_segment(team: Any, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return the plan of an optimizer whose gradients need not all exist, and whose they are. PyTorch only.

    Args:
        team: the team that reduces them.
        optimizer: the outermost that applies them.
        gradients: this rank's, or None for those that are not known yet.
        variables: theirs; empty where Keras does not say, and then all gradients exist.
    """
    known = current.job().known.optimizer(optimizer).in_segment
    # Asked for in every step, as PyTorch traces none. An optimizer keeps its variables, so their ids are not reused.
    alone = takers.can_be(optimizer)
    key = (team.id, alone, *map(id, variables), *(gradient is not None and gradient.dtype for gradient in gradients))
    if not variables or key not in known:
        extremes = float8.overwriting(variables)
        means = [index for index in reversed(range(len(gradients))) if index not in extremes]
        needed = takers.of_gradients(optimizer, variables) if alone else None
        specs = [spec_of(index, gradients[index], variables, needed) for index in means]
        specs.append(TensorSpec("which of them came", (len(means),), "float32"))
        device = backends.current().device_of(variables or gradients)
        in_tree = current.job().virtual is not None
        ask = functools.partial(team.plan, key_of(optimizer), specs, in_segment=True, device=device)
        plan = ask("sum", in_tree=True) if in_tree else ask(wire_dtype=team.wire_dtype)
        known[key] = plan, means
    return known[key]


def spec_of(index: int, gradient: Any, variables: Sequence[Any], needed: Sequence[Any] | None = None) -> Any:
    """Return what a plan knows of a gradient."""
    owner = variables[index] if variables else gradient
    name = running.plain_name(owner) if variables else "accumulated gradient"
    dtype = model_variables.standard_dtype(owner if gradient is None else gradient)
    return TensorSpec(f"{index}: {name}", tuple(owner.shape), dtype, takers=() if needed is None else needed[index])
