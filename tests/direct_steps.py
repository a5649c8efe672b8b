"""What a rank has on a GPU that is not there, reduced from GPU to GPU by a fake NCCL, or a kernel."""

import contextlib
import ctypes
import functools
import threading
import time

import numpy as np
import pytest
from device_steps import COUNTS, DTYPES, Step, engine
from fake_cuda import Stream, Tensor, driver, nccl, nvrtc
from in_process import EVERY_SIZE, SOON, as_bytes, check, data_of, run

from keras_hpc import _native


class Ids:
    """One of NCCL's ids for each plan of all ranks, which are threads."""

    def __init__(self, size):
        nccl()
        _native.load_nccl()
        self._meeting = threading.Barrier(size, action=self._make)

    def _make(self):
        self._id = _native.nccl_id()

    def next(self):
        """Return the same on all ranks."""
        self._meeting.wait(30)
        return self._id

    def open(self, plan, rank):
        """Open a plan's device, whose number this returns. Collective."""
        plan.open_nccl(rank, self.next())
        return rank


class Nodes:
    """For plans that NCCL reduces within nodes, and the engine between them: an id for each node, and peers."""

    def __init__(self, nodes, timeout=20.0):
        nccl()
        _native.load_nccl()
        self._nodes, self._timeout = nodes, timeout
        self._meeting = threading.Barrier(len(nodes), action=self._make)
        self._transports = [_native.in_process_transports(sorted(set(nodes))) for _ in range(nodes.count(0))]
        self.peers = {}

    def _make(self):
        self._ids = [_native.nccl_id() for _ in set(self._nodes)]

    def open(self, plan, rank):
        """Open a plan's device, whose number this returns. Collective."""
        self._meeting.wait(30)
        number, node = self._nodes[:rank].count(self._nodes[rank]), self._nodes[rank]
        if rank not in self.peers:
            peers = _native.Team(self._transports[number][node], 0, 1, self._timeout, self._timeout)
            peers.add_choice("network", 0, EVERY_SIZE, "pairwise")
            self.peers[rank] = peers
        plan.open_nccl(rank, self._ids[node], self.peers[rank])
        return rank

    def run(self, work, **options):
        """As in_process.run."""

        def and_close(team, rank):
            try:
                return work(team, rank)
            finally:
                team.close()
                self._meeting.wait(30)
                self.peers[rank].close()

        return run(self._nodes, and_close, timeout=self._timeout, **options)


class Peers:
    """For plans that a kernel reduces; `gpus`: how many the ranks share."""

    def __init__(self, gpus=4):
        nvrtc()
        self._gpus = gpus

    def open(self, plan, rank):
        """Open a plan's device, whose number this returns. Collective."""
        plan.open_peer(rank % self._gpus)
        return rank % self._gpus


class ByMpi:
    """For plans that an MPI library reduces which takes memory of GPUs; `gpus`: how many the ranks share."""

    def __init__(self, gpus=4):
        nvrtc()
        self._gpus = gpus
        self.copy = ctypes.cast(driver().fake_copy_any, ctypes.c_void_p).value

    def open(self, plan, rank):
        """Open a plan's device, whose number this returns. Collective."""
        plan.open_mpi(rank % self._gpus)
        return rank % self._gpus

    def run(self, nodes, work, **options):
        """As in_process.run."""
        return run(nodes, work, copy=self.copy, **options)


class DirectStep(Step):
    """A plan, a stream and tensors of a rank, on the GPU of its number."""

    def __init__(
        self, team, rank, ids, *, op="mean", weighted=False, counts=COUNTS, dtypes=DTYPES, bucket_bytes=0, wire=""
    ):
        self.counts, self.dtypes = counts, dtypes
        specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(counts, dtypes, strict=True))]
        self.plan = team.plan("direct", specs, op, weighted, wire, in_segment=True, bucket_bytes=bucket_bytes)
        device = ids.open(self.plan, rank)
        self.begin([Tensor(array, device) for array in data_of(rank, counts, dtypes)], rank)

    def abandon(self, team):
        """What cannot go on, ends with its team."""
        driver().fake_in_step(0)
        driver().fake_finish(self.stream.handle)  # what made them
        for tensor in self.tensors:  # after an error they are the caller's
            tensor.free()
        self.tensors = []
        super().abandon(team)


