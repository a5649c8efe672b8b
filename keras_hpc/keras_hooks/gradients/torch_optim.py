# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own optimizers: their gradients are averaged before each step, or weights after it, in users' loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.gradients import first_update, optimizer, plans
from keras_hpc.keras_hooks.schedules import local_steps
from keras_hpc.keras_hooks.state import replicas


def install(job: Any, patcher: Any) -> None:
    """Hooks the step of every optimizer of `torch.optim`, also of those that exist."""
    if keras.backend.backend() != "torch":
        return
    from torch.optim import optimizer as of_torch

    patcher.at_end(of_torch.register_optimizer_step_pre_hook(_before).remove)
    patcher.at_end(of_torch.register_optimizer_step_post_hook(_after).remove)


def _before(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Averages the gradients of an optimizer that is about to step, or begins a local step. Collective."""
    if running.trial() is not None:
        raise RuntimeError("A step cannot be tried that calls an optimizer of torch.optim.")
    if not current.active():
        return
    if current.job().virtual is not None:
        raise ValueError(
            "With init(virtual_ranks=) models are trained by `fit` with an optimizer of Keras so far. Received: "
            f"{type(own).__name__} of torch.optim"
        )
    if current.job().size == 1 and current.team_of(own).schedule.local is None:
        return
    if current.job().shard_optimizer:
        raise ValueError(
            "init(shard_optimizer=True) shares out the state of Keras' optimizers. Expected one of keras.optimizers, "
            f"or init(shard_optimizer=False). Received: torch.optim.{type(own).__name__}"
        )
    if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:  # after `self`
        raise ValueError(
            "keras_hpc averages gradients before the step of a torch.optim optimizer, but with a closure they are "
            "computed inside of it. Call backward() first and step() without a closure. Received: "
            f"{type(own).__name__}.step(closure)"
        )
    parameters = parameters_of(own)
    team = current.team_of(own)
    if not replicas.is_synchronized(own):
        replicas.check_equal(own, parameters)
    gradients = [parameter.grad for parameter in parameters]
    step = running.step()
    count = None if step is None else step.count
    if team.schedule.local is not None:
        _, gradients, mode = local_steps.begin(team, own, gradients, parameters, count, plans.key_of(own))
        current.job().known.optimizer(own).local_mode = mode
        if not local_steps.is_synchronous(mode):
            if count is not None and not count > 0:  # its gradients are of no samples
                own.zero_grad(set_to_none=True)
            return
    else:
        first_update.warn_of_equal_gradients(team, gradients)
    average(own, parameters, count)


def parameters_of(own: Any) -> list[Any]:
    """Return the parameters that an optimizer trains."""
    return [p for group in own.param_groups for p in group["params"] if p.requires_grad]


def average(own: Any, parameters: Sequence[Any], count: Any) -> None:
    """Give parameters the mean over ranks of their gradients. Collective.

    Args:
        own: the optimizer, or what stands for it.
        parameters: those that it trains.
        count: samples of this rank in this step; None if every rank counts alike.
    """
    import torch

    means = optimizer.reduce_gradients(own, [parameter.grad for parameter in parameters], parameters, count)
    for parameter, mean in zip(parameters, means, strict=True):
        if mean is None:
            continue
        if parameter.grad is None and isinstance(own, torch.optim.SparseAdam):
            parameter.grad = mean.to_sparse(1)  # as of an Embedding on the ranks that have samples
        elif parameter.grad is None:
            parameter.grad = mean.clone()  # it lies in the engine's memory until the next step
        elif parameter.grad.is_sparse:  # of the rows that any rank has: SparseAdam takes no other kind
            parameter.grad = mean.to_sparse(parameter.grad.sparse_dim())
        else:
            parameter.grad.copy_(mean)


def _after(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Ends a local step. Collective where weights are averaged."""
    if not current.active():
        return
    known = current.job().known.optimizer(own)
    if known.local is not None and known.local_mode is not None:
        local_steps.end(known.local, known.local_mode)
        known.local_mode = None
