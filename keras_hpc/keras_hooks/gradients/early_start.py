# SPDX-License-Identifier: Apache-2.0
"""PyTorch: starts the reduction of a gradient as soon as backward has computed it, while the rest still runs.

TensorFlow and XLA see in their programs what can run beside what. PyTorch runs backward before it calls
`Optimizer.apply`; so its variables get hooks. Only in the `train_step` of Keras itself, where one backward pass is
followed by one `apply` of its gradients: elsewhere, a gradient that has come may not be the one that is applied.

With gradient accumulation, and in teams that are not synchronous, `apply` starts everything: what is reduced is known
only there.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from keras_hpc import _native, backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.gradients import optimizer, plans
from keras_hpc.keras_hooks.trials import own_steps


class _Hooks:
    """The hooks on a model's trainable variables.

    Args:
        variables: the variables.
        gradients: takes their gradients.
        order: position among the variables of each gradient of the plan.
    """

    def __init__(self, variables: Sequence[Any], gradients: Any, order: Sequence[int]) -> None:
        self.gradients = gradients
        self.running = False
        self.weight: Any = None
        self.variables = list(map(id, variables))
        # The hooks must not keep the model's variables alive, nor the variables these hooks.
        arrived = functools.partial(backends.current().uncompiled(_arrived), weakref.ref(self))
        parameters = [variables[index].value for index in order]
        self.handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(arrived, number))
            for number, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self.handles:
            handle.remove()


def _arrived(hooks: weakref.ref[_Hooks], number: int, parameter: Any) -> None:
    owner = hooks()
    if owner is not None and owner.running:
        # What backward made is freed: the gradient now lives where it is reduced.
        parameter.grad = owner.gradients.give(number, parameter.grad, owner.weight)


def wrap(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a training step with hooks on the model's variables, where they can start reductions.

    Args:
        model: the model that trains.
        step: the function that runs its `train_step`.
    """
    if not own_steps.is_keras_own(model):
        return step
    reference = weakref.ref(model)  # the model holds the function

    @functools.wraps(step)
    def early(batches: Any) -> Any:
        owner = reference()
        hooks = _hooks_of(owner) if _starts_early(owner) else None
        if hooks is None:
            return step(batches)
        this = running.step()
        hooks.weight = None if this is None else this.count if this.weight is None else this.weight
        hooks.running = True
        try:
            return step(batches)
        except _native.Error:
            raise  # the team has failed, and can complete nothing
        except BaseException:  # whatever it was, raised again
            if hooks.gradients.begun:
                hooks.gradients.abandon(hooks.weight)
            raise
        finally:
            hooks.running = False

    return early


def _starts_early(model: Any) -> bool:
    if model.optimizer is None or not model.trainable_variables or not current.active():
        return False
    if current.job().virtual is not None:
        this = running.step()
        return this is not None and this.weight is not None
    return current.team_of(model.optimizer).schedule.kind == "synchronous" and not optimizer.accumulates(
        model.optimizer
    )


def _hooks_of(model: Any) -> _Hooks:
    """Return the hooks on the variables that are trainable now. Collective where they are new."""
    variables = model.trainable_variables
    state = current.job().known.model(model)
    hooks: _Hooks | None = state.early_start
    team = current.team_of(model.optimizer)
    plan, order = plans.in_segment(team, model.optimizer, [None] * len(variables), variables)
    gradients = backends.current().gradients_of(plan)
    if hooks is None or hooks.gradients is not gradients or hooks.variables != list(map(id, variables)):
        if hooks is not None:
            hooks.remove()
        hooks = state.early_start = _Hooks(variables, gradients, order)
    return hooks
