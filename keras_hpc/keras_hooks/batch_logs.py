# SPDX-License-Identifier: Apache-2.0
"""Logs after a batch that a callback of the user's own looks at are those of all ranks, as at the end of an epoch.

So are those of which a `ModelCheckpoint` keeps the best, or by which it names files. Each rank has its own, from its
samples. What a callback makes of them, as a learning rate, would be something else on each rank, whose weights would
then go apart. Where nobody looks at them, nothing is exchanged; else it is also in local steps, which send nothing
themselves. Of virtual ranks a rank has those of its last part: there what ends training at a NaN looks at them, too, to
see it in any part.

Logs after a batch of `evaluate`, and of validation, are so, too.
"""

from __future__ import annotations

import dis
import functools
import inspect
import string
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.callbacks import RootOnly
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, metrics, running

_HOOKS = "on_batch_end", "on_train_batch_end"
_TEST_HOOKS = ("on_test_batch_end",)


def install(job: Any, patcher: Any) -> None:
    """Hooks what the list of callbacks does in `evaluate`; for what it does in `fit` see fit.py."""
    patcher.patch(keras.callbacks.CallbackList, "on_test_begin", _on_test_begin)
    patcher.patch(keras.callbacks.CallbackList, "on_test_batch_end", _on_test_batch_end)


def _on_test_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_test_begin(self: Any, logs: Any = None) -> None:
        original(self, logs)
        call = _evaluate_of(self)
        if call is not None:
            looks = np.array([anyone_looks(self.callbacks, _TEST_HOOKS)], np.int64)
            current.team_of(call.model).allreduce(looks, op="max", what="whether callbacks look at logs")
            call.merges_logs = bool(looks[0])

    return on_test_begin


def _on_test_batch_end(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def on_test_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        call = _evaluate_of(self)
        original(self, batch, logs if call is None else of_all_ranks(call, logs))

    return on_test_batch_end


def _evaluate_of(callbacks: Any) -> running.Call | None:
    """Return the running `evaluate` that these callbacks belong to, if its data are shared out, in as many batches."""
    call = running.call()
    if call is None or call.kind != "evaluate" or not call.active or call.own_data or current.job().virtual is not None:
        return None
    return call if callbacks._model is call.model and hasattr(call.adapter, "may_be_empty") else None


def anyone_looks(callbacks: Sequence[Any], hooks: Sequence[str] = _HOOKS) -> bool:
    """Return whether a callback of the user's own looks at logs after a batch, as far as one can see."""
    return any(_looks(getattr(callback, "callback", callback), hooks) for callback in callbacks)


def _looks(callback: Any, hooks: Sequence[str]) -> bool:
    if hooks is _HOOKS and _keeps_or_ends(callback):
        return True
    ours = type(callback).__module__.startswith(("keras.", "keras_hpc."))
    if isinstance(callback, RootOnly) or (ours and not isinstance(callback, keras.callbacks.LambdaCallback)):
        return False
    is_default = keras_private.get(keras_private.IS_DEFAULT)
    methods = [getattr(callback, name) for name in hooks]
    return any(_reads_last_argument(method) for method in methods if not is_default(method))


def _keeps_or_ends(callback: Any) -> bool:
    """Return whether a callback of Keras decides by logs of training what it keeps, or whether it ends training."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN) and current.job().virtual is not None:
        return True
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
        # By them it decides what to keep, and what the files are called: `{loss:.2f}.keras`.
        fields = {field for _, field, _, _ in string.Formatter().parse(callback.filepath)}
        return bool(callback.save_best_only or fields - {None, "epoch", "batch"})
    return False


def _reads_last_argument(method: Any) -> bool:
    code = getattr(inspect.unwrap(method), "__code__", None)
    if code is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or not code.co_argcount:
        return True  # nobody can see
    name = code.co_varnames[code.co_argcount - 1]
    loaded = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD")]
    return any(name == what or (isinstance(what, tuple) and name in what) for what in loaded)


def of_all_ranks(call: running.Call, logs: Any) -> Any:
    """Return the logs of all ranks after a batch, where somebody looks at them. Collective then.

    Args:
        call: the running `fit` or `evaluate`.
        logs: those of this rank. What its metrics have counted stays its own.
    """
    if not call.active or not call.merges_logs:
        return logs
    model = call.model
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    of_keras = inspect.unwrap(keras_private.get(keras_private.TRAINER)._get_metrics_result_or_logs)
    # Not what is in the metrics' own memory, which gets this rank's numbers again.
    merged = keras.tree.map_structure(metrics.copied, metrics.reduce_logs(model, logs, of_keras))
    metrics.separate(model)
    return merged
