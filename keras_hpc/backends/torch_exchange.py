# SPDX-License-Identifier: Apache-2.0
"""PyTorch: exchanges of rows with other ranks, recorded by autograd.

Autograd runs what was recorded in the reverse order on all ranks, whatever else their graphs have: so exchanges, which
block, are in one order backward, too.
"""

import math
from typing import Any

import torch

from keras_hpc.backends import shapes_of
from keras_hpc.backends.torch_tensors import bytes_of


def exchange(exchange: Any, x: torch.Tensor, axis: int, order: Any) -> torch.Tensor:
    """Return this rank's window of a tensor that is split among the ranks of a group. Collective, and its gradient is.

    Args:
        exchange: the engine's exchange.
        x: this rank's rows.
        axis: along which it is split.
        order: not needed.
    """
    y: torch.Tensor = _Exchange.apply(exchange, x, axis)
    return y


def after(y: torch.Tensor, order: Any) -> torch.Tensor:
    """Return the tensor: what was exchanged before is done."""
    return y


class _Exchange(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, exchange: Any, x: torch.Tensor, axis: int) -> torch.Tensor:
        ctx.exchange, ctx.axis, ctx.shapes = exchange, axis, shapes_of(exchange, x.shape, axis)
        return _run(ctx, x, adjoint=False)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, _run(ctx, upstream, adjoint=True), None


def _run(of: Any, x: torch.Tensor, adjoint: bool) -> torch.Tensor:
    x = x.detach().contiguous()
    own, window = of.shapes
    y = torch.empty(own if adjoint else window, dtype=x.dtype)
    outer, inner = math.prod(own[: of.axis]), math.prod(own[of.axis + 1 :])
    of.exchange.run(bytes_of(x), bytes_of(y), outer, inner, str(x.dtype).removeprefix("torch."), adjoint)
    return y