def steps(team, rank, ids, count, weights=None, poison=(), **options):
    """Return the results of steps; `poison`: ranks all of whose values are NaN."""
    with contextlib.closing(DirectStep(team, rank, ids, weighted=weights is not None, **options)) as step:
        results = []
        for number in range(count):
            arrays = data_of(rank, step.counts, step.dtypes, number)
            if rank in poison:
                arrays = [np.full_like(array, np.nan) for array in arrays]
            step.start(arrays, 1.0 if weights is None else weights[rank])
            results.append(step.wait())
        return results


def on_the_host(team, rank, count, weights=None, poison=()):
    """Return what such steps are on CPUs."""
    specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(COUNTS, DTYPES, strict=True))]
    plan = team.plan("on the host", specs, "mean", weights is not None)
    results = []
    for number in range(count):
        arrays = [np.ascontiguousarray(array) for array in data_of(rank, COUNTS, DTYPES, number)]
        if rank in poison:
            arrays = [np.full_like(array, np.nan) for array in arrays]
        for index, array in enumerate(arrays):
            plan.start(index, as_bytes(array), 1.0 if weights is None else weights[rank])
        for index in range(len(arrays)):
            plan.wait(index)
        results.append(arrays)
    plan.end()
    return results


def _host_and_device(team, rank, ids, count):
    specs = [("x", "float32", 5000), ("n", "float32", 3), ("y", "float32", 100)]
    plan = team.plan("mixed", specs, "mean", True, in_segment=True)
    ids.open(plan, rank)
    stream, x, y = Stream(), Tensor(np.empty(5000, np.float32), rank), Tensor(np.empty(100, np.float32), rank)
    found = []
    for number in range(count):
        x.write(stream, np.full(5000, 4.0 * rank + number, np.float32))
        plan.start_beside(1, as_bytes(np.full(3, number + 4.0 * rank, np.float32)), 1.0 + 2 * rank)
        if number % 3 == 0:
            y.write(stream, np.full(100, 1.0, np.float32))
            plan.start_on(2, y.address, y.nbytes, 1.0 + 2 * rank, stream.handle)
        elif number % 3 == 1:
            plan.start_beside(2, as_bytes(np.full(100, 1.0, np.float32)), 1.0 + 2 * rank)
        else:
            plan.start_zeros(2, 1.0 + 2 * rank)
        plan.start_on(0, x.address, x.nbytes, 1.0 + 2 * rank, stream.handle)
        plan.wait_on(stream.handle)
        on_host = [plan.memory(index).view(np.float32).copy() for index in (1, 2)]
        found.append([x.read(stream), on_host[0], y.read(stream) if number % 3 == 0 else on_host[1]])
    plan.end()
    stream.close()
    x.free()
    y.free()
    return found


def check_host_and_device(ids, run_two=lambda work: run([0, 0], work)):
    """Steps in which a tensor is on the host, and another one now here, now there, now zeros."""
    for found in run_two(lambda team, rank: _host_and_device(team, rank, ids, 6)):
        for number, (x, n, y) in enumerate(found):
            assert (x == 3.0 + number).all()
            assert (n == 3.0 + number).all()
            assert (y == (0.0 if number % 3 == 2 else 1.0)).all()


def check_weights_on_the_device(ids, dtype, run=run):
    """Steps whose weights a kernel of the framework has computed."""

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 5000)], "mean", True, in_segment=True)
        ids.open(plan, rank)
        stream, x, weight = Stream(), Tensor(np.empty(5000, np.float32), rank), Tensor(np.empty(1, dtype), rank)
        found = []
        for number in range(4):
            weight.write(stream, np.full(1, 1 + 2 * rank if number % 2 else 2, dtype))
            x.write(stream, np.full(5000, 4.0 * rank + number, np.float32))
            assert engine.khpc_start_on(plan.id, 0, x.address, weight.address, weight.nbytes, stream.handle) == 0
            assert engine.khpc_wait_on(plan.id, stream.handle) == 0
            found.append(x.read(stream))
        with pytest.raises(_native.Error, match="is not pipelined"):
            plan.second_on([x.address], stream.handle)
        plan.end()
        stream.close()
        x.free()
        weight.free()
        return found

    for found in run([0, 0], work):
        for number, mean in enumerate(found):
            assert (mean == (3.0 if number % 2 else 2.0) + number).all()


def error_without_the_other(ids, how, nodes, run=run):
    """Return what rank 0 hears whose step another rank does not come to: because it is late, or has closed its team."""
    everyone = threading.Barrier(2)

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, ids)) as step:
            if rank == 0:
                step.start(data_of(rank, COUNTS, DTYPES))
                with pytest.raises(_native.Error) as error:
                    step.wait()
                step.abandon(team)
                everyone.wait(30)
                return str(error.value)
            if how == "closed":
                team.close()
                step.is_over = True
            everyone.wait(30)
            step.abandon(team)
            return ""

    return run(nodes, work, timeout=1.5 if how == "late" else 15)[0]


