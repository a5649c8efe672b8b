# SPDX-License-Identifier: Apache-2.0
"""Makes losses of several ranks add up to the loss of one rank on the same global batch.

Gradients are weighted by samples, so a loss that is a mean over samples needs nothing. Other losses divide a sum S by
something else: by nothing (`"sum"`), the sum d of sample weights (`"mean_with_sample_weight"`) or the number d of
unmasked values. One rank would compute sum(S_r) / sum(d_r); rank r has S_r / d_r and weighs n_r / sum(n_r). So its loss
is multiplied by (d_r / sum(d_r)) (sum(n_r) / n_r), without the d for `"sum"`. That costs an exchange of two numbers, in
these cases only.

A function that returns one number for a whole batch does not say whether that is a mean or a sum. With
`init(batch="global")` it is asked, unless one group computes all samples: of the same samples twice a mean stays and a
sum doubles; anything else is no loss that several ranks could add up, and refused. What `add_loss` got is asked in the
same way, once, before training, and one that returns a loss for each sample in pair_losses.py.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any, TypeGuard

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec
from keras_hpc.keras_hooks import float8, keras_private, part_losses, running
from keras_hpc.keras_hooks.state import normalization, variables
from keras_hpc.keras_hooks.trials import own_steps, pair_losses, unchanged

_TOLERANCE = 0.02  # of a ratio that is 1 or 2 but for rounding
_NOISY = 0.3  # where layers draw random numbers
_ASKED_ROWS = 8


def install(job: Any, patcher: Any) -> None:
    """Hooks the one function in which Keras reduces losses."""

    def weigh(original: Any) -> Any:
        @functools.wraps(original)
        def reduce_weighted_values(
            values: Any,
            sample_weight: Any = None,
            mask: Any = None,
            reduction: Any = "sum_over_batch_size",
            dtype: Any = None,
        ) -> Any:
            loss = original(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
            asked.reduced = True
            step, share = running.step(), part_losses.share_of_loss(values, reduction)
            if not exchanges(step):
                if share is None:
                    return loss
                if _divisor(loss.dtype, sample_weight, mask, reduction) is not None:
                    raise ValueError(
                        "In test_on_batch a loss of outputs in parts is a mean over positions. Received: "
                        f"reduction={reduction!r}, or a mask"
                    )
                return loss * share
            is_number = len(getattr(values, "shape", ())) == 0  # a function may return a plain number
            if is_number and asked.loss is None:
                return loss
            if is_number or (asked.loss is not None and pair_losses.is_of_batch(*asked.loss)):
                pair_losses.check_number(*asked.loss)
                return scaled_if_sum(step, loss, loss if is_number else keras.ops.mean(values), *asked.loss)
            if asked.loss is not None:
                pair_losses.check(*asked.loss)
            divisor = _divisor(loss.dtype, sample_weight, mask, reduction)
            if divisor is None:
                return loss if share is None else loss * share
            # One weight for all positions of a sample counts once, whatever number of parts has it; a mask is cut.
            weighted = reduction == "mean_with_sample_weight" and sample_weight is not None and mask is None
            repeats = part_losses.repeats_of_weights(reduction) if weighted else 1
            return loss * keras.ops.cast(_share(step, divisor), loss.dtype) * repeats

        return reduce_weighted_values

    def remember(original: Any) -> Any:
        @functools.wraps(original)
        def __call__(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            before, asked.loss = asked.loss, (self, y_true, y_pred) if job.shares_samples else None
            try:
                return original(self, y_true, y_pred, sample_weight=sample_weight)
            finally:
                asked.loss = before

        return __call__

    def add_up(original: Any) -> Any:
        @functools.wraps(original)
        def _aggregate_additional_loss(self: Any, loss: Any) -> Any:
            total = original(self, loss)
            step = running.step()
            if not exchanges(step):
                return total
            number = step.next_use("additional losses")
            sums = current.job().known.model(self).added_sums
            if len(loss.shape) == 0 and number not in sums:
                return total
            return total * keras.ops.cast(_share(step, 1.0), total.dtype)  # losses of samples, added up

        return _aggregate_additional_loss

    for name in (keras_private.OPTIMIZER, keras_private.LOSS_SCALE_OPTIMIZER):
        patcher.patch(keras_private.get(name), "scale_loss", _taking_part)
    trainer = keras_private.get(keras_private.TRAINER)
    patcher.patch(trainer, "_aggregate_additional_loss", add_up)
    patcher.patch(keras.losses.Loss, "__call__", remember)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        patcher.patch(tf.GradientTape, "gradient", _scaling_vectors)
    patcher.patch(keras_private.module(keras_private.LOSSES), "reduce_weighted_values", weigh)


def _taking_part(original: Any) -> Any:
    """Let gradients be those of this rank's part of one rank's loss, where float8 layers look at how large they are."""

    @functools.wraps(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        scaled = original(self, loss)
        step = running.step()
        if not weighs_numbers(step) or step.share is not None:
            return scaled
        if not float8.overwriting(step.model.trainable_variables):
            return scaled
        step.share = part_of(step)
        return scaled * keras.ops.cast(step.share, scaled.dtype)

    return scale_loss


def weighs_numbers(step: running.Step | None) -> TypeGuard[running.Step]:
    """Return whether numbers that a step gives to a metric count by this rank's part of its samples."""
    # An exchange would be waited for, what pipelined steps never do.
    return exchanges(step) and (step.twin or current.team_of(step.model).schedule.kind == "synchronous")


