"""Ranks that fail at random moments, round after round: `random_failures.py FOLDER SEED ROUNDS`. See moments.py."""

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from keras_hpc import _native
from keras_hpc.job import launch
from keras_hpc.spatial import geometry

sys.path.append(str(Path(__file__).parents[1]))
import moments

folder, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
world = launch.connect(None)
comm, rank, size = world.comm, world.rank, world.size
real_nodes = list(world.node_of_rank)
pids = comm.allgather(os.getpid())
ROUND_SECONDS = 90
OWN = -7.0  # what the program writes where it has got its memory back
engine = ctypes.CDLL(str(Path(_native.__file__).with_name("libkeras_hpc.so")))
DONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


class Boom(Exception):
    """Of the user's own program."""


class Failed(Exception):
    """An error of the engine, by a callback."""


def as_bytes(array):
    return array.view(np.uint8)


class Work:
    """One rank's calls of one team, in a random order that is the same on all ranks."""

    def __init__(self, team, number, one, between):
        self.team, self.number, self.between = team, number, between
        self.chance = random.Random(f"{seed} {one} {number}")
        self.mine = random.Random(f"{seed} {one} {number} {rank}")
        self.step, self.doing, self.wrong = 0, "begins", []
        largest = one.largest
        counts = [10, self.chance.randrange(1, largest), self.chance.randrange(largest // 2, largest)]
        specs = [(f"t{i}", "float32", count) for i, count in enumerate(counts)]
        self.plans = {
            "sum": team.plan("sum", specs, "sum", False),
            "mean": team.plan("mean", specs[:2], "mean", True),
            "segment": team.plan("segment", specs[1:], "sum", False, "", True),
        }
        self.arrays = {
            name: [np.zeros(count, np.float32) for _, _, count in (specs[:2] if name == "mean" else specs)]
            for name in ("sum", "mean")
        }
        self.segment = [self.plans["segment"].memory(i).view(np.float32) for i in range(2)]
        self.area = team.empty(4 * max(1, largest // 4)).view(np.float32)
        self.array = np.zeros(counts[2], np.float32)
        move = geometry.move(4 * size, size, [(0, 4 * size)] * size, rank)
        sends = [(other, *rows) for other, rows in move.sends]
        args = (move.extent, move.own, move.pads, 0.0, sends, list(move.receives), move.lower, 1, (0, 0))
        self.rows = _native.make_exchange(team, "rows", "", *args)
        self.all = np.zeros(size * (counts[2] // 8 + 1), np.float32)
        self.kinds = [self.plan, self.plan, self.asynchronous, self.in_segment, self.call, self.call, self.push]
        self.kinds += [self.broadcast, self.allgather, self.exchange, self.barrier, self.make]

    def run(self, steps):
        while self.step < steps:
            self.step += 1
            self.between()
            kind = self.chance.choice(self.kinds)
            self.doing = kind.__name__
            kind()

    def value(self, of):
        return float(of + 1 + 8 * (self.step % 100))

    def expect(self, array, value):
        if not np.all(array == np.float32(value)):
            places = np.flatnonzero(array != np.float32(value))
            self.wrong.append(
                f"step {self.step} {self.doing}: {places.size} of {array.size} from {places[0]} are "
                f"{array[places[0]]}, not {value}"
            )

    @property
    def sum(self):
        return sum(map(self.value, range(size)))

    def start(self, name, arrays, weight=1.0):
        order = list(range(len(arrays)))
        self.mine.shuffle(order)
        for i in order:
            arrays[i][:] = self.value(rank)
            self.plans[name].start(i, as_bytes(arrays[i]), weight)
            self.between()
        self.mine.shuffle(order)
        return order

    def plan(self):
        name = self.chance.choice(["sum", "mean"])
        arrays = self.arrays[name]
        # Equal weights: the mean is as exact as the sum.
        order = self.start(name, arrays)
        for i in order:
            self.plans[name].wait(i)
            if name == "sum":
                self.expect(arrays[i], self.sum)
            elif not np.allclose(arrays[i], self.sum / size, rtol=1e-6):
                self.wrong.append(f"step {self.step}: a mean is {arrays[i][0]}, not {self.sum / size}")

    def asynchronous(self):
        self.start("sum", self.arrays["sum"])
        over, errors = threading.Event(), []

        def done(_, error):
            errors.append(error)
            over.set()

        callback = DONE(done)
        self.kept = callback
        status = engine.khpc_wait_all_async(self.plans["sum"].id, callback, None)
        if status == 1:
            engine.khpc_last_error.restype = ctypes.c_char_p
            raise Failed(engine.khpc_last_error().decode())
        if status == 2:
            self.plans["sum"].wait_all()
        else:
            assert over.wait(ROUND_SECONDS)
            if len(errors) != 1:
                self.wrong.append("called back twice")
            if errors[0] is not None:
                raise Failed(errors[0].decode())
        for array in self.arrays["sum"]:
            self.expect(array, self.sum)

    def in_segment(self):
        for i in self.start("segment", self.segment):
            self.plans["segment"].wait(i)
        for array in self.segment:
            self.expect(array, self.sum)

    def call(self):
        self.array[:] = self.value(rank)
        wire = self.chance.choice(["", "", "bfloat16"])
        self.team.allreduce(as_bytes(self.array), "float32", "sum" if not wire else "max", "", wire)
        if not wire:
            self.expect(self.array, self.sum)

    def push(self):
        self.area[:] = self.value(rank)
        self.team.allreduce(as_bytes(self.area), "float32", "sum")
        self.expect(self.area, self.sum)
        self.team.barrier()  # before it is written again

    def broadcast(self):
        root = self.chance.randrange(size)
        self.array[:] = self.value(rank)
        self.team.broadcast(as_bytes(self.array), root)
        self.expect(self.array, self.value(root))

    def allgather(self):
        count = self.all.size // size
        self.array[:count] = self.value(rank)
        self.team.allgather(as_bytes(self.array[:count]), as_bytes(self.all), [4 * count] * size)
        for other in range(size):
            self.expect(self.all[other * count : (other + 1) * count], self.value(other))

    def exchange(self):
        inner = max(1, min(self.array.size, self.all.size) // (4 * size))
        mine, out = self.array[: 4 * inner], np.zeros(4 * size * inner, np.float32)
        mine[:] = self.value(rank)
        self.rows.run(as_bytes(mine), as_bytes(out), 1, inner, "float32", False)
        for other in range(size):
            self.expect(out[4 * other * inner : 4 * (other + 1) * inner], self.value(other))

    def barrier(self):
        self.team.barrier()

    def make(self):
        """A plan for one step."""
        count = self.chance.randrange(1, 100_000)
        plan = self.team.plan(f"made {self.step}", [("a", "float32", count)], "sum", False)
        x = np.full(count, self.value(rank), np.float32)
        plan.start(0, as_bytes(x))
        plan.wait(0)
        self.expect(x, self.sum)
        self.team.barrier()
        plan.end()

    def private(self):
        return [self.array, self.all, *self.arrays["sum"], *self.arrays["mean"]]

    def take_back(self):
        for array in (*self.private(), self.area, *self.segment):
            array[:] = OWN

    def look_back(self, when):
        for i, array in enumerate(self.private()):
            if not np.all(array == OWN):
                self.wrong.append(f"array {i} was written to {when}")


def fork():
    """As programs do that read data in processes of their own, whatever other threads are doing."""
    child = os.fork()
    if child == 0:
        try:
            status = 0
            for team in teams:
                with contextlib.suppress(_native.Error):
                    team.barrier()
                    status = 1
            time.sleep(random.choice([0, 0.3]))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def wait_for_all(request):
    """MPI goes on meanwhile, as in any call of a program."""
    while not request.Test():
        time.sleep(0.001)


def play(number, one):
    """One round. Returns what its teams have told."""
    global teams
    faulthandler.dump_traceback_later(ROUND_SECONDS, exit=True)
    world.node_of_rank = list(one.nodes or real_nodes)
    # Making a team is not what is given up here: ranks meet in MPI, which blocks.
    teams = [_native.Team(world.transport(), t, one.threads, one.timeouts[rank], 30.0) for t in range(one.teams)]
    failed_at = [0.0]

    def between():
        if one.kind in ("raise", "late") and rank == one.victim and time.monotonic() > due:
            if one.kind == "raise":
                raise Boom
            if not failed_at[0]:
                failed_at[0] = time.monotonic()
                time.sleep(moments.STOPPED)

    works = []
    for t, team in enumerate(teams):
        for place, way in (("network", "pairwise"), ("private", "staged"), ("segment", "push")):
            team.add_choice(place, 0, 2**62, way)
        works.append(Work(team, t, one, between if t == 0 else (lambda: None)))
    told = []

    def run(work):
        text = "done"
        try:
            work.run(10**9 if one.fails(work.number) else moments.STEPS)
        except (_native.Error, Failed) as error:
            text = str(error)
        except Boom:
            text = "boom"
            work.team.close()
        except BaseException as error:  # noqa: BLE001 - to be told
            text = f"{type(error).__name__}: {error}"
        now = time.monotonic()
        if text != "done":
            work.take_back()
        told.append(moments.Told(rank, work.number, text, now, work.step, work.doing, work.wrong))

    wait_for_all(comm.Ibarrier())
    due = time.monotonic() + one.moment

    def fail():
        time.sleep(max(0.0, due - time.monotonic()))
        failed_at[0] = time.monotonic()
        if one.kind == "kill":
            if one.child and os.fork() == 0:
                time.sleep(6)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif one.kind == "stop":
            os.kill(pids[one.victim], signal.SIGSTOP)
            time.sleep(moments.STOPPED)
            os.kill(pids[one.victim], signal.SIGCONT)
        elif one.kind == "pause":  # by a process that is none of them
            everyone = " ".join(map(str, pids))
            script = f"kill -STOP {everyone}; sleep {moments.STOPPED}; kill -CONT {everyone}"
            subprocess.run(["sh", "-c", script], check=True)
        elif one.kind == "close":
            teams[0].close()
        elif one.kind == "fork":
            fork()

    failing = rank == (one.agent if one.kind == "stop" else one.victim) and one.kind not in ("raise", "late")
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    threads += [threading.Thread(target=fail)] * failing
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin = due if not failed_at[0] else failed_at[0]
    for t in told:
        t.seconds -= begin  # the clock is the machine's
    if one.kind == "kill":
        for team in teams:
            team.close()
        return told
    wait_for_all(comm.Ibarrier())
    for t, work in zip(sorted(told, key=lambda t: t.team), works, strict=True):
        if t.text != "done":
            work.look_back("after its error")
        t.wrong = work.wrong
    for team in teams:
        team.close()
    wait_for_all(comm.Ibarrier())
    for t, work in zip(sorted(told, key=lambda t: t.team), works, strict=True):
        if t.text != "done":
            work.look_back("after its team's end")
    return told


teams = []
own_nodes = max(real_nodes) == 0
kinds = os.environ.get("KINDS", "")
if rank == 0:
    (folder / "nodes").write_text(json.dumps(real_nodes))
with (folder / f"rank-{rank}").open("w", buffering=1) as log:
    for number in range(rounds + 1):
        one = moments.draw(seed, number, size, last=number == rounds, own_nodes=own_nodes, kinds=kinds)
        told = play(number, one)
        log.write(json.dumps([dataclasses.asdict(t) for t in told]) + "\n")
        del told
        gc.collect()
        if rank == 0:
            sys.stdout.write(f"round {number} is over: {one}\n")
            sys.stdout.flush()
    (folder / f"over-{rank}").touch()
    # The launcher ends all when the first one ends that has not left MPI.
    end = time.monotonic() + 30
    while len(list(folder.glob("over-*"))) < size - 1 and time.monotonic() < end:
        time.sleep(0.01)
    (folder / "over").touch()
os._exit(0)
