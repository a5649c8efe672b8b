# SPDX-License-Identifier: Apache-2.0
"""Masks that Keras attaches to tensors: (batch, ...) for a tensor (batch, ..., channels), cut like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from keras import ops


@dataclasses.dataclass(frozen=True)
class Masks:
    """Where masks are kept.

    Attributes:
        of: returns the mask of a tensor, or None.
        attach: attaches a mask to a tensor.
    """

    of: Callable[[Any], Any]
    attach: Callable[[Any, Any], None]

    def carried(self, x: Any, y: Any, change: Callable[[Any], Any] | None = None) -> Any:
        """Return `y`, which was made of `x`, with the mask of `x`.

        Args:
            x: a tensor that may have a mask.
            y: the tensor.
            change: what was done to `x`, for a mask (batch, ..., 1) of numbers; None: nothing that moves positions.
        """
        mask = self.of(x)
        if mask is None or y is x:
            return y
        if change is not None:
            mask = change(ops.cast(ops.expand_dims(mask, -1), "float32"))[..., 0] > 0.5
        self.attach(y, mask)
        return y
