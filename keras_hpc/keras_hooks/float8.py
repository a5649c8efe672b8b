# SPDX-License-Identifier: Apache-2.0
"""Layers in float8: their scales, and losses that are this rank's part of one rank's.

Keras keeps for each float8 layer the largest values that it has seen, and scales made of them. It hands them to the
optimizer as gradients and stores them as they are. One rank would have the maximum over the ranks' samples. But the
gradient of a mean over a rank's few samples is larger than that of one rank's mean over all. So where a model has such
variables, the loss is multiplied by n_r / sum(n_r) before its gradients are taken, and other gradients are divided by
it before they are averaged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_hpc.keras_hooks import keras_private, losses, running


def install(job: Any, patcher: Any) -> None:
    """Hooks where Keras scales a loss before it takes gradients."""
    for name in (keras_private.OPTIMIZER, keras_private.LOSS_SCALE_OPTIMIZER):
        patcher.patch(keras_private.get(name), "scale_loss", _scaling)


def overwriting(variables: Sequence[Any]) -> set[int]:
    """Return the positions of what Keras overwrites with its gradients."""
    return {i for i, variable in enumerate(variables) if getattr(variable, "overwrite_with_gradient", False)}


def undone(gradients: list[Any], extremes: set[int], step: running.Step | None) -> list[Any]:
    """Return gradients as if the loss had not been multiplied; a rank without samples has seen nothing.

    Args:
        gradients: this rank's.
        extremes: the positions of those that overwrite.
        step: the step that computed them; None in a loop of the user's own.
    """
    if step is None or not extremes:
        return gradients
    result = list(gradients)
    for index, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if index in extremes:
            if step.count is not None:
                has_samples = keras.ops.cast(step.count, "int32") > 0
                result[index] = keras.ops.where(has_samples, gradient, keras.ops.zeros_like(gradient))
        elif step.share is not None and hasattr(gradient, "dense_shape"):
            values = _divided(gradient.values, step.share)
            result[index] = type(gradient)(values, gradient.indices, gradient.dense_shape)
        elif step.share is not None:
            result[index] = _divided(gradient, step.share)
    return result


def _divided(gradient: Any, share: Any) -> Any:
    return keras.ops.divide_no_nan(gradient, keras.ops.cast(share, gradient.dtype))


def _scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale_loss(self: Any, loss: Any) -> Any:
        scaled = original(self, loss)
        step = running.step()
        if not losses.weighs_numbers(step) or step.share is not None or not overwriting(step.model.trainable_variables):
            return scaled
        step.share = losses.part_of(step)
        return scaled * keras.ops.cast(step.share, scaled.dtype)

    return scale_loss
