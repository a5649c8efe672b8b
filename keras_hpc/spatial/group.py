# SPDX-License-Identifier: Apache-2.0
"""The ranks that compute each sample together: who they are, and how rows go between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from keras_hpc import _native
from keras_hpc.job import launch
from keras_hpc.job.team import Team
from keras_hpc.job.team_making import make_team
from keras_hpc.spatial.fetch import AxisFetch
from keras_hpc.spatial.geometry import Grid, Rows, bounds, move


@dataclasses.dataclass
class Group:
    """The ranks that compute each sample together, in a job of several such groups.

    Attributes:
        grid: how they are arranged.
        index: number of this rank's group.
        count: number of groups.
        rank: this rank's number in its group.
        team: of the engine, through which they exchange rows.
    """

    grid: Grid
    index: int
    count: int
    rank: int
    team: Team

    def __post_init__(self) -> None:
        self.place = self.grid.place(self.rank)
        self._exchanges: dict[tuple[str, str], Any] = {}

    @property
    def size(self) -> int:
        """How many ranks compute a sample together."""
        return self.grid.size

    def part(self, extent: int, index: int) -> Rows:
        """Return the rows [begin, end) of an axis that this rank has; `index` 0 is the first spatial axis."""
        if index >= len(self.grid.parts):
            return 0, extent
        return bounds(extent, self.grid.parts[index])[self.place[index]]

    def first_with_part(self, split: Collection[int]) -> int:
        """Return the first rank of the group that has the same part of a tensor; `split` has the axes, 1 the first."""
        return self.grid.rank([part if index + 1 in split else 0 for index, part in enumerate(self.place)])

    def exchange(self, name: str, fetch: AxisFetch, fill: float, beside: AxisFetch | None = None) -> Any:
        """Return the engine's exchange for a fetch along an axis. Collective on the group at the first call.

        Args:
            name: what it is for, the same on all ranks.
            fetch: what the parts fetch.
            fill: what padding is filled with.
            beside: of the next axis, which is only padded, in the same copy.
        """
        line = self.grid.line(self.rank, fetch.axis - 1)
        move = fetch.move_at(self.place)
        if beside is None:
            return self._made(name, f"{fetch}, {fill}", move, line, fill)
        across = beside.move_at(self.place)
        return self._made(name, f"{fetch}, {beside}, {fill}", move, line, fill, across.extent, across.pads)

    def borders(self, name: str, fetch: AxisFetch) -> Any:
        """Return the exchange of only the rows that parts send for a fetch. Collective at the first call."""
        line = self.grid.line(self.rank, fetch.axis - 1)
        return self._made(name, f"{fetch}, borders", fetch.move_at(self.place).borders, line, 0.0)

    def gather(self, name: str) -> Any:
        """Return the exchange that gives each rank one row of every rank of the group. Collective at the first call."""
        size = self.size
        every = move(size, size, [(0, size)] * size, self.rank)
        return self._made(name, f"a row of each of {size} ranks", every, range(size), 0.0)

    def _made(
        self, name: str, terms: str, moved: Any, line: Sequence[int], fill: float, cells: int = 1, sides: Rows = (0, 0)
    ) -> Any:
        key = (name, terms)
        if key not in self._exchanges:
            sends = [(line[part], *rows) for part, rows in moved.sends]
            receives = [(line[part], rows) for part, rows in moved.receives]
            shape = (moved.extent, moved.own, moved.pads, fill, sends, receives, moved.lower, cells, sides)
            self._exchanges[key] = _native.make_exchange(self.team.native, name, terms, *shape)
        return self._exchanges[key]


def make_group(world: Any, grid: Grid, first_index: int, timeout_seconds: float, stall_seconds: float) -> Group:
    """Make this rank's group. Collective on all ranks.

    Args:
        world: the ranks of the job, as many as whole groups have.
        grid: how the ranks of a group are arranged.
        first_index: the number of the first group's team.
        timeout_seconds: a wait that takes longer is an error.
        stall_seconds: a wait that takes longer is reported.
    """
    index, rank = divmod(world.rank, grid.size)
    ranks = range(index * grid.size, (index + 1) * grid.size)
    comm = world.comm.Split(index, rank) if world.comm is not None else None
    nodes = [world.node_of_rank[r] for r in ranks]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    inner = launch.World(comm, rank, grid.size, [numbers[node] for node in nodes])
    team = make_team(inner, first_index + index, 0, timeout_seconds, stall_seconds)
    team.ranks, team.comm = tuple(ranks), comm
    return Group(grid, index, world.size // grid.size, rank, team)
