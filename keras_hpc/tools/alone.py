# SPDX-License-Identifier: Apache-2.0
"""A rank of a group whose other ranks are not there: it runs the very program of its part, to measure what that takes.

Rows that others would send are zeros, of which copies take as long. What is computed means nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from keras_hpc import keras_hooks
from keras_hpc.job import current, launch
from keras_hpc.job.team_making import make_team
from keras_hpc.spatial.geometry import Grid, Rows
from keras_hpc.spatial.group import Group


class Alone(Group):
    """A group of which only this rank is there."""

    def _made(
        self, name: str, terms: str, moved: Any, line: Sequence[int], fill: float, cells: int = 1, sides: Rows = (0, 0)
    ) -> Any:
        """Pad where the others' rows would be."""
        lower = sum(rows for _, rows in moved.receives[: moved.lower])
        pads = moved.pads[0] + lower, moved.pads[1] + moved.received - lower
        fill = 0.0 if moved.receives else fill  # a row of the least numbers would be one of no numbers soon
        moved = dataclasses.replace(moved, sends=(), receives=(), lower=0, pads=pads)
        return super()._made(name, terms, moved, line, fill, cells, sides)


@contextlib.contextmanager
def standing_in(grid: Grid, rank: int) -> Iterator[None]:
    """Let models that are compiled meanwhile be those of one rank of a group, which also run meanwhile. Collective.

    In a job without groups, hooks for them stay until `finalize()`.

    Args:
        grid: how the ranks of the group are arranged.
        rank: of them, any on each rank of the job.
    """
    job = current.job()
    options = job.teams[0].options
    team = make_team(launch.World(None), len(job.all_teams), 0, options["timeout_seconds"], options["stall_seconds"])
    before, job.group = job.group, Alone(grid, 0, 1, rank, team)
    try:
        if before is None:  # hooks of a job without groups leave models as they are
            keras_hooks.uninstall(job)
            keras_hooks.install(job)
            keras_hooks.begin(job)
        yield
    finally:
        job.group = before
        team.close()
