# SPDX-License-Identifier: Apache-2.0
"""What the parts of a sample fetch from each other before a layer is computed, and what that costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from keras_hpc.spatial import geometry

Fill = float | Literal["edge"]


@dataclasses.dataclass(frozen=True)
class AxisFetch:
    """Gives each part its window of one axis.

    Attributes:
        axis: of the tensor, 1 for the first spatial one.
        extent: rows of the whole axis.
        parts: into how many parts it is cut.
        windows: the rows that each part reads.
        everywhere: every part has all rows already.
    """

    axis: int
    extent: int
    parts: int
    windows: tuple[geometry.Rows, ...]
    everywhere: bool

    def move(self, part: int) -> geometry.Move:
        """Return what a part does."""
        return geometry.move(self.extent, self.parts, self.windows, part, self.everywhere)

    def move_at(self, place: Sequence[int]) -> geometry.Move:
        """Return what the rank does that has these parts, one for each axis that the grid has."""
        return self.move(place[self.axis - 1] if self.axis <= len(place) else 0)

    def without_padding(self) -> AxisFetch:
        """Return the same, of windows that end where the axis does."""
        inside = tuple((max(begin, 0), min(end, self.extent)) for begin, end in self.windows)
        return dataclasses.replace(self, windows=inside)

    @property
    def communicates(self) -> bool:
        """Whether any part sends something. All parts then take part, also those that send and receive nothing."""
        return any(self.move(part).receives for part in range(self.parts))

    @property
    def cuts(self) -> bool:
        """Whether any part drops rows that it has."""
        moves = [self.move(part) for part in range(self.parts)]
        return any(move.own != (0, move.extent) for move in moves)

    @property
    def pads(self) -> bool:
        """Whether any part's window has padding."""
        return any(any(self.move(part).pads) for part in range(self.parts))

    @property
    def only_pads(self) -> bool:
        """Whether all that any part does is to pad what it has."""
        return self.pads and not self.communicates and not self.cuts

    @property
    def changes(self) -> bool:
        """Whether any part has other rows afterwards."""
        moves = [self.move(part) for part in range(self.parts)]
        return any(move.receives or any(move.pads) or move.own != (0, move.extent) for move in moves)


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Gives each part its window of a tensor, one axis after the other: corners come along, no message is diagonal.

    Attributes:
        axes: one for each axis along which something is to be done.
        fill: what padding is filled with: a number, or the first and last row of the image again and again.
    """

    axes: tuple[AxisFetch, ...]
    fill: Fill = 0.0

    def cost(self, grid: geometry.Grid, shape: Sequence[int | None], nbytes: int) -> tuple[int, int]:
        """Return the rows that are received, and the bytes for each sample, by the rank that receives most bytes.

        Args:
            grid: the ranks.
            shape: of the whole tensor.
            nbytes: of one of its values.
        """
        costs = []
        for rank in range(grid.size):
            place = grid.place(rank)
            sizes = [extent or 1 for extent in shape[1:]]
            for fetch in self.axes:
                sizes[fetch.axis - 1] = fetch.move_at(place).extent
            rows = moved = 0
            for fetch in self.axes:
                move = fetch.move_at(place)
                rows += move.received
                sizes[fetch.axis - 1] = move.received
                moved += math.prod(sizes) * nbytes
                sizes[fetch.axis - 1] = move.rows
            costs.append((moved, rows))
        moved, rows = max(costs)
        return rows, moved


def fetch(
    grid: geometry.Grid,
    shape: Sequence[int | None],
    have: frozenset[int],
    want: frozenset[int],
    axes: Mapping[int, geometry.Axis] | None = None,
    fill: Fill = 0.0,
) -> Fetch | None:
    """Return how the parts get what a layer reads, or None where they have it.

    Args:
        grid: the ranks.
        shape: of the whole tensor, (batch, ..., channels).
        have: along which axes it is split.
        want: along which axes the layer's output is split.
        axes: what the layer reads along an axis; along others output positions read the same position.
        fill: what padding is filled with.
    """
    found = []
    for axis, extent in enumerate(shape):
        work = (axes or {}).get(axis)
        if (work is None and (axis in have) == (axis in want)) or extent is None:  # unknown: refused before if split
            continue
        parts = grid.parts[axis - 1] if axis <= len(grid.parts) else 1
        outputs = extent if work is None else work.outputs
        rows = geometry.bounds(outputs, parts) if axis in want else [(0, outputs)] * parts
        windows = tuple(rows if work is None else [work.window(*part) for part in rows])
        found.append(AxisFetch(axis, extent, parts, windows, everywhere=axis not in have))
    changing = tuple(one for one in found if one.changes)
    return Fetch(changing, fill) if changing else None
