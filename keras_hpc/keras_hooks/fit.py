# SPDX-License-Identifier: Apache-2.0
"""What happens from `fit` to its last callback, and in `evaluate`, `predict`, `train_on_batch` and `test_on_batch`.

The only file that changes Keras' trainer, its iterator over data and its list of callbacks. The story of a `fit`:

1. `fit` drops the callbacks that only the first rank runs (`root_only`).
2. Keras opens the data: an `EpochIterator` gets this rank's part (`data.sharding`).
3. Keras makes the step function (`step_functions`): it counts its samples, and starts reductions early on PyTorch.
4. `on_train_begin`: a `Checkpoint` finds where to go on, callbacks restore what they have saved; ranks agree on the
   epoch and on whether a callback may end training after any batch, and start with equal replicas (`replicas`).
5. The first step makes equal what only a step builds. Each step reduces in `Optimizer.apply` (`optimizer`).
6. The logs of an epoch are those of all ranks (`metrics`); validation is an `evaluate`.
7. `on_epoch_end`: ranks compare weights and agree to stop; a `Checkpoint` saves. Then all is made equal (`settling`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current, meter, resources
from keras_hpc.keras_hooks import (
    batch_logs,
    building,
    failed_calls,
    fit_arguments,
    keras_private,
    losses,
    metrics,
    parts,
    root_only,
    running,
    step_functions,
    stopping,
)
from keras_hpc.keras_hooks.checkpoint.session import Session
from keras_hpc.keras_hooks.data import predicting, sharding
from keras_hpc.keras_hooks.schedules import local_steps
from keras_hpc.keras_hooks.sharded import whole
from keras_hpc.keras_hooks.state import replicas, seeds, settling
from keras_hpc.keras_hooks.virtual import guards

Method = Callable[..., Any]


def install(job: Any, patcher: Any) -> None:
    """Hooks the backend's trainer, the iterator over data and the list of callbacks."""
    trainer = keras_private.backend_trainer()
    base = keras_private.get(keras_private.TRAINER)
    iterator = keras_private.get(keras_private.EPOCH_ITERATOR)
    callbacks = keras.callbacks.CallbackList
    patcher.patch(trainer, "fit", _fit)
    patcher.patch(trainer, "evaluate", _evaluate)
    patcher.patch(trainer, "predict", _predict)
    patcher.patch(trainer, "train_on_batch", _train_on_batch)
    patcher.patch(trainer, "test_on_batch", _test_on_batch)
    patcher.patch(trainer, "make_train_function", functools.partial(step_functions.make_function, "train"))
    patcher.patch(trainer, "make_test_function", functools.partial(step_functions.make_function, "test"))
    patcher.patch(base, "_get_metrics_result_or_logs", _epoch_logs)
    patcher.patch(iterator, "__init__", _open_data)
    patcher.patch(iterator, "_enumerate_iterator", _steps_of_epoch)
    if job.virtual is not None and keras.backend.backend() == "torch":  # others hand the iterator to the step
        patcher.patch(iterator, "__next__", guards.batches_of_step)
    patcher.patch(callbacks, "on_train_begin", _on_train_begin)
    patcher.patch(callbacks, "on_epoch_begin", _on_epoch_begin)
    patcher.patch(callbacks, "on_train_batch_begin", _on_train_batch_begin)
    patcher.patch(callbacks, "on_train_batch_end", _on_train_batch_end)
    patcher.patch(callbacks, "on_epoch_end", _on_epoch_end)
    if keras.backend.backend() == "tensorflow":
        patcher.patch(base, "_resolve_auto_jit_compile", step_functions.without_xla)


def uninstall(job: Any) -> None:
    """Lets models make their steps anew, as the user compiled them: those that they hold would communicate."""
    for model, state in job.known.models():
        if state.jit_compile is not None:
            model.jit_compile = state.jit_compile
        for kind in state.step_modes:
            setattr(model, f"{kind}_function", None)
        if state.early_start is not None:
            state.early_start.remove()


# ---- fit, evaluate, predict


