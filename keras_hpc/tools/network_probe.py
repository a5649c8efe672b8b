# SPDX-License-Identifier: Apache-2.0
"""How fast the ranks of a job reach each other, and which of them, or which link, is slower than the rest.

Nodes meet in a round-robin tournament of their first ranks, disjoint pairs at a time, so that a round loads the network
as a job does; then the ranks of each node do. Each pair plays ping-pong; the best of several tries counts, which noise
moves least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_ROUNDS = 32  # of a tournament; more nodes than that do not all meet
_TRIES = 5
_PINGS = 50  # of a try for the latency
_BYTES = 4 << 20  # of a message for the bandwidth
_SLOW = 2.0  # times as slow as usual is named
_USUAL = 1 / 3  # of the links are better than usual: of three nodes one may be slow, and two of three links with it
_LATENCY_NOISE_US = 20.0
_COMPUTE_SIZE = 384

Link = dict[str, Any]


def measure(comm: Any, node_of_rank: Sequence[int]) -> list[Link]:
    """Measures links between nodes and inside them. Collective.

    Args:
        comm: mpi4py communicator of the job.
        node_of_rank: the node of every rank.

    Returns:
        One dictionary for each link, on the first of its ranks: `ranks`, `nodes`, two each; `latency_us`, half of a
        round trip of 8 bytes; `gb_per_s`, of messages of 4 MiB, each way in turn.
    """
    nodes: list[list[int]] = [[] for _ in range(max(node_of_rank) + 1)]
    for rank, node in enumerate(node_of_rank):
        nodes[node].append(rank)
    rounds = tournament([ranks[0] for ranks in nodes])
    inside = [tournament(ranks) for ranks in nodes]
    for number in range(max(map(len, inside))):
        rounds.append([pair for mine in inside if number < len(mine) for pair in mine[number]])
    links = []
    for pairs in rounds:
        _wait_for_all(comm)
        mine = next((pair for pair in pairs if comm.rank in pair), None)
        if mine is not None:
            latency, bandwidth = _ping_pong(comm, mine)
            if comm.rank == mine[0]:
                at = [node_of_rank[rank] for rank in mine]
                links.append({"ranks": list(mine), "nodes": at, "latency_us": latency, "gb_per_s": bandwidth})
    _wait_for_all(comm)
    return links


def compute_ms() -> float:
    """Return how long this rank takes for a product of matrices, milliseconds, best of several."""
    a = np.random.default_rng(0).normal(size=(_COMPUTE_SIZE, _COMPUTE_SIZE)).astype(np.float32)
    return 1e3 * _best(lambda: a @ a)


def tournament(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which all players meet once (the circle method), or the first of them."""
    circle: list[int | None] = list(players)
    if len(circle) % 2:
        circle.append(None)
    rounds = []
    for _ in range(min(len(circle) - 1, _ROUNDS)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return rounds


def slow_links(links: Sequence[Link]) -> list[str]:
    """Names the nodes and links that are slower than others of their kind, between nodes or inside."""
    found = []
    between = [link for link in links if link["nodes"][0] != link["nodes"][1]]
    inside = [link for link in links if link["nodes"][0] == link["nodes"][1]]
    for kind, where in ((between, "its links to other nodes"), (inside, "links inside it")):
        if not kind:
            continue
        latency, bandwidth = usual = _usual(kind)
        slow = [
            link
            for link in kind
            if link["gb_per_s"] * _SLOW < bandwidth or link["latency_us"] > _SLOW * latency + _LATENCY_NOISE_US
        ]
        for node in sorted({node for link in slow for node in link["nodes"]}):
            mine = [link for link in kind if node in link["nodes"]]
            if len(mine) < len(kind) and all(link in slow for link in mine):
                found.append(f"node {node} is slow: {where} {_speed(_median(mine))}, usual are {_speed(usual)}")
                slow = [link for link in slow if link not in mine]
        for link in slow:
            ends = " and ".join(f"rank {r} on node {n}" for r, n in zip(link["ranks"], link["nodes"], strict=True))
            found.append(f"the link of {ends} is slow: {_speed(_median([link]))}, usual are {_speed(usual)}")
    return found


def slow_ranks(milliseconds: Sequence[float]) -> list[str]:
    """Names the ranks that compute more slowly than the others."""
    median = float(np.median(milliseconds))
    return [
        f"rank {rank} is slow: it computes for {own:.1f} ms what takes the median of all ranks {median:.1f} ms"
        for rank, own in enumerate(milliseconds)
        if own > _SLOW * median
    ]


def summary(links: Sequence[Link]) -> dict[str, dict[str, float]]:
    """Return medians of latency and bandwidth, "between" nodes and "inside" them, of those that there are."""
    kinds: dict[str, list[Link]] = {"between": [], "inside": []}
    for link in links:
        kinds["inside" if link["nodes"][0] == link["nodes"][1] else "between"].append(link)
    return {
        kind: dict(zip(("latency_us", "gb_per_s"), _median(some), strict=True)) for kind, some in kinds.items() if some
    }


def _usual(links: Sequence[Link]) -> tuple[float, float]:
    latencies = sorted(link["latency_us"] for link in links)
    bandwidths = sorted((link["gb_per_s"] for link in links), reverse=True)
    place = int(_USUAL * (len(links) - 1))
    return latencies[place], bandwidths[place]


def _median(links: Sequence[Link]) -> tuple[float, float]:
    latency, bandwidth = (float(np.median([link[name] for link in links])) for name in ("latency_us", "gb_per_s"))
    return latency, bandwidth


def _speed(speed: tuple[float, float]) -> str:
    return f"{speed[0]:.1f} us, {speed[1]:.2f} GB/s"


def _ping_pong(comm: Any, pair: tuple[int, int]) -> tuple[float, float]:
    other = pair[1] if comm.rank == pair[0] else pair[0]
    first = comm.rank == pair[0]

    def play(buffer: np.ndarray) -> None:
        for turn in (first, not first):
            if turn:
                comm.Send(buffer, other)
            else:
                comm.Recv(buffer, other)

    small, large = np.zeros(8, np.uint8), np.zeros(_BYTES, np.uint8)
    latency = _best(lambda: play(small), repeat=_PINGS) / 2
    return 1e6 * latency, _BYTES / (_best(lambda: play(large)) / 2) / 1e9


def _best(work: Callable[[], Any], repeat: int = 1) -> float:
    """Return seconds."""
    times = []
    for _ in range(1 + _TRIES):
        begin = time.perf_counter()
        for _ in range(repeat):
            work()
        times.append((time.perf_counter() - begin) / repeat)
    return min(times[1:])  # the first one warms up


def _wait_for_all(comm: Any) -> None:
    """A barrier that leaves the cores to those who still measure."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
