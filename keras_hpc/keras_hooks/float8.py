# SPDX-License-Identifier: Apache-2.0
"""Layers in float8: their scales, and losses that are this rank's part of one rank's.

Keras keeps for each float8 layer the largest values that it has seen, and scales made of them. It hands them to the
optimizer as gradients and stores them as they are. One rank would have the maximum over the ranks' samples. But the
gradient of a mean over a rank's few samples is larger than that of one rank's mean over all. So where a model has such
variables, the loss is multiplied by n_r / sum(n_r) before its gradients are taken (losses.py), and other gradients are
divided by it before they are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras

from keras_hpc.keras_hooks import running


def overwriting(variables: Sequence[Any]) -> set[int]:
    """Return the positions of what Keras overwrites with its gradients."""
    return {i for i, variable in enumerate(variables) if getattr(variable, "overwrite_with_gradient", False)}


def undone(
    gradients: list[Any], extremes: set[int], step: running.Step | None, own: Mapping[int, Any] = MappingProxyType({})
) -> list[Any]:
    """Return gradients as if the loss had not been multiplied; a rank without samples has seen nothing.

    Args:
        gradients: this rank's.
        extremes: the positions of those that overwrite.
        step: the step that computed them; None in a loop of the user's own.
        own: what variables hold that overwriting gradients of this rank alone overwrite; without samples they keep it.
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
                nothing = keras.ops.cast(own[index], gradient.dtype) if index in own else keras.ops.zeros_like(gradient)
                result[index] = keras.ops.where(has_samples, gradient, nothing)
        elif step.share is not None and hasattr(gradient, "dense_shape"):
            values = _divided(gradient.values, step.share)
            result[index] = type(gradient)(values, gradient.indices, gradient.dense_shape)
        elif step.share is not None:
            result[index] = _divided(gradient, step.share)
    return result


def _divided(gradient: Any, share: Any) -> Any:
    return keras.ops.divide_no_nan(gradient, keras.ops.cast(share, gradient.dtype))
