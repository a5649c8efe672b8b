"""What happens in each round of ranks/random_failures.py: drawn from a seed, the same on all ranks, and judged."""

import random
import re
from dataclasses import dataclass, field

STOPPED = 6.0  # seconds
SEEN_IN = 12.0  # seconds, at most, from a failure that has nothing to do with a time limit
IN_MPI = "broadcast", "allgather", "alltoall"  # calls in which this rank waits for MPI, which names nobody
STEPS = 20  # of teams of which nothing fails


@dataclass(frozen=True)
class Round:
    """One round of a job.

    Attributes:
        kind: "kill", "stop", "late", "raise", "close", "fork", or "pause", which all are for a while.
        victim: the rank to which it happens.
        agent: another rank, which stops it.
        moment: seconds after the start of the round.
        nodes: the node of each rank; None: those of MPI.
        threads: of each team.
        teams: how many.
        largest: elements of arrays, at most.
        timeouts: of each rank.
        child: whether the victim has a child that outlives it.
    """

    kind: str
    victim: int
    agent: int
    moment: float
    nodes: tuple[int, ...] | None
    threads: int
    teams: int
    largest: int
    timeouts: tuple[float, ...]
    child: bool

    def fails(self, team: int) -> bool:
        """Whether this team comes to an error."""
        return self.kind in ("kill", "stop") or (self.kind in ("late", "raise", "close") and team == 0)


def draw(seed: int, number: int, size: int, *, last: bool, own_nodes: bool, kinds: str = "") -> Round:
    """Return what happens in a round; `own_nodes`: nodes may be others than those of MPI."""
    chance = random.Random(f"{seed} {number}")
    usual = ["stop", "stop", "stop", "late", "raise", "close", "pause"]
    kind = chance.choice(kinds.split(",") if kinds else usual)
    kind = "kill" if last else kind
    victim = chance.randrange(size)
    agent = (victim + chance.randrange(1, size)) % size
    nodes = None
    if own_nodes and chance.random() < 0.7:
        drawn = [chance.randrange(size) for _ in range(size)]
        order = sorted(set(drawn), key=drawn.index)
        nodes = tuple(order.index(node) for node in drawn)
    largest = chance.choice([2_000, 300_000, 4_000_000, 16_000_000, 32_000_000])
    if kind in ("stop", "late"):
        timeouts = [chance.uniform(1.0, 2.0)] * size
        if chance.random() < 0.3:
            timeouts = [chance.uniform(1.0, 2.5) for _ in range(size)]
    else:  # who is alone on its node leaves unseen
        timeouts = [4.0 if kind in ("raise", "close", "pause") else 40.0] * size
    return Round(
        kind=kind,
        victim=victim,
        agent=agent,
        moment=chance.uniform(0, 0.3 if largest < 1_000_000 else 1.5),
        nodes=nodes,
        threads=chance.randrange(3),
        teams=1 if largest > 4_000_000 else chance.choice([1, 1, 2, 3]),
        largest=largest,
        timeouts=tuple(timeouts),
        child=chance.random() < 0.3,
    )


@dataclass
class Told:
    """How a team ended on a rank.

    Attributes:
        rank: that says so.
        team: its number.
        text: of the error, or "done".
        seconds: since the failure.
        step: in which.
        doing: what.
    """

    rank: int
    team: int
    text: str
    seconds: float
    step: int
    doing: str
    wrong: list[str] = field(default_factory=list)


def faults(one: Round, told: list[Told], real_nodes: list[int]) -> list[str]:
    """Return what is wrong with how a round ended; `real_nodes`: those of MPI."""
    size = len(real_nodes)
    nodes = list(one.nodes or real_nodes)
    found = [f"wrong: {told_one}" for told_one in told if told_one.wrong]
    for team in range(one.teams):
        ended = {t.rank: t for t in told if t.team == team}
        expected = set(range(size)) - ({one.victim} if one.kind == "kill" else set())
        if set(ended) != expected:
            found.append(f"team {team}: ranks {sorted(expected - set(ended))} have said nothing")
        vague = _nobody_knows(one, list(ended.values()), nodes)
        in_mpi = {rank for rank, t in ended.items() if t.doing in IN_MPI} - {one.victim}
        vague = vague or bool(in_mpi)
        for t in ended.values():
            problem = _fault(one, t, vague, in_mpi)
            if problem:
                found.append(f"{problem}: {t}")
    return found


def _nobody_knows(one: Round, told: list[Told], nodes: list[int]) -> bool:
    """Whether ranks can but say that somebody is late: who tells of itself then means that."""
    if one.kind == "kill":
        return False
    alone = nodes.count(nodes[one.victim]) == 1
    # MPI does not say which of many has not done its part; and where limits differ, who knows may not be the first.
    by_mpi = any("not every rank arrived" in t.text for t in told)
    return alone or by_mpi or len(set(one.timeouts)) > 1


def _fault(one: Round, told: Told, vague: bool, in_mpi: set[int]) -> str:
    if not one.fails(told.team):
        return "" if told.text == "done" else "an error where nothing failed"
    if told.text == "done":
        return "no error"
    if told.rank == one.victim:
        own = {
            "stop": "given up waiting for this rank",
            "late": "given up waiting for this rank",
            "close": "was closed|is closed",
            "raise": "boom",
        }[one.kind]
        return "" if vague or re.search(own, told.text) else "unclear to the victim"
    limit = SEEN_IN if one.kind not in ("stop", "late") else max(one.timeouts) + 7
    if told.seconds > limit:
        return "late"
    named = re.findall(r"rank ([\d, ]*\d)\b(?! has given up|\))", told.text)
    # Whom MPI lets wait for the victim, some ranks take for the one that is late.
    known = named and {one.victim, *in_mpi} & set(map(int, named[-1].split(", ")))
    clear = known or (vague and re.search("tells of itself|not every rank|may wait|given up|a message from", told.text))
    return "" if clear else "names another rank"
