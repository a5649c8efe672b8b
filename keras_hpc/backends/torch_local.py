# SPDX-License-Identifier: Apache-2.0
"""PyTorch: local steps. They run where Python is, so what a step has to do is a number."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_hpc.backends import torch as backend
from keras_hpc.backends.torch_tensors import bytes_of, number_of


def begin(plan: Any, samples: Any, gradient: Any) -> tuple[Any, int]:
    """Begin a step of a plan with local steps; see `local_steps`."""
    return gradient, plan.begin_local(number_of(samples))


def set_anchors(plan: Any, mode: int, due: bool, values: Callable[[], Sequence[Any]]) -> int:
    """Give the engine the weights before a step's update, if it is due."""
    for number, value in enumerate(values() if due else ()):
        plan.set_anchor(number, bytes_of(value.detach().to("cpu").contiguous()))
    return mode


@torch.no_grad()  # type: ignore[untyped-decorator]
def average(plan: Any, due: bool, variables: Sequence[Any]) -> None:
    """Give variables, or tensors, what a plan makes of them, if it is due."""
    if not due:
        return
    tensors = [getattr(variable, "value", variable) for variable in variables]
    for tensor, value in zip(tensors, backend.reduce(plan, tensors), strict=True):
        tensor.copy_(value)


def choose(due: bool, average: Callable[[Any], Sequence[Any]], gradients: Sequence[Any]) -> Sequence[Any]:
    """Return the average of gradients, if it is due, or the gradients."""
    return average(None) if due else gradients


def update_if(due: Any, update: Callable[[], None], otherwise: Callable[[], None], kept: Sequence[Any]) -> None:
    """Make an update, if it is due; or `otherwise` something else, which leaves the variables `kept` as they were."""
    if due:
        update()
    else:
        otherwise()
