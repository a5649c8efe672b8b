"""The engine with ranks as threads, on several nodes: an error of a rank reaches other nodes, too, and soon."""

import threading
import time

import numpy as np
import pytest
from in_process import SOON, as_bytes, caught, run_with_limits
from test_exchange import make

ROWS = 8


def make_calls(team, rank, size):
    """What ranks do together, by name; the last one does nothing, and asks later."""
    x = np.ones(ROWS * size, np.float32)
    plan = team.plan("p", [("a", "float32", x.size)], "sum", False)
    windows = [(0, ROWS * size)] * size
    one, move = make(team, rank, windows, ROWS * size)
    out = np.empty(move.rows, np.float32)
    return {
        "plan": lambda: (plan.start(0, as_bytes(x)), plan.wait(0)),
        "call": lambda: team.allreduce(as_bytes(x), "float32", "sum"),
        "exchange": lambda: one.run(as_bytes(x[:ROWS]), as_bytes(out), 1, 1, "float32", False),
        "broadcast": lambda: team.broadcast(as_bytes(x), size - 1),
        "idle": lambda: (time.sleep(SOON), team.allreduce(as_bytes(x), "float32", "sum")),
    }


@pytest.mark.parametrize(
    ("what", "nodes", "threads"),
    [
        ("plan", [0, 0, 1, 1], 1),
        ("call", [0, 1, 2, 3, 4, 5], 0),
        ("exchange", [0, 0, 1, 2], 0),
        ("broadcast", [0, 1, 2], 1),
        ("idle", [0, 0, 1, 1, 2], 1),
        *(
            pytest.param(what, nodes, threads, marks=pytest.mark.soak)
            for what in ("plan", "call", "exchange", "broadcast", "idle")
            for nodes in ([0, 1], [0, 1, 0, 1, 1], [0, 1, 2, 3, 4, 5, 6])
            for threads in (0, 1, 2)
            if threads or what != "idle"  # without a thread, a rank hears of it where it waits
        ),
    ],
)
def test_a_rank_that_gives_up_ends_the_waits_of_other_nodes(what, nodes, threads):
    """The last rank never comes; rank 0 has little patience, and the others have much."""
    size, everyone = len(nodes), threading.Barrier(len(nodes))

    def work(team, rank):
        calls = make_calls(team, rank, size)
        everyone.wait(30)
        if rank == 0:
            caught(calls["plan" if what == "idle" else what])
        elif rank < size - 1 or what == "idle":
            text, seconds = caught(calls[what])
            assert "has given up waiting for" in text or "rank 0 met an error" in text, text
            assert seconds < (SOON + 1 if what == "idle" else SOON), (seconds, text)
            assert caught(calls["call"])[0] == text  # an error is the team's
        everyone.wait(30)

    run_with_limits(nodes, work, threads, lambda rank: 0.5 if rank == 0 else 40.0)


@pytest.mark.parametrize("looks", [True, False])
def test_a_rank_without_a_thread_hears_where_somebody_looks(looks):
    """Rank 1 waits for nothing when rank 0 gives up, and tells rank 3, which alone hears of it from rank 1."""
    nodes, everyone = [0, 0, 1, 1], threading.Barrier(4)

    def work(team, rank):
        calls = make_calls(team, rank, 4)
        everyone.wait(30)
        if rank == 0:
            caught(calls["call"])
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            if looks:
                team.look_around()
            time.sleep(0.2)
        text, seconds = caught(calls["call"])
        assert "rank 1" in text or rank == 1
        assert rank == 0 or (seconds < 0.5) == looks, (rank, seconds)
        everyone.wait(30)

    run_with_limits(nodes, work, 0, lambda rank: 0.5 if rank == 0 else 40.0)


def test_a_rank_that_was_late_is_told_so_whatever_its_own_limit():
    """Once it comes, it waits for those that have given up, and not they are to blame."""
    everyone = threading.Barrier(2)

    def work(team, rank):
        calls = make_calls(team, rank, 2)
        everyone.wait(30)
        time.sleep(1.5 * rank)
        text, _ = caught(calls["call"])
        assert ("given up waiting for this rank" if rank == 1 else "rank 1") in text, text
        everyone.wait(30)

    run_with_limits([0, 0], work, 0, lambda rank: 1.0)


def test_who_waits_for_a_neighbour_that_waits_lets_that_one_speak_first():
    """Rank 0 knows that another node's rank 2 is missing, rank 1 only that rank 0 waits."""
    everyone = threading.Barrier(3)

    def work(team, rank):
        calls = make_calls(team, rank, 3)
        everyone.wait(30)
        if rank < 2:
            text, _ = caught(calls["call"])
            assert "rank 2" in text, text
        everyone.wait(30)

    run_with_limits([0, 0, 1], work, 0, lambda rank: 1.5 - 0.4 * rank)
