# SPDX-License-Identifier: Apache-2.0
"""Times of single layers, forward and backward, on the shapes that a part of a sample has."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

Shape = tuple[int, ...]


class Layer(NamedTuple):
    """What is measured: `call(*inputs, **keywords)`."""

    call: Callable[..., Any]
    keywords: dict[str, Any]


def in_training(layer: Any) -> Layer:
    """Return a layer as a training step calls it: a BatchNormalization then computes moments."""
    takes = "training" in inspect.signature(layer.call).parameters
    return Layer(layer, {"training": True} if takes else {})


def seconds_of(layer: Layer, shapes: Sequence[Shape], needs_gradient: bool, seconds: float = 0.3) -> float:
    """Return how long a layer takes, forward and backward; the median of as many tries as fit into some seconds.

    Args:
        layer: what is called.
        shapes: of its inputs, float32.
        needs_gradient: whether a gradient of the inputs is wanted, too, as of all layers but the first.
        seconds: for this measurement.
    """
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=shape).astype("float32") for shape in shapes]
    step = _STEPS[keras.backend.backend()](layer, inputs, needs_gradient)
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


def _torch(layer: Layer, inputs: list[Any], needs_gradient: bool) -> Callable[[], None]:
    import torch

    tensors = [torch.from_numpy(x).requires_grad_(needs_gradient) for x in inputs]
    upstream: list[Any] = []

    def step() -> None:
        y = layer.call(*tensors, **layer.keywords)
        if not upstream:
            upstream.append(torch.ones_like(y))
        if y.requires_grad:
            y.backward(upstream[0])

    return step


def _tensorflow(layer: Layer, inputs: list[Any], needs_gradient: bool) -> Callable[[], None]:
    import tensorflow as tf

    tensors = [tf.constant(x) for x in inputs]

    # The output is returned, too: TensorFlow leaves out what nobody asks for.
    @tf.function  # type: ignore[untyped-decorator]
    def gradients(*xs: Any) -> Any:
        with tf.GradientTape() as tape:
            if needs_gradient:
                tape.watch(xs)
            y = layer.call(*xs, **layer.keywords)
        weights = list(getattr(layer.call, "trainable_variables", []))
        return y, tape.gradient(y, [*weights, *(xs if needs_gradient else ())])

    def step() -> None:
        y, found = gradients(*tensors)
        for tensor in (y, *found):
            if tensor is not None:
                tensor.numpy()  # there now, whenever TensorFlow computed it

    return step


def _jax(layer: Layer, inputs: list[Any], needs_gradient: bool) -> Callable[[], None]:
    import jax

    owner: Any = layer.call if hasattr(layer.call, "stateless_call") else None
    weights = [v.value for v in owner.trainable_variables] if owner else []
    state = [v.value for v in owner.non_trainable_variables] if owner else []

    # The output is returned, too: XLA leaves out what nobody asks for, and the gradient of a convolution needs none.
    def loss(weights: Any, xs: Any) -> Any:
        if owner is None:
            y = layer.call(*xs, **layer.keywords)
        else:
            y = owner.stateless_call(weights, state, *xs, **layer.keywords)[0]
        return y.sum(), y

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1) if needs_gradient else 0, has_aux=True))

    def step() -> None:
        jax.block_until_ready(gradients(weights, inputs))

    return step


_STEPS = {"torch": _torch, "tensorflow": _tensorflow, "jax": _jax}