def check_end_in_a_step(ids, run=run):
    """What a plan that ends has under way is ended, though the other rank has not come; and the team goes on."""

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, ids)) as step:
            if rank == 0:
                step.start(data_of(rank, COUNTS, DTYPES))
                driver().fake_finish(step.stream.handle)
                driver().fake_in_step(0)
            begin = time.monotonic()
            step.plan.end()
            step.is_over = True
            team.barrier()
            assert time.monotonic() - begin < SOON

    run([0, 0], work)


def errors_in_a_step(ids, nodes, fail, run=run, on_host=False, seconds=15):
    """Return what each rank hears in time when something fails on the last one; then the tensors are freed.

    `on_host`: one of the tensors is there.
    """

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, ids, weighted=True)) as step:
            step.start(data_of(rank, COUNTS, DTYPES), 1.0 + rank)
            step.wait()
            team.barrier()
            if rank == len(nodes) - 1:
                fail()

            def go_on():
                for number in range(30):
                    arrays, weight = data_of(rank, COUNTS, DTYPES, number), 1.0 + (rank + number) % 3
                    if on_host:
                        step.plan.start_beside(0, as_bytes(arrays[0].copy()), weight)
                        for index in range(1, len(arrays)):
                            tensor = step.tensors[index]
                            step.plan.start_on(index, tensor.address, tensor.nbytes, weight, step.stream.handle)
                    else:
                        step.start(arrays, weight)
                    step.wait()

            begin = time.monotonic()
            with pytest.raises(_native.Error) as error:
                go_on()
            assert time.monotonic() - begin < seconds
            step.abandon(team)
            return str(error.value)

    return run(nodes, work)


def check_an_error_in_a_step(ids, call, run=run):
    """A call of the driver that fails on one of three ranks of a node is an error on all."""
    fail = functools.partial(driver().fake_fail, call.encode(), 2)
    texts = errors_in_a_step(ids, [0] * 3, fail, run, on_host=call == "cuMemcpyDtoHAsync")
    check_one_failed(texts, f"The GPU's driver: {call} failed with")


def check_one_failed(texts, said):
    """One rank says what has failed, the others that it has."""
    assert sum(said in text for text in texts) == 1, texts
    assert sum("met an error" in text for text in texts) == len(texts) - 1, texts


def fail_by_nccl(call, after):
    """Return what lets NCCL or the driver fail, after so many calls of the driver, and what is said then."""
    if call.startswith("nccl"):
        return functools.partial(nccl().fake_nccl_fail, call.encode(), 1), f"NCCL: {call} failed: internal error."
    if call.startswith("cu"):
        fail = functools.partial(driver().fake_fail, call.encode(), after)
        return fail, f"The GPU's driver: {call} failed with"
    return functools.partial(nccl().fake_nccl_break, 1, 3), "NCCL: a collective failed: internal error."


def check_two_teams(ids, run=run, copy=0):
    """Steps of two teams that overlap in any order; what is late on one rank only is right."""
    others = _native.in_process_transports([0, 0], copy)
    count = 3

    def work(team, rank):
        other = _native.Team(others[rank], 1, 1, 20.0, 20.0)
        with (
            contextlib.closing(DirectStep(team, rank, ids, weighted=True)) as first,
            contextlib.closing(DirectStep(other, rank, ids)) as second,
        ):
            found = []
            for number in range(count):
                if number % 2 == rank:
                    first.stream.take_time(20)
                both = (first, second) if rank else (second, first)
                for step in both:
                    step.start(data_of(rank, COUNTS, DTYPES, number + (100 if step is second else 0)))
                found.append([first.wait(), second.wait()])
        other.close()
        return found

    results = run([0, 0], work)
    for number in range(count):
        for plan in range(2):
            check([r[number][plan] for r in results], [0, 0], COUNTS, DTYPES, "mean", step=100 * plan + number)


def check_on_the_host(team, plan, rank):
    """A plan of one tensor on two ranks, which could not be opened, is reduced on the host."""
    team.barrier()
    mine = plan.memory(0)
    mine.view(np.float32)[:] = rank
    plan.start(0, mine, 1.0)
    plan.wait(0)
    assert (mine.view(np.float32) == 0.5).all()
