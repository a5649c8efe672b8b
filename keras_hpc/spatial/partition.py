# SPDX-License-Identifier: Apache-2.0
"""The plan of a model that a user gives."""

from __future__ import annotations

from typing import Any

from keras_hpc.spatial.geometry import Grid
from keras_hpc.spatial.plan import Plan, functional_of


def plan_of(model: Any, grid: Grid, min_rows: int) -> Plan:
    """Return how groups of ranks compute a model.

    Raises:
        TypeError: the model is neither functional nor sequential.
        ValueError: a layer cannot be computed in parts, which is named; or a wrong `min_rows`.
    """
    if isinstance(min_rows, bool) or not isinstance(min_rows, int) or min_rows < 1:
        raise ValueError(f"min_rows is a number of rows. Expected a positive int. Received: {min_rows!r}")
    function = functional_of(model)
    if not hasattr(function, "_nodes_by_depth"):
        raise TypeError(
            "A model is computed in parts if the extents of all its tensors are known before it runs. Expected a "
            "functional model, or a sequential one that begins with keras.Input. "
            f"Received: `{getattr(model, 'name', model)}` ({type(model).__name__})"
        )
    return Plan(function, grid, min_rows)
