# SPDX-License-Identifier: Apache-2.0
"""Says what is wrong with extents that a user gives: a part of what is whole, or neither a part nor all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from keras_hpc.spatial.geometry import Rows

Part = Callable[[int, int], Rows]  # of an extent and a spatial axis, 0 for the first, the rows that this rank has


def fault_of(
    given: Sequence[int | None], whole: Sequence[int | None], split: frozenset[int], part: Part, axes: Iterable[int]
) -> str | None:
    """Return what was expected of an axis, and what was received; None: nothing is wrong.

    Args:
        given: shape of what a user gives.
        whole: that of whole samples.
        split: along which axes ranks have a part each.
        part: of this rank.
        axes: that are looked at.
    """
    for axis in sorted(axes):
        rows, extent = given[axis], whole[axis]
        if extent is None or rows == extent or (rows is None and axis not in split):
            continue
        begin, end = part(extent, axis - 1)
        if axis not in split:
            wanted = f"all {extent} rows of axis {axis}, which is not split, as print(keras_hpc.partition(model)) shows"
        elif rows != end - begin:
            part_of_it = f"the {end - begin} rows from {begin} that keras_hpc.part says"
            wanted = f"all {extent} rows of axis {axis}, or {part_of_it}"
        else:
            continue
        if rows is None:
            return f"Expected {wanted}. Received: an unknown number of rows, which `tf.ensure_shape` in a `map` tells"
        return f"Expected {wanted}. Received: {rows} rows"
    return None
