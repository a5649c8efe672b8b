"""The engine with ranks as threads: programs that live on after errors, close while others wait, fork, are stopped."""

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from in_process import SOON, as_bytes, caught, run, run_with_limits, soak

from keras_hpc import _native


@pytest.mark.parametrize("in_segment", [False, True])
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], *soak([0, 0, 1, 1])], ids=str)
def test_after_an_error_the_memory_is_the_callers_again(nodes, threads, in_segment):
    """Rank 0 waits in vain and uses its array for something else; then the late rank comes."""
    count, size, given_up = 700_000, len(nodes), threading.Event()
    everyone = threading.Barrier(size)

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", count)], "sum", False, "", in_segment)
        x = plan.memory(0).view(np.float32) if in_segment else np.empty(count, np.float32)
        x[:] = rank + 1
        everyone.wait(30)
        if rank == size - 1:
            assert given_up.wait(30)
        if rank == 0:
            plan.start(0, as_bytes(x))
            text, _ = caught(lambda: plan.wait(0))
            x[:] = -7
            given_up.set()
            everyone.wait(30)
            # With others of its node it shares the segment: they may write there until they know.
            assert in_segment or np.all(x == -7), text
            return
        # Whoever got its sum in spite of that has the right one, and whoever did not has an error.
        with contextlib.suppress(_native.Error):
            plan.start(0, as_bytes(x))
            plan.wait(0)
            assert np.all(x == size * (size + 1) / 2)
        everyone.wait(30)

    run_with_limits(nodes, work, threads, lambda rank: 0.3 if rank == 0 else 0.8)


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 0, 1], [0, 0, 0, 1, 1]], ids=str)
def test_a_sum_of_what_a_rank_has_taken_back_is_an_error(nodes):
    """In memory that ranks share, others read a rank's array directly."""
    given_up, everyone = threading.Event(), threading.Barrier(len(nodes))

    def work(team, rank):
        x = team.empty(400_000).view(np.float32)
        x[:] = 1
        everyone.wait(30)
        if rank == 0:
            caught(lambda: team.allreduce(as_bytes(x), "float32", "sum", "push"))
            x[:] = -1000
            given_up.set()
        else:
            assert given_up.wait(30)
            caught(lambda: team.allreduce(as_bytes(x), "float32", "sum", "push"))
        everyone.wait(30)

    run_with_limits(nodes, work, 0, lambda rank: 0.3 if rank == 0 else 1.0)


@pytest.mark.parametrize("what", ["call", "plan"])
def test_a_sum_of_what_a_closed_team_has_given_back_is_an_error(what):
    """A rank that is to add up nothing itself, so nobody waits for its part, is closed by another thread of it."""
    given_back, everyone = threading.Event(), threading.Barrier(3)

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", 100_000)], "sum", False, "", True)
        x = (team.empty(400_000) if what == "call" else plan.memory(0)).view(np.float32)
        x[:] = 1
        everyone.wait(30)

        def reduce():
            if what == "call":
                team.allreduce(as_bytes(x), "float32", "sum", "push")
            else:
                plan.start(0, as_bytes(x))
                plan.wait(0)

        if rank == 1:
            threading.Timer(0.2, team.close).start()
            assert "team is closed" in caught(reduce)[0]
            x[:] = -1000
            given_back.set()
        else:
            assert given_back.wait(30)
            assert "rank 1" in caught(reduce)[0]
        everyone.wait(30)

    run_with_limits([0, 0, 1], work, 0, lambda rank: 5.0)


@pytest.mark.parametrize("call", ["allreduce", "barrier", "broadcast", "plan", "async plan"])
def test_an_error_of_a_rank_is_soon_known_to_the_others_of_its_node(call):
    failed, everyone = threading.Event(), threading.Barrier(2)

    def work(team, rank):
        x = np.ones(1000, np.float32)
        plans = [team.plan(name, [("a", "float32", 1000)], "sum", False) for name in "ab"]
        if rank == 1:
            plans[0].start(0, as_bytes(x))
            assert "Missing, as far as this rank sees: rank 0" in caught(lambda: plans[0].wait(0))[0]
            failed.set()
        else:
            assert failed.wait(30)
            calls = {
                "allreduce": lambda: team.allreduce(as_bytes(x), "float32", "sum"),
                "barrier": team.barrier,
                "broadcast": lambda: team.broadcast(as_bytes(x), 1),
                "plan": lambda: (plans[1].start(0, as_bytes(x)), plans[1].wait(0)),
                "async plan": lambda: (plans[1].start(0, as_bytes(x)), plans[1].wait(0)),
            }
            text, seconds = caught(calls[call])
            assert "rank 1 has given up waiting for this rank" in text
            assert seconds < SOON
            assert caught(calls[call])[0] == text  # an error is the team's
        everyone.wait(30)

    run_with_limits([0, 0], work, int(call == "async plan"), lambda rank: 0.5 if rank == 1 else 40.0)


