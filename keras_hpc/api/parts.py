# SPDX-License-Identifier: Apache-2.0
"""Samples that several ranks compute together: who they are, which rows each has, and the plans of models."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_hpc.job import current
from keras_hpc.spatial.geometry import Grid

if TYPE_CHECKING:
    from keras_hpc.spatial.plan import Plan


def group() -> int:
    """Return the number of this rank's group, 0 to `group_count() - 1`: its ranks compute each sample together.

    Without `init(spatial=)` each rank is a group of its own.
    """
    return current.job().teams[0].replica


def group_count() -> int:
    """Return the number of groups: of replicas of a model that train on samples of their own."""
    return current.job().teams[0].replicas


def part(extent: int, axis: int = 0) -> tuple[int, int]:
    """Return the rows `(begin, end)` of an axis that this rank has of each sample, for readers that read only these.

    Args:
        extent: rows of the whole axis.
        axis: which spatial axis, 0 for the first.

    Raises:
        ValueError: there are no such rows.

    Example, on two ranks, each of which has all rows; with `init(spatial=2)` they have (0, 32) and (32, 64).

    >>> keras_hpc.part(64)
    (0, 64)
    """
    if isinstance(extent, bool) or not isinstance(extent, (int, numbers.Integral)) or extent < 1:
        raise ValueError(f"`extent` is a number of rows. Expected a positive int. Received: extent={extent!r}")
    if axis not in (0, 1, 2):
        raise ValueError(f"`axis` is a spatial axis. Expected 0, 1 or 2. Received: axis={axis!r}")
    this = current.job().group
    return (0, int(extent)) if this is None else this.part(int(extent), axis)


def partition(model: Any, parts: int | Sequence[int] | None = None, min_rows: int = 4) -> Plan:
    """Return how groups of ranks compute a model together, each rank a part of every sample; or choose otherwise.

    In a job with `init(spatial=)` the model is computed so from now on, on all ranks, which all call this. Elsewhere
    nothing is changed. Nothing is communicated.

    Args:
        model: a functional or sequential model whose images, (batch, ..., channels), have known extents.
        parts: how many parts along each spatial axis, such as `(2, 1)` for rows of images; an int means the first axis.
            In a job with `init(spatial=)` its parts, which is the default, or 1: all ranks of a group compute all of
            the model.
        min_rows: a tensor with fewer rows for each part is computed whole, by all ranks of the group.

    Returns:
        The plan. `print(plan)` has a line for each layer: split or whole, and the rows and bytes that the rank receives
        that receives most.

    Raises:
        TypeError: the model is neither functional nor sequential.
        ValueError: a layer cannot be computed in parts, which is named; or wrong `parts` or `min_rows`.
    """
    from keras_hpc.spatial.partition import plan_of

    this = current.job().group if current.is_initialized() else None
    if parts is None:
        if this is None:
            raise ValueError("Without init(spatial=) a plan needs `parts`, such as (2, 1). Received: parts=None")
        parts = this.grid.parts
    grid = Grid.of(parts)
    if this is not None and grid not in (this.grid, Grid((1,))):
        raise ValueError(
            "The ranks of a group are arranged by init(spatial=). Expected its parts "
            f"{this.grid.parts}, or 1 for a model that each rank computes as a whole. Received: parts={parts!r}"
        )
    plan = plan_of(model, grid, min_rows)
    if this is not None and not current.is_local():
        from keras_hpc.keras_hooks import parts as hooks

        hooks.use(model, plan)
    return plan
