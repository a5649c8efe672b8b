# SPDX-License-Identifier: Apache-2.0
"""PyTorch: pieces of variables, updated and received where the variables are, if those lie in rows.

A kernel that begins orthogonal, as recurrent ones do, lies in columns, and stays so: sums over it, and products with
it, have other bits than of one in rows.
"""

from collections.abc import Sequence
from typing import Any

import torch

from keras_hpc.backends.torch_tensors import dtype_of

# Calls are made whether or not something needs their results.
LEAVES_OUT_UNUSED = False


def _value(variable: Any) -> torch.Tensor:
    value: torch.Tensor = variable.value if hasattr(variable, "value") else variable
    return value.detach()


def _elements(variable: Any) -> torch.Tensor:
    """Return all elements of a variable on one axis: in its own memory, or copied where they do not lie in rows."""
    return _value(variable).reshape(-1)


def load_piece(stand_in: Any, variable: Any, piece: Any) -> None:
    """Let a stand-in have a piece of a variable: what changes the one changes the other, unless it is a copy."""
    stand_in._value = _elements(variable)[piece.start : piece.stop].view(piece.shape)


def let_go(stand_in: Any) -> None:
    """Free what a stand-in holds, until `load_piece`."""
    stand_in._value = torch.empty(0, dtype=stand_in._value.dtype)


def piece_to_give(variable: Any, stand_in: Any, piece: Any) -> torch.Tensor:
    """Return a piece that this rank has updated."""
    if stand_in is not variable and not _value(variable).is_contiguous():
        updated: torch.Tensor = stand_in._value.view(-1)
        return updated
    return _elements(variable)[piece.start : piece.stop]


def piece_to_get(variable: Any, piece: Any, kept: bool) -> torch.Tensor:
    """Return where a piece that another rank has updated goes."""
    return _elements(variable)[piece.start : piece.stop]


@torch.no_grad()  # type: ignore[untyped-decorator]
def gather(plan: Any, pieces: Sequence[torch.Tensor], active: Any = None) -> Sequence[torch.Tensor]:
    """Give all ranks each piece as its owner has it, in place. Collective.

    Args:
        plan: each of whose tensors one rank gives.
        pieces: as the two functions above return them.
        active: a scalar bool tensor, the same on all ranks: if false, nothing is communicated. None: true.
    """
    if active is not None and not bool(active):
        return pieces
    for spec, piece in zip(plan.tensors, pieces, strict=True):  # before any is started
        if piece.dtype != dtype_of(spec.dtype) or not piece.is_cpu:
            raise spec.misfit(piece.shape, str(piece.dtype).removeprefix("torch."))
    for index, piece in enumerate(pieces):
        plan.start_at(index, piece.data_ptr(), piece.nbytes)
    plan.wait_all()
    return pieces


def put_pieces(variable: Any, pieces: Sequence[torch.Tensor]) -> None:
    """Let a variable have all its pieces, if they are not where they belong."""
    value = _value(variable)
    if not value.is_contiguous():
        value.copy_(torch.cat(list(pieces)).view(value.shape))
