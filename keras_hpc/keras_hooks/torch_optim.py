# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own optimizers: their gradients are averaged before each step, in loops of the user's own."""

from __future__ import annotations

from typing import Any

import keras

from keras_hpc.job import current
from keras_hpc.keras_hooks import optimizer, replicas, running


def install(job: Any, patcher: Any) -> None:
    """Hooks the step of every optimizer of `torch.optim`, also of those that exist."""
    if keras.backend.backend() != "torch":
        return
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    patcher.at_end(register_optimizer_step_pre_hook(_average).remove)


def _average(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Averages the gradients of an optimizer that is about to step. Collective."""
    if running.trial() is not None:
        raise RuntimeError("A step cannot be tried that calls an optimizer of torch.optim.")
    if not current.active():
        return
    if current.job().virtual is not None:
        raise ValueError(
            "With init(virtual_ranks=) models are trained by `fit` with an optimizer of Keras so far. Received: "
            f"{type(own).__name__} of torch.optim"
        )
    if current.job().size == 1:
        return
    if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:  # after `self`
        raise ValueError(
            "keras_hpc averages gradients before the step of a torch.optim optimizer, but with a closure they are "
            "computed inside of it. Call backward() first and step() without a closure. Received: "
            f"{type(own).__name__}.step(closure)"
        )
    parameters = [p for group in own.param_groups for p in group["params"] if p.requires_grad]
    team = current.team_of(own)
    if not replicas.is_synchronized(own):
        replicas.check_equal(own, parameters)
    gradients = [parameter.grad for parameter in parameters]
    optimizer.warn_of_equal_gradients(team, gradients)
    step = running.step()
    means = optimizer.reduce_gradients(own, gradients, parameters, None if step is None else step.count)
    for parameter, mean in zip(parameters, means, strict=True):
        if mean is None:
            continue
        if parameter.grad is None:
            parameter.grad = mean.clone()  # it lies in the engine's memory until the next step
        else:
            parameter.grad.copy_(mean)