@pytest.mark.parametrize("threads", [0, 1])
def test_the_rank_that_is_missing_is_named_and_not_the_one_that_gave_up_first(threads):
    everyone = threading.Barrier(3)

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", 1000)], "sum", False)
        x = np.ones(1000, np.float32)
        if rank < 2:
            plan.start(0, as_bytes(x))
            text, seconds = caught(lambda: plan.wait(0))
            assert "rank 2" in text
            assert rank == 1 or "rank 1 has given up waiting for rank 2" in text
            assert seconds < SOON
        everyone.wait(30)

    run_with_limits([0, 0, 0], work, threads, lambda rank: 1.0 if rank == 1 else 40.0)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=str)
@pytest.mark.parametrize("threads", [0, 1, 2])
@pytest.mark.parametrize("what", ["plan", "call"])
def test_closing_ends_the_waits_of_other_threads(nodes, threads, what):
    everyone = threading.Barrier(len(nodes))

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", 100_000)], "sum", False)
        x = np.ones(100_000, np.float32)
        found = []

        def wait():
            plan.start(0, as_bytes(x))
            found.append(caught(lambda: plan.wait(0))[0])

        def call():
            found.append(caught(lambda: team.allreduce(as_bytes(x), "float32", "sum"))[0])

        if rank == 0:
            waiter = threading.Thread(target=wait if what == "plan" else call)
            waiter.start()
            time.sleep(0.3)
            begin = time.monotonic()
            team.close()
            waiter.join(30)
            assert time.monotonic() - begin < 1
            assert "team is closed" in found[0]
            x[:] = 0
        everyone.wait(30)

    run_with_limits(nodes, work, threads, lambda rank: 40.0)


@pytest.mark.parametrize("ended", ["plan", "team"])
def test_use_after_close_and_after_the_end_of_a_plan(ended):
    x = np.ones(4, np.float32)
    team = _native.Team(_native.in_process_transports([0])[0], 0, 0, 1.0, 1.0)
    plan = team.plan("p", [("a", "float32", 4)], "sum", False, pipelined=True)
    kept = plan.memory(0)
    plan.end() if ended == "plan" else team.close()
    for call in (
        lambda: plan.start(0, as_bytes(x)),
        lambda: plan.wait(0),
        lambda: plan.memory(0),
        lambda: plan.second(0, as_bytes(x)),
        lambda: plan.take([as_bytes(x)], False),
        lambda: plan.put([as_bytes(x)]),
        lambda: plan.set_schedule(1, 1),
        plan.updates,
        plan.outstanding,
        plan.end,
    ):
        assert f"{ended} {'has ended' if ended == 'plan' else 'is closed'}" in caught(call)[0]
    kept[:] = 1  # the memory lives as long as somebody has it
    team.close()
    for call in (team.barrier, team.report, lambda: team.empty(8), lambda: team.allgather_count(1)):
        assert "closed" in caught(call)[0]
    team.leave()
    team.close()


