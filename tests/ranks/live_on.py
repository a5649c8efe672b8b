"""Ranks with a team of the engine, one of which fails: `live_on.py HOW`. See test_living_on.py."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from keras_hpc import _native
from keras_hpc.job import launch
from keras_hpc.spatial import geometry

how = sys.argv[1]
world = launch.connect(None)  # before MPI is imported: in containers it starts in another way
comm, rank, size = world.comm, world.rank, world.size


def say(text):
    sys.stdout.write(f"rank {rank}: {text}\n")
    sys.stdout.flush()


def team_with(timeout, threads=0, nodes=None):
    world.node_of_rank = nodes or world.node_of_rank
    team = _native.Team(world.transport(), 0, threads, timeout, 30.0)
    for place, way in (("network", "pairwise"), ("private", "staged")):
        team.add_choice(place, 0, 2**62, way)
    return team


def late_message(delay):
    """Rank 0 gives up while messages are on their way into the middle of an array; then they arrive."""
    team = team_with(0.7 if rank == 0 else 4.0, nodes=[0, 1])
    other = comm.bcast(os.getpid(), root=1)
    x = np.full(16_000_000, rank + 1, np.float32)
    comm.Barrier()
    if rank == 0:
        threading.Timer(delay, os.kill, (other, signal.SIGSTOP)).start()
        try:
            team.allreduce(x.view(np.uint8), "float32", "sum")
            say("got its sum before")
        except _native.Error as error:
            say(f"gave up: {error}")
            x[:] = -7
        time.sleep(max(0.0, delay))
        os.kill(other, signal.SIGCONT)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            comm.Iprobe()  # as any call of a program, it lets MPI go on
            time.sleep(0.001)
        assert np.all(x == -7) or np.all(x == 3)
        say("its memory is its own")
    else:
        try:
            team.allreduce(x.view(np.uint8), "float32", "sum")
            assert np.all(x == 3)
        except _native.Error as error:
            say(f"heard: {error}")
    comm.Barrier()
    say("lives on")


def gone(what, threads, victim=size - 1, late=False):
    """A rank dies in the middle of a step, or comes when the others have given up."""
    team = team_with(1.0 if late else 40.0, threads)
    plan = team.plan("p", [("a", "float32", 500_000)], "sum", False)
    move = geometry.move(4 * size, size, [(0, 4 * size)] * size, rank)
    sends = [(other, *rows) for other, rows in move.sends]
    args = (move.extent, move.own, move.pads, 0.0, sends, list(move.receives), move.lower, 1, (0, 0))
    rows = _native.make_exchange(team, "rows", "", *args)
    x = np.ones(500_000, np.float32).view(np.uint8)
    plan.start(0, x)
    plan.wait(0)
    comm.Barrier()
    if rank == victim and late:
        time.sleep(4.5)
    elif rank == victim:
        if os.fork() == 0:  # as a process that reads data, which ends later
            time.sleep(5)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        if what == "plan":
            plan.start(0, x)
            plan.wait(0)
        elif what == "exchange":
            rows.run(x[:16], np.empty(16 * size, np.uint8), 1, 1, "float32", False)
        elif what == "idle":
            time.sleep(5)
            begin = time.monotonic()
            team.barrier()
        elif what == "call":
            team.allreduce(x, "float32", "sum")
        elif what == "memory":
            team.empty(100_000)
        else:
            team.broadcast(x, victim)
        say("got a result of a rank that is not there")
    except _native.Error as error:
        say(f"after {time.monotonic() - begin:.1f} s: {error}")
    if late and rank != victim:
        time.sleep(8)  # until that one has said its own: UCX aborts who reads from a process that has ended


def stopped():
    """Rank 2 is stopped while it waits in MPI for rank 0, which then comes."""
    team = team_with(3.0)
    pids = comm.allgather(os.getpid())
    x = np.full(1_000_000, rank, np.uint8)
    comm.Barrier()
    if rank == 0:
        time.sleep(0.5)
        os.kill(pids[2], signal.SIGSTOP)
    try:
        team.allgather(x, np.empty(size * x.size, np.uint8), [x.size] * size)
        say("got a result of a rank that is stopped")
    except _native.Error as error:
        say(f"was told: {error}")
    if rank == 0:
        time.sleep(1)  # until rank 1 has heard
        os.kill(pids[2], signal.SIGCONT)
    elif rank == 1:
        time.sleep(3)


def forked():
    """A child that ends as Python programs do, with all that its parent has: it is no rank."""
    import keras_hpc

    keras_hpc.init(timeout_seconds=20)
    x = np.ones(1000, np.float32)
    assert np.all(keras_hpc.allreduce(x, "sum") == size)
    space = keras_hpc.empty(1000, "float32")
    space[:] = rank
    if rank == 1:
        child = os.fork()
        if child == 0:
            assert np.all(space == rank)
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.all(keras_hpc.allreduce(x, "sum") == size)
    keras_hpc.allreduce(space, "sum", out=space)
    assert np.all(space == size * (size - 1) / 2)
    say("went on")
    keras_hpc.finalize()


def suspended():
    """All ranks are stopped for longer than their time limit, as by a batch system: nobody is late then."""
    import keras_hpc

    keras_hpc.init(timeout_seconds=4, stall_seconds=2)
    if rank == 0:
        everyone = " ".join(map(str, comm.gather(os.getpid())))
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {everyone}; sleep 9; kill -CONT {everyone}"])
    else:
        comm.gather(os.getpid())
        for _ in range(25):  # so that its sleep is not over when it goes on
            time.sleep(0.1)
    assert np.all(keras_hpc.allreduce(np.ones(1000, np.float32), "sum") == size)
    say("went on")
    keras_hpc.finalize()


def without_threads():
    """Rank 0 gives up; the others wait for nothing, and have no threads of the engine that would hear of it."""
    import keras_hpc

    keras_hpc.init(threads_per_team=0, timeout_seconds=1 if rank == 0 else 60)
    if rank > 0:
        time.sleep(7)
    begin = time.monotonic()
    try:
        keras_hpc.barrier()
        say("has met the others")
    except keras_hpc.CommunicationError as error:
        say(f"after {time.monotonic() - begin:.1f} s: {error}")


def apart():
    """Containers: ranks of one host that do not see each other's processes."""
    team = team_with(20.0)
    x = np.full(1_000_000, rank + 1, np.float32)
    team.allreduce(x.view(np.uint8), "float32", "sum")
    assert np.all(x == size * (size + 1) / 2)
    plan = team.plan("p", [("a", "float32", 1_000_000)], "mean", True)
    plan.start(0, x.view(np.uint8), 1.0)
    plan.wait(0)
    comm.Barrier()
    say(f"nodes {world.node_of_rank}, process {os.getpid()}")
    team.close()


if how == "late-message":
    late_message(float(sys.argv[2]))
elif how in ("killed", "late"):
    gone(sys.argv[2], *map(int, sys.argv[3:]), late=how == "late")
elif how == "stopped":
    stopped()
elif how in ("forked", "suspended"):
    {"forked": forked, "suspended": suspended}[how]()
    sys.exit(0)
elif how == "without-threads":
    without_threads()
    time.sleep(9)  # until the others have said theirs, too
else:
    apart()
sys.stdout.flush()
os._exit(0)  # what was given up may never end
