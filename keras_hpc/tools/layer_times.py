# SPDX-License-Identifier: Apache-2.0
"""Times of single layers, forward and backward, on the shapes that a part of a sample has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

Shape = tuple[int, ...]


def seconds_of(call: Callable[..., Any], shapes: Sequence[Shape], needs_gradient: bool, seconds: float = 0.3) -> float:
    """Return how long a layer takes, forward and backward; the median of as many tries as fit into some seconds.

    Args:
        call: the layer, or a function of its inputs.
        shapes: of its inputs, float32.
        needs_gradient: whether a gradient of the inputs is wanted, too, as of all layers but the first.
        seconds: for this measurement.
    """
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=shape).astype("float32") for shape in shapes]
    step = _STEPS[keras.backend.backend()](call, inputs, needs_gradient)
    step()
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < seconds and len(taken) < 50):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def copy_bytes_per_s() -> float:
    """Return how many bytes a second are copied into new memory, as exchanges do."""
    array = np.ones(1 << 26, np.uint8)  # more than caches hold
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        array.copy()
        taken.append(time.perf_counter() - begin)
    return array.nbytes / min(taken)


def _torch(call: Callable[..., Any], inputs: list[Any], needs_gradient: bool) -> Callable[[], None]:
    import torch

    tensors = [torch.from_numpy(x).requires_grad_(needs_gradient) for x in inputs]
    upstream: list[Any] = []

    def step() -> None:
        y = call(*tensors)
        if not upstream:
            upstream.append(torch.ones_like(y))
        if y.requires_grad:
            y.backward(upstream[0])

    return step


def _tensorflow(call: Callable[..., Any], inputs: list[Any], needs_gradient: bool) -> Callable[[], None]:
    import tensorflow as tf

    tensors = [tf.constant(x) for x in inputs]

    @tf.function  # type: ignore[untyped-decorator]
    def gradients(*xs: Any) -> Any:
        with tf.GradientTape() as tape:
            if needs_gradient:
                tape.watch(xs)
            y = call(*xs)
        weights = list(getattr(call, "trainable_variables", []))
        return tape.gradient(y, [*weights, *(xs if needs_gradient else ())])

    def step() -> None:
        for gradient in gradients(*tensors):
            if gradient is not None:
                gradient.numpy()  # there now, whenever TensorFlow computed it

    return step


def _jax(call: Callable[..., Any], inputs: list[Any], needs_gradient: bool) -> Callable[[], None]:
    import jax

    layer: Any = call if hasattr(call, "stateless_call") else None
    weights = [v.value for v in layer.trainable_variables] if layer else []
    state = [v.value for v in layer.non_trainable_variables] if layer else []

    def loss(weights: Any, xs: Any) -> Any:
        y = layer.stateless_call(weights, state, *xs)[0] if layer else call(*xs)
        return y.sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1) if needs_gradient else 0))

    def step() -> None:
        jax.block_until_ready(gradients(weights, inputs))

    return step


_STEPS = {"torch": _torch, "tensorflow": _tensorflow, "jax": _jax}