def meet(step: running.Step) -> None:
    """Let ranks learn how many samples a step of the user's own has, before it does what it may do on some ranks only.

    Args:
        step: the step that begins.
    """
    if weighs_numbers(step):
        part_of(step)


class _Asked(threading.local):
    loss: Any = None  # the loss that is being computed, with its arguments; None: nobody needs to know
    reduced: bool = False  # Keras has reduced a loss since this was false (`loss_calls`)


asked = _Asked()


def scaled_if_sum(step: running.Step, value: Any, mean: Any, loss: Any, *given: Any, function: Any = None) -> Any:
    """Return the loss of a batch, multiplied so that sums of several ranks add up if it is a sum over samples.

    `mean`: of the numbers that the loss has given, or its only one. `given`: its targets and predictions.
    `function`: what the loss computes of them as they are, where it is not its `call`.
    """
    dtype = loss.dtype if function is None else None
    twice = keras.tree.map_structure(
        lambda x: keras.ops.concatenate([keras.ops.convert_to_tensor(x, dtype=dtype)] * 2), given
    )
    with unchanged.loss(loss):
        found = (function or loss.call)(*twice)
        doubled = keras.ops.stop_gradient(keras.ops.mean(keras.ops.cast(found, value.dtype)))
    own = keras.ops.stop_gradient(keras.ops.cast(mean, value.dtype))
    ratio = keras.ops.where(own == 0, 1.0, doubled / keras.ops.where(own == 0, 1.0, own))
    ratio = keras.ops.where(keras.ops.cast(step.count, "float32") > 0, ratio, 1.0)
    backends.current().check_when_run(functools.partial(_check_ratio, f"The loss `{loss.name}`"), ratio)
    return value * keras.ops.where(ratio > 1.5, keras.ops.cast(_share(step, 1.0), value.dtype), 1.0)


def _check_ratio(what: str, ratio: Any) -> None:
    if np.isfinite(ratio) and abs(ratio - 1) > _TOLERANCE and abs(ratio - 2) > _TOLERANCE:
        raise ValueError(
            f"{what} is neither a mean nor a sum over samples, so ranks cannot compute what one rank computes. With "
            'init(batch="global"), return a loss for each sample, of shape (batch,), or use batch="local". Received: '
            f"a loss that is {float(ratio):.3g} times as large for the same samples twice"
        )