def _fit(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        resources.give_back()
        bound = signature.bind(self, *args, **kwargs)
        given = root_only.flat(bound.arguments.get("callbacks"))
        session = None if current.is_local() else Session.of(self, given)
        call = running.Call(
            "fit",
            self,
            current.active(),
            settles=any(map(root_only.saves, given)),
            initial_epoch=bound.arguments.get("initial_epoch", 0),
            epochs=bound.arguments.get("epochs", 1),
            session=session,
        )
        with failed_calls.running_call(call):
            if call.active:
                guards.forget()
                local_steps.check_callbacks(call, given)
                whole.check_callbacks(given)
                root_only.drop(self, bound.arguments)
                failed_calls.agree_on_names(current.team_of(self))
                fit_arguments.check(self, bound.arguments)
            with session or contextlib.nullcontext():
                try:
                    result = original(*bound.args, **bound.kwargs)
                finally:
                    if session is not None:
                        self._initial_epoch = None  # of this `fit`, not of the next
            if call.active:
                settling.settle(self)
                root_only.share_best(current.team_of(self), given)
                seeds.agree(current.team_of(self), "Model.fit()")
            return result

    return fit


def _evaluate(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = running.call()
        validates = outer is not None and outer.kind == "fit" and outer.model is self
        call = running.Call("evaluate", self, current.active())
        with failed_calls.running_call(call):
            if not call.active:
                return original(self, *args, **kwargs)
            bound = signature.bind(self, *args, **kwargs)
            root_only.drop(self, bound.arguments)
            if bound.arguments.get("kwargs", {}).get("_use_cached_eval_dataset"):
                call.adapter = self._eval_epoch_iterator.data_adapter
            settling.settle(self)
            replicas.average_statistics(self)
            if not validates:
                guards.forget()
                replicas.agree(self, "evaluate")
            result = original(*bound.args, **bound.kwargs)
            if not validates:
                seeds.agree(current.team_of(self), "Model.evaluate()")
            return result

    return evaluate


def _predict(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with failed_calls.running_call(running.Call("predict", self, current.active())):
            if not current.active():
                return original(self, *args, **kwargs)
            bound = signature.bind(self, *args, **kwargs)
            root_only.drop(self, bound.arguments)
            settling.settle(self)
            replicas.average_statistics(self)
            replicas.agree(self, "predict")
            result = predicting.predict(original, self, bound.arguments)
            seeds.agree(current.team_of(self), "Model.predict()")
            return result

    return predict


def _train_on_batch(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with running.running_call(running.Call("train_on_batch", self, current.active())):
            if not current.active():
                return original(self, *args, **kwargs)
            guards.refuse_batches("train_on_batch")
            # compile(), load_weights() and broadcast() make it so, on all ranks: to ask each time would make ranks wait
            # for each other at the beginning of every step, and undo what pipelined teams gain.
            if self.train_function is None or not replicas.was_synchronized(self):
                # Where one rank has done it alone, it waits here in vain: the report of it says what for.
                current.team_of(self).meet("Model.train_on_batch() after compile() or load_weights()")
                building.build(self, building.batch_of(signature.bind(self, *args, **kwargs)))
                if not replicas.was_synchronized(self):
                    local_steps.forget_period(self)
                replicas.synchronize(self)
            parts.check_same_samples(self, building.batch_of(signature.bind(self, *args, **kwargs)))
            result = original(self, *args, **kwargs)
            replicas.average_after_step(self)
            replicas.after_batch(self)
            return result

    return train_on_batch


def _test_on_batch(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def test_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with running.running_call(running.Call("test_on_batch", self, current.active())):
            if current.active():
                guards.refuse_batches("test_on_batch")
                parts.check_same_samples(self, building.batch_of(signature.bind(self, *args, **kwargs)))
            return original(self, *args, **kwargs)

    return test_on_batch


def _epoch_logs(original: Method) -> Method:
    @functools.wraps(original)
    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        call = running.call()
        if not current.active() or (call is not None and call.own_data):
            return original(self, logs)
        replicas.average_statistics(self)
        return metrics.reduce_logs(self, logs, original)

    return _get_metrics_result_or_logs


# ---- data


def _open_data(original: Method) -> Method:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        call = running.call()
        job = current.job()
        if call is not None and not current.is_local() and call.kind in ("fit", "evaluate"):
            team = current.team_of(call.model)
            shard = sharding.adapter_for if job.shard else sharding.check_steps
            adapter = shard(job, team, call, bound.arguments)
            if job.group is not None:
                parts.check_same_samples(call.model, sharding.first_samples(bound.arguments, adapter))
            if adapter is not None:
                bound.arguments.update(dict.fromkeys(("y", "sample_weight", "class_weight", "batch_size")))
                bound.arguments.update(x=adapter, shuffle=False)
        original(*bound.args, **bound.kwargs)
        if call is not None and call.adapter is None:  # `fit` opens its own data first, then those of its validation
            call.adapter = self.data_adapter
            if call.session is not None:
                call.session.iterator = self

    return __init__


def _steps_of_epoch(original: Method) -> Method:
    @functools.wraps(original)
    def _enumerate_iterator(self: Any) -> Iterator[Any]:
        call = running.call()
        session = None if call is None else call.session
        steps: Iterator[Any] = original(self)
        return steps if session is None else session.steps_of(self, steps)

    return _enumerate_iterator


# ---- callbacks


def _fit_of(callbacks: Any) -> running.Call | None:
    """Return the running `fit` that these callbacks belong to."""
    call = running.call()
    # Not `callbacks.model`: on JAX that would fetch all values.
    return call if call is not None and call.kind == "fit" and callbacks._model is call.model else None


def _on_train_begin(original: Method) -> Method:
    @functools.wraps(original)
    def on_train_begin(self: Any, logs: Any = None) -> None:
        call = _fit_of(self)
        if call is None:
            original(self, logs)
            return
        if call.active:
            Session.check_everywhere(current.team_of(call.model), call.session)
        if call.session is not None:
            call.session.begin(self)
        original(self, logs)
        if call.active:
            _begin_together(call, self)
        if call.session is not None:
            call.session.restore(self)

    return on_train_begin


def _begin_together(call: running.Call, callbacks: Any) -> None:
    """Agree on what follows, and start with equal replicas. Collective."""
    model, team = call.model, current.team_of(call.model)
    losses.check_exact(model)
    steps = callbacks.params.get("steps")
    # A callback may have restored weights and the epoch to go on with, on the root alone.
    epoch = -1 if model._initial_epoch is None or team.rank > 0 else model._initial_epoch
    message = np.array(
        [
            not building.is_built(model),
            any(map(root_only.may_stop, callbacks.callbacks)),
            epoch,
            not replicas.was_synchronized(model),
            replicas.has_waiting_gradients(model),
            batch_logs.anyone_looks(callbacks.callbacks),
        ],
        np.int64,
    )
    team.allreduce(message, op="max")
    end_period = local_steps.forget_period if message[3] else settling.settle
    end_period(model)  # a loop of the user's own may have left it apart, and somebody may have loaded weights since
    if message[4]:
        replicas.average_waiting_gradients(model)
    call.agree_each_batch, call.merges_logs = bool(message[1]), bool(message[5])
    model._initial_epoch = None if message[2] < 0 else int(message[2])
    left = call.epochs - max(model._initial_epoch or 0, call.initial_epoch)
    settling.plan_schedule(model, None if steps is None else steps * max(left, 0))
    if message[0]:  # the first step builds the rest, and then all is made equal
        current.job().known.model(model).synchronized = None
        if keras.backend.backend() == "torch" and not replicas.differ_in_kind(model):
            replicas.synchronize(model)
    else:
        step_functions.synchronize(model)


def _on_epoch_begin(original: Method) -> Method:
    @functools.wraps(original)
    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        original(self, epoch, logs)
        call = _fit_of(self)
        if call is not None and call.active:
            stopping.agree(call)  # Keras ends after the next batch, which callbacks need not look at

    return on_epoch_begin


def _on_train_batch_begin(original: Method) -> Method:
    @functools.wraps(original)
    def on_train_batch_begin(self: Any, batch: int, logs: Any = None) -> None:
        original(self, batch, logs)
        call = _fit_of(self)
        if call is not None and call.active:
            metrics.separate(call.model)  # a callback may have evaluated

    return on_train_batch_begin


def _on_train_batch_end(original: Method) -> Method:
    @functools.wraps(original)
    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        call = _fit_of(self)
        original(self, batch, logs if call is None else batch_logs.of_all_ranks(call, logs))
        if call is None:
            return
        if call.active and call.agree_each_batch and stopping.is_time_to_agree(call, batch):
            stopping.agree(call)
        if call.session is not None:
            call.session.after_batch(self, batch)

    return on_train_batch_end


def _on_epoch_end(original: Method) -> Method:
    @functools.wraps(original)
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        call = _fit_of(self)
        if call is not None and call.active and (call.settles or epoch + 1 >= call.epochs):
            settling.settle(call.model)
        saves = call is not None and call.active and call.settles
        # What saves may run on one rank alone.
        with whole.gathered(call.model) if call is not None and saves else contextlib.nullcontext():
            original(self, epoch, logs)
        if call is None:
            return
        if call.active:
            meter.after_step()  # JAX may have been ahead of its steps
            stopping.agree(call)
            if call.model.stop_training:
                settling.settle(call.model)
            replicas.warn_if_apart(call.model, f" after epoch {epoch + 1}")
            sharding.after_epoch(call)
        if call.session is not None:
            call.session.after_epoch(self, epoch)

    return on_epoch_end
