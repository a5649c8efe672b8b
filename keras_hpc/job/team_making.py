# SPDX-License-Identifier: Apache-2.0
"""Makes teams of all ranks, which know what earlier jobs have measured."""

from __future__ import annotations

from keras_hpc import _native
from keras_hpc.job import tuning_cache
from keras_hpc.job.launch import World
from keras_hpc.job.team import Team


def make_team(
    world: World, index: int, threads: int, timeout_seconds: float, stall_seconds: float, waiting: str = "auto"
) -> Team:
    """Make a team of all ranks. Collective.

    Args:
        world: the ranks.
        index: number of the team.
        threads: communication threads on each rank.
        timeout_seconds: a wait that takes longer is an error.
        stall_seconds: a wait that takes longer is reported.
        waiting: "spin", "yield" or "sleep", for measuring; "auto" does what fits the ranks and cores of the node.

    Raises:
        ValueError: the environment asks for ways of an allreduce that do not exist.
    """
    native = _native.Team(world.transport(), index, threads, timeout_seconds, stall_seconds, waiting)
    team = Team(index, native, range(world.size))
    team.world = world
    team.options = {"threads": threads, "timeout_seconds": timeout_seconds, "stall_seconds": stall_seconds}
    if world.size > 1:
        team.selection_key = tuning_cache.key_of(world)
        _restore_choices(team)
    return team


def _restore_choices(team: Team) -> None:
    """Give the team what an earlier job measured, and then what the user wants. Collective.

    Raises:
        ValueError: the environment asks for ways of an allreduce that do not exist.
    """
    choices: list[tuning_cache.Choice] = []
    error = ""
    if team.rank == 0:
        try:
            choices = tuning_cache.load(team.selection_key, team.index)
        except ValueError as problem:
            error = str(problem)
    # The first rank's, on all: another rank may see other files or variables.
    choices, error = team.broadcast_object([choices, error], what="the measured ways of allreduce")
    if error:
        raise ValueError(error)
    for choice in choices:
        team.native.add_choice(*choice)