def find_sums(model: Any, adapter: Any) -> None:
    """Find out which of the numbers that layers give to `add_loss` are sums over samples. Without communication.

    Keras takes those of an `activity_regularizer`, divided by the number of samples, in the same way.

    Args:
        model: a model that is built.
        adapter: of its data.

    Raises:
        ValueError: a number is neither a sum nor a mean, or nobody can know, as the model has no known inputs.
    """
    state = current.job().known.model(model)
    state.added_sums = set()
    if not any(map(_adds_own_loss, model._flatten_layers())):
        return
    rows = adapter.rows(_ASKED_ROWS) if hasattr(adapter, "rows") else None
    if rows is None:
        current.notice(
            f"model `{model.name}`: what its layers give to add_loss() is taken as means over samples, unless it is a "
            "loss for each sample"
        )
        return
    half = len(keras.tree.flatten(rows)[0]) // 2
    noisy = bool(variables.seed_generators(model))
    # Batches that are normalized have other values in halves, whatever the loss.
    halved = half and not noisy and not any(map(normalization.is_normalization, model._flatten_layers()))
    parts: list[Any] = [slice(2 * half)] if halved else []
    for width in sorted({half, 1, 2}) if halved else ():  # several, as two halves may be alike by chance
        if half % width == 0:
            first = np.arange(2 * half) // width % 2 == 0
            parts += [np.flatnonzero(first), np.flatnonzero(~first)]
    batches = [rows, keras.tree.map_structure(lambda a: np.concatenate([a, a]), rows)]
    batches += [keras.tree.map_structure(lambda a: a[part], rows) for part in parts]  # noqa: B023
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()}
    what = f"What a layer of model `{model.name}`, or its activity_regularizer, gives to add_loss()"
    try:
        added = [_added(model, x) for x in batches]
    except Exception:  # whatever call() raises; raised again, unless the step is the user's own
        if own_steps.is_keras_own(model):
            raise
        return  # which may call nothing with such samples, as a VQ-VAE around another model, and is tried as a whole
    for number, losses in enumerate(zip(*added, strict=True)):
        if len(losses[0].shape) > 0:
            continue
        once, twice, *others = (float(backends.current().to_numpy(loss)) for loss in losses)
        if once == 0:
            continue
        ratio = twice / once
        tolerance = _NOISY if noisy else _TOLERANCE
        if abs(ratio - 1) > tolerance and abs(ratio - 2) > tolerance:
            _check_ratio(what, ratio)
        if others and np.isfinite(others).all():
            whole, *halves = others
            for pair in zip(halves[::2], halves[1::2], strict=True):
                if not pair_losses.adds_up(whole, list(pair), dtypes):
                    refused = pair_losses.REFUSED.format(what=what, whole=whole, halves=list(pair), of="samples")
                    raise ValueError(refused)
        if ratio > 1.5:
            state.added_sums.add(number)


def _adds_own_loss(layer: Any) -> bool:
    """Return whether a layer adds a loss of which one cannot know that it is a mean over samples."""
    regularizer = getattr(layer, "activity_regularizer", None)
    is_own = regularizer is not None and not type(regularizer).__module__.startswith("keras.")
    return is_own or "add_loss" in keras_private.names_in_own(type(layer))


def _added(model: Any, x: Any) -> list[Any]:
    """Return what the layers of a model give to `add_loss` for a batch in training."""
    options = {"training": True} if "training" in inspect.signature(model.call).parameters else {}
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    # Tensors, as a step gives: `outputs - x` needs it.
    given = keras.tree.map_structure(lambda a: keras.ops.convert_to_tensor(a) if isinstance(a, np.ndarray) else a, x)
    with current.unhooked():
        *_, losses = model.stateless_call(*values, given, return_losses=True, **options)
    return list(losses)


def _scaling_vectors(original: Any) -> Any:
    """The gradient of a loss with axes is that of its sum; so ranks must add up, and not average."""

    @functools.wraps(original)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, target, sources, *args, **kwargs)
        step = running.step()
        axes = getattr(getattr(target, "shape", None), "rank", 0)
        if not axes or not exchanges(step) or not all(map(_is_variable, keras.tree.flatten(sources))):
            return found
        share = _share(step, 1.0)
        return keras.tree.map_structure(lambda g: None if g is None else _scaled(g, share), found)

    return gradient


def _scaled(gradient: Any, share: Any) -> Any:
    """Return a gradient times a number. One of rows stays one: optimizers do something else with a dense one."""
    share = keras.ops.cast(share, gradient.dtype)
    if not hasattr(gradient, "indices"):
        return gradient * share
    return type(gradient)(gradient.values * share, gradient.indices, gradient.dense_shape)


def _is_variable(source: Any) -> bool:
    return hasattr(source, "assign")


