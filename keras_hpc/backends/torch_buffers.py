# SPDX-License-Identifier: Apache-2.0
"""PyTorch: what modules of PyTorch inside a model keep beside their weights, as moving statistics."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch


class Buffer:
    """A buffer of a module, with what others ask of a variable of Keras.

    Args:
        path: its name in the model.
        value: the tensor.
    """

    aggregation = "none"

    def __init__(self, path: str, value: torch.Tensor) -> None:
        self.path = self.name = path
        self.value = value

    @property
    def dtype(self) -> str:
        """The name of its dtype."""
        return str(keras.backend.standardize_dtype(self.value.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def assign(self, value: Any) -> None:
        """Set it."""
        self.value.copy_(keras.ops.convert_to_tensor(value))


def to_put_back(value: torch.Tensor) -> Callable[[], None]:
    """Return a function that gives a tensor the numbers that it has now."""
    copy, version = value.detach().clone(), value._version

    def put_back() -> None:
        if value._version != version:  # an expanded tensor cannot be set
            with torch.no_grad():
                value.copy_(copy)

    return put_back


def of(models: Iterable[Any]) -> list[Buffer]:
    """Return the buffers of all modules in models, which Keras does not count among its variables."""
    layers = [layer for model in models for layer in model._flatten_layers()]
    named = [(f"{layer.name}/{name}", value) for layer in layers for name, value in layer.named_buffers()]
    return [Buffer(*one) for one in {id(value): (name, value) for name, value in named}.values()]
