# SPDX-License-Identifier: Apache-2.0
"""Makes the functions that run a model's steps: they know their batch size, and begin with equal replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_hpc import backends
from keras_hpc.job import current, meter, trace
from keras_hpc.keras_hooks import building, losses, running, step
from keras_hpc.keras_hooks.gradients import early_start
from keras_hpc.keras_hooks.state import replicas
from keras_hpc.keras_hooks.trials import mixed_samples, own_steps, test_steps
from keras_hpc.keras_hooks.virtual import steps

Method = Callable[..., Any]


def make_function(kind: str, original: Method) -> Method:
    """Wrap `make_train_function` and `make_test_function`: their step knows its batch size.

    Where the mode has changed, they make the function anew.
    """

    @functools.wraps(original)
    def make_function(self: Any, force: bool = False) -> Any:
        mode = step.mode_of(kind, self)
        modes = current.job().known.model(self).step_modes
        held = getattr(self, f"{kind}_function")
        force = force or (held is not None and modes.get(kind, step.PLAIN) != mode)
        modes[kind] = mode
        if not mode.active:
            return original(self, force=force)
        _refuse_xla(self)
        if mode.virtual:
            original(self, force=force)
            made = getattr(self, f"{kind}_function")
            if made is not held or force:
                made = steps.function_of(self, kind, made)
                setattr(self, f"{kind}_function", _first_step(self, kind, made))
            return None
        wrap = functools.partial(step.wrap, self, kind, mode)
        if keras.backend.backend() == "torch":  # whose functions look the step up whenever they run
            original(self, force=force)
        else:
            _with_step(self, f"{kind}_step", wrap, lambda: original(self, force=force))
        made = getattr(self, f"{kind}_function")
        if made is not held or force:
            if keras.backend.backend() == "torch":
                made = wrap(early_start.wrap(self, made) if kind == "train" else made)
            setattr(self, f"{kind}_function", _first_step(self, kind, made))
        return None

    return make_function


def _with_step(model: Any, name: str, wrap: Callable[[Method], Method], work: Callable[[], Any]) -> None:
    """Do `work` while the model's step is wrapped."""
    own = vars(model).get(name)
    # In the instance, past Keras' tracking of attributes, for as long as Keras picks it up.
    vars(model)[name] = wrap(getattr(model, name))
    try:
        work()
    finally:
        if own is None:
            del vars(model)[name]
        else:
            vars(model)[name] = own


def _first_step(model: Any, kind: str, function: Method) -> Method:
    """Return a step function that builds and synchronizes what is not built before its first step."""
    reference = weakref.ref(model)  # the model holds the function

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        owner: Any = reference()
        if hasattr(args[-1], "element_spec") and not replicas.was_synchronized(owner):
            virtual = current.job().virtual is not None
            building.build(owner, args[-1].element_spec, metrics=virtual)
            if kind == "train" and not virtual:
                building.trace(owner, owner.train_step, args[-1].element_spec)
            synchronize(owner)
        elif hasattr(args[-1], "element_spec") and not building.counts(owner):
            building.build(owner, args[-1].element_spec, metrics=True)
        if kind == "train":
            replicas.mark_statistics_local(owner)  # they are equal before
        if current.job().virtual is None:
            args = own_steps.check(owner, args) if kind == "train" else args
            args = test_steps.check(owner, kind, args)
        with trace.step(f"{owner.name} {kind}", backends.current().mark):
            results = function(*args)
        logs = results[0] if keras.backend.backend() == "jax" else results
        current.job().known.model(owner).samples[kind] = step.samples_of(logs)
        if kind == "train":
            meter.after_step()
            replicas.after_step(owner, results)
        return results

    return run


def without_xla(original: Method) -> Method:
    """Wrap the choice of `jit_compile="auto"` on TensorFlow: no XLA where ranks communicate."""

    @functools.wraps(original)
    def _resolve_auto_jit_compile(self: Any) -> Any:
        return False if current.active() else original(self)

    return _resolve_auto_jit_compile


def _refuse_xla(model: Any) -> None:
    """Turn XLA off on TensorFlow, which would have to leave its compiled program at each exchange."""
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        current.notice(f"model `{model.name}`: jit_compile=True is not available on several ranks, using False")
        current.job().known.model(model).jit_compile = model.jit_compile
        model.jit_compile = False


def synchronize(model: Any) -> None:
    """Give all ranks the root's variables of a model that is built, in the running call. Collective."""
    replicas.synchronize(model)
    call = running.call()
    if call is not None and call.kind == "fit" and current.job().batch == "global" and current.replicas() > 1:
        losses.find_sums(model, call.adapter)
        mixed_samples.check(model, call.adapter)
