# SPDX-License-Identifier: Apache-2.0
"""Hooks of `fit`, `evaluate`, `predict` and `train_on_batch`: equal replicas before the first step, counted steps."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current, meter, resources, trace
from keras_hpc.keras_hooks import callbacks, delayed, early_start, keras_private, replicas, scope, state, step

Method = Callable[..., Any]

# How the step functions that a model holds were made: {"train": (active, together, guard), "test": ...}.
_modes: weakref.WeakKeyDictionary[Any, dict[str, tuple[bool, bool, bool]]] = weakref.WeakKeyDictionary()


def install(job: Any, patcher: Any) -> None:
    """Hooks the backend's trainer."""
    trainer = keras_private.backend_trainer()
    base = keras_private.get("keras.src.trainers.trainer:Trainer")
    patcher.patch(keras_private.get("keras.src.trainers.epoch_iterator:EpochIterator"), "__init__", _noticing_adapter)
    patcher.patch(trainer, "fit", _fitting)
    patcher.patch(trainer, "evaluate", _quiet)
    patcher.patch(trainer, "predict", _quiet)
    patcher.patch(trainer, "train_on_batch", _training_on_batch)
    patcher.patch(trainer, "test_on_batch", _testing_on_batch)
    patcher.patch(trainer, "make_train_function", functools.partial(_counting, "train"))
    patcher.patch(trainer, "make_test_function", functools.partial(_counting, "test"))
    if keras.backend.backend() == "tensorflow":
        patcher.patch(base, "_resolve_auto_jit_compile", _without_xla)


def forget() -> None:
    """Lets models make their steps anew: those that they hold would communicate."""
    for model in list(_modes):
        model.train_function = model.test_function = None
    _modes.clear()


def _fitting(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        resources.give_back()
        if not current.active():
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        saves = callbacks.saves(bound.arguments)
        callbacks.only_mine(self, bound.arguments)
        first = bound.arguments.get("initial_epoch", 0)
        with scope.running_fit(scope.Fit(self, saves=saves, initial_epoch=first)):
            result = original(*bound.args, **bound.kwargs)
        delayed.drain(self)
        return result

    return fit


def _quiet(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluate_or_predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not current.active():
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        callbacks.only_mine(self, bound.arguments)
        if not state.was_made_equal(self) and scope.fit() is None and callbacks.is_built(self):
            state.synchronize(self)
        delayed.drain(self)
        state.average_moved(self)
        return original(*bound.args, **bound.kwargs)

    return evaluate_or_predict


def _training_on_batch(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope.set_adapter(None)
        if not current.active():
            return original(self, *args, **kwargs)
        if self.train_function is None or not state.was_made_equal(self):  # compile() and load_weights() make it so
            given = signature.bind(self, *args, **kwargs).arguments
            batch = tuple(given.get(name) for name in ("x", "y", "sample_weight"))
            build(self, keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), batch))
            state.synchronize(self)
        result = original(self, *args, **kwargs)
        state.average_after_step(self)
        return result

    return train_on_batch


def _testing_on_batch(original: Method) -> Method:
    @functools.wraps(original)
    def test_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope.set_adapter(None)
        return original(self, *args, **kwargs)

    return test_on_batch


def _counting(kind: str, original: Method) -> Method:
    """Makes step functions from a step that knows its batch size; makes them anew where the mode has changed."""

    @functools.wraps(original)
    def make_function(self: Any, force: bool = False) -> Any:
        active = current.active()
        adapter = scope.adapter()
        together = active and (kind == "train" or hasattr(adapter, "may_be_empty"))  # which data have that we share out
        mode = (active, together, active and bool(getattr(adapter, "may_be_empty", False)))
        modes = _modes.setdefault(self, {})
        held = getattr(self, f"{kind}_function")
        force = force or (held is not None and modes.get(kind, (False, False, False)) != mode)
        modes[kind] = mode
        if not active:
            return original(self, force=force)
        _refuse_xla(self)
        wrap = functools.partial(step.wrap, self, f"{current.job().known.key_of(self, 'model')}/{kind}")
        if keras.backend.backend() == "torch":  # whose functions look the step up whenever they run
            original(self, force=force)
        else:
            _with_step(self, f"{kind}_step", lambda step: wrap(step, *mode[1:]), lambda: original(self, force=force))
        made = getattr(self, f"{kind}_function")
        if made is not held or force:
            if keras.backend.backend() == "torch":
                made = wrap(early_start.wrap(self, made) if kind == "train" else made, *mode[1:])
            setattr(self, f"{kind}_function", _prepared(self, kind, made))
        return None

    return make_function


def _with_step(model: Any, name: str, wrap: Callable[[Method], Method], work: Callable[[], Any]) -> None:
    """Does `work` while the model's step is wrapped."""
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


def _prepared(model: Any, kind: str, function: Method) -> Method:
    """Returns a step function that builds and synchronizes what is not built before its first step."""
    reference = weakref.ref(model)  # the model holds the function

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        owner: Any = reference()
        if kind == "train":
            state.mark_moved(owner)
        if not state.was_made_equal(owner) and hasattr(args[-1], "element_spec"):
            build(owner, args[-1].element_spec)
            state.synchronize(owner)
        with trace.step(f"{owner.name} {kind}"):
            results = function(*args)
        if kind == "train":
            meter.after_step()
            replicas.after_step(owner, results)
        return results

    return run


def build(model: Any, batch: Any, *, metrics: bool = False) -> None:
    """Builds model and optimizer for a batch of data, or of shapes and dtypes, where Keras can.

    Args:
        model: a compiled model.
        batch: what `fit` trains on.
        metrics: whether the metrics must be built even if all else is; otherwise the first step builds them.
    """

    def symbolic(leaf: Any) -> Any:
        if leaf is None:
            return None
        return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))

    compiled = getattr(model, "_compile_metrics", None)
    if callbacks.is_built(model) and not (metrics and compiled is not None and not compiled.built):
        return
    try:
        model._symbolic_build(data_batch=keras.tree.map_structure(symbolic, batch))
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError):  # whatever a call() may raise
        # A model without call(), as a GAN's with a train_step of its own, is built by its first step. There the funnel
        # makes it equal; what is wrong with a model is raised by that step, too.
        return


def _noticing_adapter(original: Method) -> Method:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        scope.set_adapter(self.data_adapter)

    return __init__


def _without_xla(original: Method) -> Method:
    @functools.wraps(original)
    def _resolve_auto_jit_compile(self: Any) -> Any:
        return False if current.active() else original(self)

    return _resolve_auto_jit_compile


def _refuse_xla(model: Any) -> None:
    """Turns XLA off on TensorFlow, which would have to leave its compiled program at each exchange."""
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        current.notice(f"model `{model.name}`: jit_compile=True is not available on several ranks, using False")
        model.jit_compile = False
