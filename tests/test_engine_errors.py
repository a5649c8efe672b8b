"""The engine with ranks as threads: what ranks are told that disagree, come late, leave or misuse it."""

import re
import threading
import time

import numpy as np
import pytest
from in_process import SOON, as_bytes, caught, run, run_with_limits
from test_engine_failures import script

from keras_hpc import _native


def test_a_mismatch_names_the_first_difference():
    def plans(team, rank):
        with pytest.raises(_native.PlanMismatchError, match=r"number 2: .*dense/bias: 3 x float32' on rank 1"):
            team.plan("p", [("a", "float32", 1), ("dense/bias", "float32", 3 if rank == 1 else 4)], "sum", False)

    def calls(team, rank):
        x = np.zeros(3 + (rank == 1), np.float32)
        with pytest.raises(_native.Error, match=r"(disagree|sum of 4 x float32)"):
            team.allreduce(as_bytes(x), "float32", "sum")

    run([0, 0, 0], plans)
    run([0, 1, 1], plans)
    run([0, 0], calls)
    run([0, 1], calls)


@pytest.mark.parametrize("before", [10, 5_000_000])
@pytest.mark.parametrize("begun", [False, True])
def test_a_rank_that_does_not_come_is_named_after_the_time_limit(before, begun):
    """Also where the tensor is far from the first that has a place in shared memory, 20 MB before it."""
    text = r"dense/kernel.*gradients.*step 1.*Missing, as far as this rank sees: rank 2\."

    def work(team, rank):
        plan = team.plan("gradients", [("embedding", "float32", before), ("dense/kernel", "float32", 10)], "mean", True)
        embedding = np.zeros(before, np.float32)  # which the engine uses until the end
        if rank != 2 or begun:
            plan.start(0, as_bytes(embedding))
        if rank != 2:
            plan.start(1, as_bytes(np.zeros(10, np.float32)))
            with pytest.raises(_native.TimeoutError, match=text):
                plan.wait(1)
        return embedding  # alive until the team is closed: rank 2 has started it, and waits for nothing

    for threads in (0, 1):
        run([0, 0, 0], work, threads, timeout=0.3)


def test_a_rank_that_left_is_an_error_at_once():
    def work(team, rank):
        plan = team.plan("gradients", [("t", "float32", 10)], "mean", True)
        if rank == 1:
            team.leave()
        else:
            plan.start(0, as_bytes(np.zeros(10, np.float32)))
            with pytest.raises(_native.Error, match="rank 1 has already left"):
                plan.wait(0)

    for threads in (0, 1):
        run([0, 0, 0], work, threads, timeout=30)


@pytest.mark.parametrize("threads", [0, 1])
def test_a_rank_that_left_in_the_middle_of_a_step_is_named_on_all_nodes(threads):
    """It has given its node all, and leaves before its slice has come from the other node."""
    nodes, left, everyone = [0, 0, 1, 1], threading.Event(), threading.Barrier(4)

    def work(team, rank):
        x = np.ones(100_000, np.float32)  # two owners a node
        plan = team.plan("p", [("t", "float32", x.size)], "sum", False)
        everyone.wait(30)
        if rank > 1:
            assert left.wait(30)
        plan.start(0, as_bytes(x))
        if rank == 1:
            time.sleep(0.1)  # its thread has packed it
            team.close()
            left.set()
        else:
            text, seconds = caught(lambda: plan.wait(0))
            assert "rank 1" in text
            assert seconds < SOON + 1
        everyone.wait(30)

    run(nodes, work, threads)


def test_misuse_is_an_error():
    def work(team, rank):
        plan = team.plan("p", [("t", "float32", 10)], "sum", False)
        x = np.zeros(10, np.float32)
        with pytest.raises(_native.Error, match="not started"):
            plan.wait(0)
        plan.start(0, as_bytes(x))
        with pytest.raises(_native.Error, match="started twice"):
            plan.start(0, as_bytes(x))
        plan.wait(0)
        with pytest.raises(IndexError):
            plan.start(1, as_bytes(x))
        with pytest.raises(ValueError, match=r"40 bytes in the plan. Received: 44"):
            plan.start(0, as_bytes(np.zeros(11, np.float32)))
        with pytest.raises(TypeError):
            plan.start(0, np.zeros(20, np.float32)[::2])
        with pytest.raises(_native.Error, match="Received: complex64"):
            team.plan("q", [("t", "complex64", 1)], "sum", False)

    run([0], work)
    team = _native.Team(_native.in_process_transports([0])[0], 0, 0, 1.0, 1.0)
    plan = team.plan("p", [("t", "float32", 10)], "sum", False)
    team.close()
    with pytest.raises(_native.Error, match="closed"):
        plan.start(0, np.zeros(40, np.uint8))


def test_a_collective_that_a_rank_never_joins_is_an_error_soon():
    def work(team, rank):
        if rank == 1:
            team.leave()
        else:
            with pytest.raises(_native.Error, match=r"in barrier .*rank 1 has already left"):
                team.barrier()

    run([0, 0], work, timeout=30)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=str)
def test_arrays_of_which_only_some_are_shared_are_an_error_on_all_ranks(nodes):
    """Also before anybody has measured which way they go."""

    def work(team, rank):
        shared = team.empty(400)
        for _ in range(2):
            with pytest.raises(_native.PlanMismatchError, match=r"x float32 in memory of keras_hpc.empty' on rank 0; "):
                team.allreduce(shared if rank == 0 else np.zeros(400, np.uint8), "float32", "sum")

    run(nodes, work)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 0, 1], [0, 1, 0, 1, 1], list(range(9))], ids=str)
