# SPDX-License-Identifier: Apache-2.0
"""`keras_hpc.partition`: the plan of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_hpc.spatial.geometry import Grid
from keras_hpc.spatial.plan import Plan, functional_of


def grid_of(parts: int | Sequence[int]) -> Grid:
    """Return the grid of what a user gives as `parts`: a number for each spatial axis, an int for the first one.

    Raises:
        ValueError: it is something else.
    """
    given = (parts,) if isinstance(parts, int) else tuple(parts)
    if not given or len(given) > 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in given):
        raise ValueError(
            "A sample is split into a number of parts along each of its one to three spatial axes. Expected a positive "
            f"int, or a tuple of them, such as (2, 1). Received: {parts!r}"
        )
    while len(given) > 1 and given[-1] == 1:  # so (2, 1) is for models of one axis, too
        given = given[:-1]
    return Grid(given)


def partition(model: Any, parts: int | Sequence[int], min_rows: int = 4) -> Plan:
    """Return how groups of ranks would compute a model together, each rank a part of every sample.

    Nothing is communicated, and the model is not changed.

    Args:
        model: a functional or sequential model whose images, (batch, ..., channels), have known extents.
        parts: how many parts along each spatial axis, such as `(2, 1)` for rows of images; an int means the first axis.
        min_rows: a tensor with fewer rows for each part is computed whole, by all ranks of the group.

    Returns:
        The plan. `print(plan)` has a line for each layer: split or whole, and the rows and bytes that the rank receives
        that receives most.

    Raises:
        TypeError: the model is neither functional nor sequential.
        ValueError: a layer cannot be computed in parts, which is named; or wrong `parts` or `min_rows`.
    """
    if isinstance(min_rows, bool) or not isinstance(min_rows, int) or min_rows < 1:
        raise ValueError(f"min_rows is a number of rows. Expected a positive int. Received: {min_rows!r}")
    grid = grid_of(parts)
    function = functional_of(model)
    if not hasattr(function, "_nodes_by_depth"):
        raise TypeError(
            "A model is computed in parts if the extents of all its tensors are known before it runs. Expected a "
            "functional model, or a sequential one that begins with keras.Input. "
            f"Received: `{getattr(model, 'name', model)}` ({type(model).__name__})"
        )
    return Plan(function, grid, min_rows)
