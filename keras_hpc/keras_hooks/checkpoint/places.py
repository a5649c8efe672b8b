# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is written: by all ranks into one folder, or, where not all see the same, on every node its own.

A path on a node's own disk or memory (/dev/shm) is another folder on each node. There the ranks of each node write one
whole checkpoint together, so that the loss of a node loses nothing: all ranks hold the weights anyway, and what a rank
has of its own is little, and is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from keras_hpc.job import current
from keras_hpc.keras_hooks.checkpoint import storage


@dataclasses.dataclass(frozen=True)
class Places:
    """Which ranks write together.

    Attributes:
        rank: this process' number in the team.
        size: number of ranks of the team.
        token: a word that no other run has.
        groups: numbers of ranks that see the same folder; the first of a group leads it. Rank 0 is in the first group.
            A rank in none of them writes nothing.
    """

    rank: int
    size: int
    token: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that write with this one; empty if it writes nothing."""
        return next((group for group in self.groups if self.rank in group), ())

    @property
    def together(self) -> bool:
        """Whether all ranks write one checkpoint."""
        return len(self.groups[0]) == self.size

    @property
    def leads(self) -> bool:
        """Whether this rank makes its group's checkpoint whole, and writes what all have alike."""
        return self.group[:1] == (self.rank,)


def find(team: Any, folder: Path, nbytes: int, keep: int) -> Places:
    """Find out which ranks see the same folder. Collective.

    Args:
        team: of the models.
        folder: for which `storage.check` was called on the first rank.
        nbytes: about what a checkpoint takes.
        keep: how many there will be.

    Raises:
        OSError: on all ranks: the first cannot write there.
    """
    with contextlib.ExitStack() as stack:
        path, error = "", None
        if team.rank == 0:
            try:
                path = str(stack.enter_context(probe := storage.Probe(folder)).path)
            except OSError as why:
                error = str(why)
        path, error = team.broadcast_object([path, error], what="Checkpoint: its folder")
        if error is not None:
            raise OSError(f"No checkpoint can be kept in {folder}. Received: {error}")
        storage.Probe.answer(Path(path), team.rank)
        team.barrier()
        first = probe.answered(team.size) if team.rank == 0 else []
        first = team.broadcast_object(first, what="Checkpoint: its folder")
        groups = [tuple(first)]
        if len(first) < team.size:
            groups += _on_other_nodes(team, folder, nbytes, keep, set(first))
    return Places(team.rank, team.size, path[-16:], tuple(groups))


def _on_other_nodes(team: Any, folder: Path, nbytes: int, keep: int, seen: set[int]) -> list[tuple[int, ...]]:
    """Return the groups of ranks, each of one node, that do not see the first rank's folder. Collective."""
    node_of = current.job().node_of_rank
    nodes: dict[int, list[int]] = {}
    for rank in range(team.size):
        if rank not in seen:
            nodes.setdefault(node_of[team.ranks[rank]], []).append(rank)
    mine = next((ranks for ranks in nodes.values() if team.rank in ranks), [])
    with contextlib.ExitStack() as stack:
        path = ""
        if mine[:1] == [team.rank]:
            with contextlib.suppress(OSError):  # then nothing is written on this node
                storage.check(folder, nbytes, keep)
                path = str(stack.enter_context(probe := storage.Probe(folder)).path)
        paths = team.allgather_object(path, "Checkpoint: folders of nodes")
        if mine and paths[mine[0]]:
            storage.Probe.answer(Path(paths[mine[0]]), team.rank)
        team.barrier()
        found = team.allgather_object(
            [rank for rank in probe.answered(team.size) if rank in mine] if path else [], "Checkpoint: folders of nodes"
        )
    return [tuple(ranks) for ranks in found if ranks]
