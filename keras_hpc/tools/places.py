# SPDX-License-Identifier: Apache-2.0
"""Where an elastic job can start its ranks: on this machine, on hosts that answer, in what is left of an allocation."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_RANK_LOST = re.compile(r"rank (\d+) .{0,60}?(?:has ended|was killed|does not answer)")
# They describe the allocation as it was. Without a number of nodes srun would wait for those that failed.
_STALE = ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NPROCS")
_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


@dataclasses.dataclass(frozen=True)
class Placement:
    """How many ranks start where.

    Attributes:
        ranks: of all hosts.
        hosts: names, with numbers of ranks; empty: where the launcher puts them.
    """

    ranks: int
    hosts: tuple[tuple[str, int], ...] = ()


class Machine:
    """Places that the launcher finds.

    Args:
        wanted: what the user asks for.
    """

    def __init__(self, wanted: Placement) -> None:
        self.wanted = wanted

    def lost(self, now: Placement) -> bool:
        """Return whether places of a job that has ended are not there any more."""
        return False

    def without(self, now: Placement, reasons: Sequence[str]) -> Placement:
        """Return where a job can start that has lost a rank.

        Args:
            now: where it ran.
            reasons: what its ranks have said.
        """
        return Placement(now.ranks - 1)

    def back(self, now: Placement) -> Placement:
        """Return where a job could start by now, of all that was asked for; at least what it has."""
        return self.wanted

    def environment(self, now: Placement) -> dict[str, str | None]:
        """Return what the launcher needs in its environment, and what must not be there."""
        return {}


class Hosts(Machine):
    """Hosts that the user names.

    Args:
        wanted: what the user asks for.
        answers: whether a host can start something; it may take seconds.
    """

    def __init__(self, wanted: Placement, answers: Callable[[str], bool]) -> None:
        super().__init__(wanted)
        self._answers = answers

    def _answering(self, names: Sequence[str]) -> set[str]:
        with ThreadPoolExecutor(max(1, len(names))) as threads:
            return {name for name, there in zip(names, threads.map(self._answers, names), strict=True) if there}

    def lost(self, now: Placement) -> bool:
        """Return whether a host does not answer."""
        names = [name for name, _ in now.hosts]
        return self._answering(names) != set(names)

    def without(self, now: Placement, reasons: Sequence[str]) -> Placement:
        """Leave out hosts that do not answer; if all do, a place of the host whose rank was lost."""
        there = self._answering([name for name, _ in now.hosts])
        left = [(name, count) for name, count in now.hosts if name in there]
        if len(left) == len(now.hosts):
            host = self._host_of(now, reasons)
            left = [(name, count - (name == host)) for name, count in left]
        return _placed(left)

    def _host_of(self, now: Placement, reasons: Sequence[str]) -> str:
        said = next((int(found[1]) for reason in reasons if (found := _RANK_LOST.search(reason))), None)
        if said is not None and said < now.ranks:
            return [name for name, count in now.hosts for _ in range(count)][said]
        return max(reversed(now.hosts), key=lambda host: host[1])[0]

    def back(self, now: Placement) -> Placement:
        """Return all hosts that answer, with as many ranks as the user has asked for; those that run a job do."""
        have = dict(now.hosts)
        missing = [name for name, count in self.wanted.hosts if have.get(name, 0) < count]
        there = self._answering(missing)
        return _placed([(n, count if n in there else have.get(n, 0)) for n, count in self.wanted.hosts])


class Allocation(Machine):
    """What is left of a Slurm allocation with `--no-kill`, of which nodes that failed have been taken out."""

    def __init__(self, wanted: Placement) -> None:
        super().__init__(wanted)
        self._nodes = self._had = _allocated_nodes()

    def lost(self, now: Placement) -> bool:
        """Return whether nodes have been taken out."""
        had, self._nodes = self._nodes, _allocated_nodes()
        return self._nodes < had

    def without(self, now: Placement, reasons: Sequence[str]) -> Placement:
        """Leave out what does not fit the nodes; if all fit, one rank."""
        self._nodes = _allocated_nodes()
        fit = self._fitting()
        return Placement(fit if fit < now.ranks else now.ranks - 1)

    def _fitting(self) -> int:
        return self.wanted.ranks * self._nodes // max(1, self._had)

    def back(self, now: Placement) -> Placement:
        """Return as many ranks as fit the nodes."""
        return Placement(max(now.ranks, self._fitting()))

    def environment(self, now: Placement) -> dict[str, str | None]:
        """Return what srun must not find where the job has not got all that the allocation was made for."""
        if now == self.wanted:
            return {}
        return dict.fromkeys(_STALE) | dict.fromkeys(_NODES, str(min(self._nodes, now.ranks)))


def _placed(hosts: Sequence[tuple[str, int]]) -> Placement:
    kept = tuple((name, count) for name, count in hosts if count > 0)
    return Placement(sum(count for _, count in kept), kept)


def _allocated_nodes() -> int:
    """Return how many nodes this job has; it loses those that fail."""
    done = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"\bNumNodes=(\d+)", done.stdout)
    return int(found[1]) if found else int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