def check_exact(model: Any) -> None:
    """Refuses, or mentions, what several ranks cannot compute as one rank would.

    Raises:
        ValueError: with `batch="global"`, which promises the result of one rank.
    """
    inexact = []
    if not keras_private.activity_loss_is_per_sample():
        inexact = [
            f"layer `{layer.name}` has an `activity_regularizer`, which Keras {keras.__version__} sums over the batch"
            for layer in model._flatten_layers()
            if getattr(layer, "activity_regularizer", None) is not None
        ]
    if inexact and current.job().batch == "global":
        raise ValueError(
            'With keras_hpc.init(batch="global"), ranks compute what one rank computes on the same batch. That is not '
            f'possible for this model; use other layers, or batch="local". Received: {"; ".join(inexact)}'
        )
    for text in inexact:
        current.notice(f"results depend on the number of ranks: {text}")


def exchanges(step: running.Step | None) -> TypeGuard[running.Step]:
    """Return whether ranks may exchange numbers in a step."""
    if step is None or not step.in_lockstep or step.count is None:
        return False
    return step.twin or current.active()


def part_of(step: running.Step) -> Any:
    """Return `n_r / sum(n_r)`, exchanged once a step."""
    count = keras.ops.cast(step.count, "float32")
    if step.total is None:
        (step.total,) = _sum(step, keras.ops.reshape(count, (1,)))
    return keras.ops.divide_no_nan(count, step.total[0])


def _sum(step: running.Step, numbers: Any) -> list[Any]:
    """Return the sum of a few numbers over all ranks."""
    if step.twin:
        return [2.0 * numbers]
    specs = [TensorSpec("counts", tuple(numbers.shape), "float32")]
    plan = current.team_of(step.model).plan(
        f"{step.key}/loss{step.next_use('losses')}", specs, op="sum", weighted=False
    )
    return list(backends.current().reduce(plan, [keras.ops.stop_gradient(numbers)]))


def _divisor(dtype: Any, sample_weight: Any, mask: Any, reduction: Any) -> Any:
    """Return what Keras divided this rank's sum of losses by; 1.0 if by nothing, None if by the number of values."""
    if reduction == "sum":
        return 1.0
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        if sample_weight is not None:  # a copy: on PyTorch Keras multiplies it by the mask in place
            sample_weight = keras.ops.copy(keras.ops.convert_to_tensor(sample_weight, dtype=dtype))
        if mask is not None:
            mask = keras.ops.convert_to_tensor(mask, dtype=dtype)
        apply_mask = keras_private.get(keras_private.APPLY_MASK)
        return keras.ops.sum(apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction))
    if reduction in ("sum_over_batch_size", "mean") and mask is not None:
        return keras.ops.sum(keras.ops.cast(mask, "float32"))
    return None


def _share(step: running.Step, divisor: Any) -> Any:
    """Return `(d_r / sum(d_r)) (sum(n_r) / n_r)`; 1 on a rank without samples."""
    count = keras.ops.cast(step.count, "float32")
    if step.offset is not None:
        return _share_of_part(step, count, divisor)
    divided = isinstance(divisor, float)  # then the sums stay sums
    if not divided:
        step.next_use("divisors")
    has_samples = count > 0
    mine = keras.ops.cast(keras.ops.where(has_samples, divisor, 0.0), "float32")  # last: a floatx of 64 bits wins
    (total,) = _sum(step, keras.ops.stack([count, mine]))
    # Of sums of outputs that several ranks have alike, each has the same.
    of_divisor = (
        1.0 / part_losses.copies_of_loss(current.team_of(step.model))
        if divided
        else keras.ops.divide_no_nan(mine, total[1])
    )
    return keras.ops.where(has_samples, of_divisor * keras.ops.divide_no_nan(total[0], count), 1.0)


def _share_of_part(step: running.Step, count: Any, divisor: Any) -> Any:
    """Return the same for a virtual rank, which knows how many samples all have, and nothing else of the others."""
    if not isinstance(divisor, float):
        raise ValueError(
            "With init(virtual_ranks=) losses are means or sums over samples so far. Received: a loss that is divided "
            'by the sum of sample weights ("mean_with_sample_weight") or by the number of values that a mask leaves'
        )
    return keras.ops.where(count > 0, keras.ops.divide_no_nan(step.total[0], count), 1.0)