@pytest.mark.parametrize("threads", [0, 1])
def test_a_forked_child_does_no_harm(threads):
    everyone = threading.Barrier(2)

    def work(team, rank):
        plan = team.plan("p", [("a", "float32", 1000)], "sum", False)
        x = np.ones(1000, np.float32)
        if rank == 0:
            child = os.fork()
            if child == 0:
                errors = 0
                calls = (lambda: plan.start(0, as_bytes(x)), lambda: plan.wait(0), team.barrier, lambda: plan.memory(0))
                for call in calls:
                    try:
                        call()
                    except _native.Error as error:
                        errors += "forked from a rank" in str(error)
                team.leave()
                team.close()
                os._exit(0 if errors == len(calls) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        everyone.wait(30)
        plan.start(0, as_bytes(x))
        plan.wait(0)
        assert np.all(x == 2)

    run([0, 0], work, threads)


def script(body):
    """Runs a Python program of its own, whose main thread is the process'; returns its output."""
    head = """
        import os, resource, signal, sys, threading, time
        import numpy as np
        from keras_hpc import _native
    """
    program = textwrap.dedent(head) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("waiting", ["auto", "sleep", "spin", "yield"])
@pytest.mark.parametrize("call", ["plan.wait(0)", "team.barrier()", "team.broadcast(x.view(np.uint8), 1)"])
def test_ctrl_c_ends_a_wait(call, waiting):
    if waiting != "auto" and not call.startswith("plan"):
        return
    script(f"""
        transports = _native.in_process_transports([0, 0])
        teams = {{}}

        def make(rank):
            teams[rank] = _native.Team(transports[rank], 0, 0, 50.0, 50.0, {waiting!r})
            return teams[rank].plan("p", [("a", "float32", 10)], "sum", False)

        other = threading.Thread(target=make, args=(1,))
        other.start()
        plan, team = make(0), teams[0]
        other.join()
        x = np.ones(10, np.float32)
        plan.start(0, x.view(np.uint8))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit that it is ignored
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            {call}
            sys.exit("no exception")
        except KeyboardInterrupt:
            pass
        assert time.monotonic() - begin < 2.5, time.monotonic() - begin
        try:
            team.barrier()
            sys.exit("the team goes on")
        except _native.Error as error:
            assert "signal" in str(error), error
    """)


def test_a_thread_that_cannot_be_started_is_an_error():
    script("""
        transports = _native.in_process_transports([0, 0])
        found = []

        def make(rank):
            try:
                team = _native.Team(transports[rank], 0, 60, 5.0, 5.0)
                team.close()
            except _native.Error as error:
                found.append(str(error))

        size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize"))
        ranks = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
        resource.setrlimit(resource.RLIMIT_AS, ((size << 10) + (350 << 20),) * 2)
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(30)
            assert not thread.is_alive()
        assert any("Cannot start a communication thread" in text for text in found), found
    """)


@pytest.mark.soak
def test_a_measurement_that_fails_is_an_error_of_the_team():
    """Rank 2 measures nothing, and so does not come: rank 0 hears of it from rank 1, which has less patience."""
    together = threading.Barrier(3)

    def work(team, rank):
        if rank == 2:
            team.add_choice("network", 0, 2**62, "ring")
            team.agree("The tensors of plan 'p'", ["sum", "t: 100000 x float32"])
        else:
            first, _ = caught(lambda: team.plan("p", [("t", "float32", 100_000)], "sum", False))
            second, seconds = caught(team.barrier)
            assert (second, seconds < 1) == (first, True)
        together.wait(30)

    run_with_limits([0, 0, 1], work, 0, lambda rank: 1.0 if rank == 1 else 40.0, measured=True)


def test_the_limits_of_control_groups_are_known(tmp_path):
    """Of a container on a host with the second version, and of a batch job on one with the first."""

    def write(root, files):
        for name, text in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    write(
        tmp_path / "second",
        {
            "proc/self/cgroup": "0::/pods/mine\n",
            "proc/self/mountinfo": "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/pods/mine/memory.max": "max\n",
            "sys/fs/cgroup/pods/mine/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pods/memory.max": "1000000\n",
            "sys/fs/cgroup/pods/memory.current": "700000\n",
            "sys/fs/cgroup/pods/memory.stat": "anon 500000\ninactive_file 200000\n",
            "sys/fs/cgroup/pods/cpu.max": "max 100000\n",
        },
    )
    second = _native.control_group(str(tmp_path / "second"))
    assert (second.memory_limit, second.memory_left, second.cores) == (1_000_000, 500_000, 1.5)
    write(
        tmp_path / "first",
        {
            "proc/self/cgroup": "4:memory:/slurm/job_7\n1:cpu,cpuacct:/slurm/job_7\n0::/\n",
            "proc/self/mountinfo": (
                "30 1 0:26 /slurm /cg/memory rw - cgroup cgroup rw,memory\n"
                "31 1 0:27 / /cg/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
            ),
            "cg/memory/job_7/memory.limit_in_bytes": "4096\n",
            "cg/memory/job_7/memory.usage_in_bytes": "8192\n",
            "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cg/cpu/slurm/job_7/cpu.cfs_quota_us": "-1\n",
            "cg/cpu/slurm/job_7/cpu.cfs_period_us": "100000\n",
            "cg/cpu/slurm/cpu.cfs_quota_us": "300000\n",
            "cg/cpu/slurm/cpu.cfs_period_us": "100000\n",
        },
    )
    first = _native.control_group(str(tmp_path / "first"))
    assert (first.memory_limit, first.memory_left, first.cores) == (4096, 0, 3.0)
    write(  # it sees the tree of a neighbour whose name its own begins with
        tmp_path / "beside",
        {
            "proc/self/cgroup": "0::/job_123\n",
            "proc/self/mountinfo": "30 1 0:26 /job_1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/memory.max": "4096\n",
        },
    )
    assert _native.control_group(str(tmp_path / "beside")).memory_limit == 4096
    nothing = _native.control_group(str(tmp_path))
    assert nothing.memory_left == 2**64 - 1
    assert nothing.cores == float("inf")
