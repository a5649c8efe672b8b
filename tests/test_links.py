"""Which pairs of ranks are measured, and what is called slow."""

import itertools

import pytest

from keras_hpc.tools import network_probe


@pytest.mark.parametrize("count", range(1, 10))
def test_all_meet_once_in_disjoint_pairs(count):
    players = list(range(10, 10 + count))
    rounds = network_probe.tournament(players)
    for pairs in rounds:
        busy = [player for pair in pairs for player in pair]
        assert len(busy) == len(set(busy))
    met = [tuple(sorted(pair)) for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(players, 2))


def test_many_nodes_meet_some():
    rounds = network_probe.tournament(range(1000))
    assert len(rounds) == 32
    assert {player for player, _ in rounds[0]} | {player for _, player in rounds[0]} == set(range(1000))


def _links(speed):
    """Between the first ranks of four nodes with two ranks each; `speed(node, node)` gives latency and bandwidth."""
    return [
        {"ranks": [2 * a, 2 * b], "nodes": [a, b]} | dict(zip(("latency_us", "gb_per_s"), speed(a, b), strict=True))
        for a, b in itertools.combinations(range(4), 2)
    ]


def test_nothing_is_slow_where_all_are_alike():
    assert network_probe.slow_links(_links(lambda a, b: (10 + a, 2.0 - 0.1 * b))) == []
    assert network_probe.slow_links([]) == []
    assert network_probe.slow_links(_links(lambda a, b: (5 * a + 1, 2.0))) == [], "noise of a few microseconds"


def test_a_slow_link_is_named():
    (said,) = network_probe.slow_links(_links(lambda a, b: (10, 0.2 if (a, b) == (1, 3) else 2)))
    assert said.startswith("the link of rank 2 on node 1 and rank 6 on node 3 is slow: 10.0 us, 0.20 GB/s, usual are ")


def test_a_slow_node_is_named():
    (said,) = network_probe.slow_links(_links(lambda a, b: (10, 0.2 if 2 in (a, b) else 2)))
    assert said == ("node 2 is slow: its links to other nodes 10.0 us, 0.20 GB/s, usual are 10.0 us, 2.00 GB/s")


def test_latency_counts_too():
    (said,) = network_probe.slow_links(_links(lambda a, b: (100 if 0 in (a, b) else 10, 2)))
    assert said.startswith("node 0 is slow: its links to other nodes 100.0 us")


def test_a_slow_rank_is_named():
    assert network_probe.slow_ranks([1.0, 1.1, 1.2, 0.9]) == []
    (said,) = network_probe.slow_ranks([1.0, 1.1, 5.0, 0.9])
    assert said == "rank 2 is slow: it computes for 5.0 ms what takes the median of all ranks 1.1 ms"


def test_summary():
    inside = [{"ranks": [0, 1], "nodes": [0, 0], "latency_us": 1.0, "gb_per_s": 5.0}]
    assert network_probe.summary(inside) == {"inside": {"latency_us": 1.0, "gb_per_s": 5.0}}
    both = network_probe.summary(inside + _links(lambda a, b: (10, 2)))
    assert both["between"] == {"latency_us": 10, "gb_per_s": 2}