def test_ranks_in_different_calls_are_told_and_go_on(nodes):
    def work(team, rank):
        x = np.ones(6, np.float32)
        calls = {
            "'barrier'": team.barrier,
            r"'allreduce: sum of 6 x float32, shape \(2, 3\)'": lambda: team.allreduce(
                as_bytes(x), "float32", "sum", shape=(2, 3)
            ),
            r"'losses: sum of 6 x float32, shape \(2, 3\)'": lambda: team.allreduce(
                as_bytes(x), "float32", "sum", what="losses", shape=(2, 3)
            ),
            r"'allreduce: sum of 6 x float32, shape \(3, 2\)'": lambda: team.allreduce(
                as_bytes(x), "float32", "sum", shape=(3, 2)
            ),
            "'a thing'": lambda: team.agree("", ["a thing"]),
            "'The things'": lambda: team.agree("The things", ["a", "b"]),
            r"'The tensors of plan 'p''": lambda: team.plan("p", [("t", "float32", 10)], "sum", False),
        }
        for usual in calls:
            for odd in calls:
                for odd_rank in {0, len(nodes) - 1}:
                    if odd == usual:
                        continue
                    with pytest.raises(_native.PlanMismatchError) as info:
                        calls[odd if rank == odd_rank else usual]()
                    assert info.match(f"{odd} on rank {odd_rank}")
                    assert info.match(usual)
        team.allreduce(as_bytes(x), "float32", "product")
        assert np.all(x == 1)

    run(nodes, work, timeout=30)


def test_who_does_not_come_to_a_call_of_mpi_is_named():
    """MPI says of no rank for whom it waits. Ranks of a node count in shared memory how often they have come."""
    everyone = threading.Barrier(3)

    def work(team, rank):
        x = np.zeros(10, np.uint8)
        if rank < 2:
            text, _ = caught(lambda: team.broadcast(x, 2))
            assert "not every rank arrived. Missing: rank 2." in text
        everyone.wait(30)

    run_with_limits([0, 0, 0], work, 0, lambda rank: 0.5)


@pytest.mark.parametrize("what", ["barrier", "plan"])
def test_a_rank_that_waits_in_the_call_before_is_not_named(what):
    """Rank 1 needs nothing of rank 2 in the first call, and then meets nobody, as rank 0 does."""
    everyone = threading.Barrier(3)

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", 10)], "sum", False)
        x = np.zeros(10, np.float32)
        everyone.wait(30)
        if rank < 2:
            received = [0, 0, 0 if rank else 40]
            if rank == 0:
                text, _ = caught(lambda: team.alltoall(x[:0].view(np.uint8), [0] * 3, as_bytes(x), received))
                assert "rank 1 has given up waiting for rank 2" in text
            else:
                team.alltoall(x[:0].view(np.uint8), [0] * 3, x[:0].view(np.uint8), received)
                time.sleep(0.1)
                calls = {"barrier": team.barrier, "plan": lambda: (plan.start(0, as_bytes(x)), plan.wait(0))}
                text, _ = caught(calls[what])
                assert re.findall(r"(?:for|sees:) rank ([\d, ]+)", text) == ["2"], text
        everyone.wait(30)

    run_with_limits([0, 0, 0], work, 0, lambda rank: 0.5 if rank == 1 else 40.0)


def test_a_neighbour_that_does_not_wait_is_named():
    """It has started its tensor, and then does something else: to rank 0 it may wait for the other node."""
    everyone = threading.Barrier(4)

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", 100_000)], "sum", False)
        x = np.ones(100_000, np.float32)
        everyone.wait(30)
        if rank != 1:
            time.sleep(0.1)
        plan.start(0, as_bytes(x))
        if rank == 0:
            assert "Missing, as far as this rank sees: rank 1." in caught(lambda: plan.wait(0))[0]
        elif rank > 1:
            assert "rank 1" in caught(lambda: plan.wait(0))[0]
        everyone.wait(30)

    run_with_limits([0, 0, 1, 1], work, 0, lambda rank: 2.5 if rank == 0 else 40.0)


def test_the_rank_whose_message_is_awaited_is_named():
    """Each node has one rank, so nobody else knows."""
    everyone = threading.Barrier(3)

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", 100_000)], "sum", False)
        x = np.ones(100_000, np.float32)
        if rank < 2:
            plan.start(0, as_bytes(x))
            assert "Missing, as far as this rank sees: rank 2." in caught(lambda: plan.wait(0))[0]
        everyone.wait(30)

    run_with_limits([0, 1, 2], work, 0, lambda rank: 0.5)


def test_who_leaves_after_its_part_of_an_exchange_is_no_error():
    """In a handler of a signal: after rank 0 has looked for its rows, and before it looks who is still there."""
    script("""
        transports = _native.in_process_transports([0, 0])
        arguments = [("x", "", 2, (0, 2), (0, 0), 0.0, [(1 - r, 0, 2)], [(1 - r, 2)], r, 1, (0, 0)) for r in range(2)]
        teams, exchanges = {}, {}

        def make(rank):
            teams[rank] = _native.Team(transports[rank], 0, 0, 20.0, 20.0)
            exchanges[rank] = _native.make_exchange(teams[rank], *arguments[rank])

        def run(rank):
            out = np.empty(4, np.float32)
            x = np.full(2, rank + 1, np.float32)
            exchanges[rank].run(x.view(np.uint8), out.view(np.uint8), 1, 1, "float32", False)
            assert np.all(out == [1, 1, 2, 2]), out
            teams[rank].leave()

        def come(*_):
            other = threading.Thread(target=run, args=(1,))
            other.start()
            other.join()

        other = threading.Thread(target=make, args=(1,))
        other.start()
        make(0)
        other.join()
        signal.signal(signal.SIGALRM, come)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        run(0)
    """)
