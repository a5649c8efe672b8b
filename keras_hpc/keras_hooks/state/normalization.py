# SPDX-License-Identifier: Apache-2.0
"""Makes `BatchNormalization(synchronized=True)` normalize over the batches of all ranks, on every backend.

Rank r has n_r values of each channel, with mean m_r and variance v_r. Together they have

    mean     = sum n_r m_r / n
    variance = sum n_r (v_r + m_r^2) / n - mean^2

where the means are taken relative to the moving mean, the same on all ranks, so that little cancels. That is one
reduction of 2 C + 1 numbers forward, and one backward: a rank's loss depends on the other ranks' inputs now, and what
all losses together owe to the input of rank r is, in the weights w_r with which gradients are averaged,

    sum over q of w_q dL_q / w_r

Of a layer of which each rank of a group has a part, the same is done over the group, whose ranks weigh the same. Where
no mask says how many values a rank has, it is done as in `spatial/statistics.py`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec
from keras_hpc.keras_hooks import running
from keras_hpc.spatial import run


def install(job: Any, patcher: Any) -> None:
    """Hooks the method that computes a layer's moments of a batch, and the check that Keras makes of the argument."""
    patcher.patch(keras.layers.BatchNormalization, "__init__", _on_every_backend)
    patcher.patch(keras.layers.BatchNormalization, "_moments", _together)


def is_normalization(layer: Any) -> bool:
    """Return whether a layer normalizes over batches."""
    return isinstance(layer, keras.layers.BatchNormalization)


def is_synchronized(layer: Any) -> bool:
    """Return whether a layer normalizes over the batches of all ranks."""
    return isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized


def shared_statistics(model: Any) -> list[Any]:
    """Return the moving statistics that the synchronized layers of a model keep, the same on all ranks."""
    layers = [layer for layer in model._flatten_layers() if is_synchronized(layer)]
    return [variable for layer in layers for variable in layer.non_trainable_variables]


def _on_every_backend(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        synchronized = bound.arguments.pop("synchronized", False)  # which Keras refuses but on TensorFlow
        original(*bound.args, **bound.kwargs)
        self.synchronized = synchronized

    __init__.__signature__ = signature  # type: ignore[attr-defined]  # which Keras reads, but not through wrappers
    return __init__


class _Unsynchronized:
    """A layer as if it normalized over this rank's batch alone."""

    synchronized = False

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _together(original: Any) -> Any:
    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        of_group = None if self.synchronized else run.over_group()
        if not self.synchronized and of_group is None:
            return original(self, inputs, mask)
        # Keras knows `synchronized` on TensorFlow only, with tf.distribute. Its method gets a layer that says no, and
        # not this one changed for the moment: another thread may call it, too.
        mean, variance = original(_Unsynchronized(self), inputs, mask)
        if not current.active() or isinstance(inputs, keras.KerasTensor):
            return mean, variance
        if current.job().virtual is not None:
            raise ValueError(
                "With init(virtual_ranks=) each part is normalized by itself. Expected BatchNormalization with "
                f"synchronized=False. Received: layer `{self.name}` with synchronized=True"
            )
        if of_group is not None and mask is None:
            return of_group.moments(mean, variance)
        return _combine(self, mean, variance, inputs, mask, None if of_group is None else of_group.sum)

    return _moments


def _count(layer: Any, inputs: Any, mask: Any, samples: Any) -> Any:
    """Return how many values of each channel this rank has, a scalar; 0 if its batch stands for no samples."""
    if mask is None:
        sizes = [ops.cast(ops.shape(inputs)[axis], samples.dtype) for axis in layer._reduction_axes]
        count = functools.reduce(ops.multiply, sizes)
    else:
        count = ops.sum(ops.cast(ops.broadcast_to(mask, ops.shape(inputs)[:-1]), samples.dtype))
    return ops.where(samples > 0, count, ops.zeros_like(count))


def _combine(
    layer: Any, mean: Any, variance: Any, inputs: Any, mask: Any, of_group: Callable[[Any], Any] | None
) -> tuple[Any, Any]:
    """Return mean and variance over the values of all ranks, or, with `of_group`, which adds up, of a group's."""
    step = running.step()
    team = current.team_of(layer if step is None or step.model is None else step.model)
    count = None if step is None else step.count
    samples = ops.cast(1 if count is None else count, mean.dtype)  # the weight of this rank's gradients
    number = _count(layer, inputs, mask, samples)
    size = int(mean.shape[0])
    origin = ops.stop_gradient(ops.cast(layer.moving_mean, mean.dtype))
    distance = mean - origin
    parts = [number * distance, number * (variance + ops.square(distance)), ops.reshape(number, (1,))]
    # A rank that has no values has a mean of nothing.
    packed = ops.where(number > 0, ops.concatenate(parts), ops.zeros((2 * size + 1,), mean.dtype))
    if of_group is not None:
        total = of_group(packed)
    else:
        key = current.job().known.key_of(layer, "layer")
        use = 0 if step is None else step.next_use(key)  # uses of a layer in one step may overlap in time
        total = _sum(team, f"{key}/{use}", packed, samples)
    all_numbers = ops.maximum(total[-1], 1e-12)
    shift = total[:size] / all_numbers
    return origin + shift, ops.maximum(total[size:-1] / all_numbers - ops.square(shift), 0.0)


def _sum(team: Any, key: str, numbers: Any, weight: Any) -> Any:
    """Return the sum of vectors over all ranks, with its gradient. Collective, forward and backward.

    Args:
        team: of these ranks.
        key: names the plans.
        numbers: (n,), float32 or float64.
        weight: of this rank's gradients, a scalar of the same dtype.
    """
    specs = [TensorSpec("moments", tuple(numbers.shape), keras.backend.standardize_dtype(numbers.dtype))]
    forward, backward = (
        team.plan(f"{key}/{way}", specs, op="sum", weighted=False) for way in ("moments", "moments' gradient")
    )
    backend = backends.current()

    def gradient(upstream: Any, _: None) -> Any:
        # Of a rank without samples it may be NaN.
        (owed,) = backend.reduce(backward, [ops.where(weight > 0, upstream * weight, ops.zeros_like(upstream))])
        return ops.where(weight > 0, owed / ops.maximum(weight, 1e-12), 0.0)

    return backend.differentiable(lambda numbers: backend.reduce(forward, [numbers])[0], gradient, False, numbers)
