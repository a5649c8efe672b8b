# SPDX-License-Identifier: Apache-2.0
"""Makes metrics that get one number for a batch, instead of one for each sample, count it as one rank would.

A `keras.metrics.Mean` of such numbers is a mean over steps. Where the number is a mean over samples, each rank adds its
part n_r / sum(n_r) of a step; a sum over samples counts whole. A `keras.metrics.Sum` of them adds up sums over samples,
and of means each rank adds its part.

Which it is, nobody says. A function that is given as a metric is asked (pair_losses.py). With `init(batch="global")` a
`train_step` or `test_step` of the user's own is tried (own_steps.py, test_steps.py), and what its metrics have counted
says it (metric_kinds.py). Else numbers in a `Mean` are taken as means, and those in a `Sum` as sums.

The loss of each of several outputs is logged as a mean over samples, or, where TensorFlow does not know the batch size
when it traces, over steps; then each rank adds its part of a step, too.

A function that gives a number for each output, as a correlation over axis 0, counts by their mean, one number. One that
gives a number for each sample is asked whether other samples have a part in it, and named then.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import keras

from keras_hpc.job import current, log
from keras_hpc.keras_hooks import losses, running
from keras_hpc.keras_hooks.trials import pair_losses
from keras_hpc.keras_hooks.trials.metric_kinds import MEAN, SUM, UNKNOWN, kinds


class _Asked(threading.local):
    metric: Any = None  # the function that is being computed as a metric, with its arguments


_asked = _Asked()
_known: weakref.WeakSet[Any] = weakref.WeakSet()  # metrics that were asked whether they compare samples


def install(job: Any, patcher: Any) -> None:
    """Hooks the metrics of Keras that are given numbers."""

    def divide_step(original: Any) -> Any:
        @functools.wraps(original)
        def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
            step = running.step()
            if sample_weight is None and losses.weighs_numbers(step) and _is_of_batch(self, values):
                values = keras.ops.mean(values)
            # Of one rank TensorFlow may know the batch size when it traces, of another not: all batches of the one are
            # equal, by chance. They must do the same; where all global batches are equal, it comes to the same.
            wanted = sample_weight is None or _is_tracing_tensorflow()
            if wanted and losses.exchanges(step) and any(metric is self for metric in _output_losses(step)):
                sample_weight = losses.part_of(step)
            elif sample_weight is None and _is_number(values) and losses.weighs_numbers(step):
                sample_weight = losses.part_of(step)
                if _kind(self) == SUM:
                    values = keras.ops.divide_no_nan(keras.ops.cast(values, "float32"), sample_weight)
            return original(self, values, sample_weight=sample_weight)

        return update_state

    def add_part(original: Any) -> Any:
        @functools.wraps(original)
        def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
            step = running.step()
            if sample_weight is None and _is_number(values) and losses.weighs_numbers(step) and _kind(self) == MEAN:
                values = keras.ops.cast(values, "float32") * losses.part_of(step)
            return original(self, values, sample_weight=sample_weight)

        return update_state

    def remember(original: Any) -> Any:
        @functools.wraps(original)
        def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            before, _asked.metric = _asked.metric, (self, y_true, y_pred)
            try:
                if losses.weighs_numbers(running.step()) and running.trial() is None:
                    _name_if_it_compares(self, y_true, y_pred)
                return original(self, y_true, y_pred, sample_weight=sample_weight)
            finally:
                _asked.metric = before

        return update_state

    patcher.patch(keras.metrics.MeanMetricWrapper, "update_state", remember)
    patcher.patch(keras.metrics.Mean, "update_state", divide_step)
    patcher.patch(keras.metrics.Sum, "update_state", add_part)


def _kind(metric: Any) -> int:
    """Return what the numbers of a metric are, as far as it is known. A function is asked once."""
    if running.trial() is not None:
        return UNKNOWN
    if metric not in kinds and _asked.metric is not None and _asked.metric[0] is metric:
        kinds[metric] = _ask(*_asked.metric)
    return kinds.get(metric, UNKNOWN)


def _is_of_batch(metric: Any, values: Any) -> bool:
    """Return whether these are numbers of a whole batch, as one for each output."""
    if _is_number(values) or _asked.metric is None or _asked.metric[0] is not metric or running.trial() is not None:
        return False
    return pair_losses.is_of_batch(*_asked.metric)


def _ask(metric: Any, y_true: Any, y_pred: Any) -> int:
    function = functools.partial(metric._fn, **metric._fn_kwargs)
    answer = pair_losses.ask_number(function, metric.dtype, y_true, y_pred)
    if answer.is_neither and current.job().shares_samples and current.job().rank == 0:
        log.warning(
            f"The metric `{metric.name}` is one number for a whole batch, and neither a mean nor a sum over samples, "
            "as a ratio of sums or the root of a mean. Each rank has a part of the batch, so its value is not that of "
            "one rank. Let it return a number for each sample, of shape (batch,), or derive it from "
            "keras.metrics.Metric and let it keep the sums"
        )
    return SUM if answer.is_sum else UNKNOWN


def _name_if_it_compares(metric: Any, y_true: Any, y_pred: Any) -> None:
    """Warn once of a function of the user's own that compares the samples of a batch, of which a rank has a part."""
    given = getattr(metric, "_fn_kwargs", {})
    if metric in _known or not current.job().shares_samples or str(metric._fn.__module__).startswith("keras."):
        return
    _known.add(metric)
    function = functools.partial(metric._fn, **given)
    if pair_losses.depends_on_others(function, metric.dtype, y_true, y_pred) and current.job().rank == 0:
        log.warning(
            f"The metric `{metric.name}` gives a sample another number beside other samples. So it compares the "
            "samples of a batch, of which each rank has a part, and its value is not that of one rank. Let it return a "
            "number for each sample that depends on this sample alone, or derive it from keras.metrics.Metric and let "
            "it keep the sums"
        )


def _is_tracing_tensorflow() -> bool:
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return not tf.executing_eagerly()


def _is_number(values: Any) -> bool:
    shape = getattr(values, "shape", ())
    return getattr(shape, "rank", 0) is not None and len(shape) == 0


def _output_losses(step: running.Step) -> list[Any]:
    loss = getattr(step.model, "_compile_loss", None)
    return [] if loss is None else list(loss.metrics)
