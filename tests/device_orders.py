"""Steps on a GPU that is not there in which each order that the engine asks for matters: without it, they are wrong.

Each scenario raises AssertionError if a value is wrong, or if memory was given back while the engine copied from or to
it.
"""

import contextlib
import ctypes

import direct_steps
import numpy as np
import pytest
from device_steps import COUNTS, DTYPES, Step, engine, steps, team_allreduce
from direct_steps import ByMpi, DirectStep, Ids, Peers
from fake_cuda import Stream, Tensor, driver
from in_process import as_bytes, check, data_of, run

from keras_hpc import _native

NODES = [0, 0]
DEFAULT = 0  # the stream that needs no handle


def _check_steps(results):
    for number in range(len(results[0])):
        check([of_rank[number] for of_rank in results], NODES, COUNTS, DTYPES, "mean", step=number)


def one_stream():
    """Each step on the same stream, in the same tensors."""
    _check_steps(run(NODES, lambda team, rank: steps(team, rank, 6)))


def overlapping_steps(team, rank, count):
    """Each step on another stream and in other tensors, which wait for nothing of the step before."""
    with contextlib.closing(Step(team, rank)) as step:
        tensors = [step.tensors, [Tensor(array) for array in data_of(rank, COUNTS, DTYPES)]]
        streams = [step.stream, Stream()]
        arrays = [data_of(rank, COUNTS, DTYPES, number) for number in range(count)]
        results = []
        for number in range(count + 1):
            now, before = number % 2, 1 - number % 2
            step.tensors = tensors[now]
            if number < count:
                step.start(arrays[number], stream=streams[now])
                step.plan.wait_on(streams[now].handle)
            if number > 0:
                results.append([tensor.read(streams[before]) for tensor in tensors[before]])
        streams[1].close()
        for tensor in tensors[1]:
            tensor.free()
        step.tensors = tensors[0]
        return results


def two_streams():
    """Steps on two streams in turn, without an order between them."""
    _check_steps(run(NODES, lambda team, rank: overlapping_steps(team, rank, 6)))


def beside_the_host():
    """What is on the device in one step, is on the host in the next, which does not wait for the device."""

    def work(team, rank):
        specs = [("here", "float32", 6), ("there", "float32", 5000)]
        plan = team.plan("mixed", specs, "mean", False, in_segment=True)
        plan.open_device(0)
        streams = [Stream(), Stream()]
        tensors = [Tensor(np.empty(5000, np.float32)) for _ in streams]
        found = []
        for number in range(6):
            stream, tensor = streams[number % 2], tensors[number % 2]
            plan.start_beside(0, as_bytes(np.full(6, number, np.float32)), 1.0)
            if number % 2 == 0:
                tensor.write(stream, np.full(5000, 1.0 + rank + number, np.float32))
                plan.start_on(1, tensor.address, tensor.nbytes, 1.0, stream.handle)
            else:
                plan.start_beside(1, as_bytes(np.zeros(5000, np.float32)), 1.0)
            plan.wait_on(stream.handle)
            if number % 2 == 1:
                found.append(tensors[0].read(streams[0]))
        plan.end()
        for stream, tensor in zip(streams, tensors, strict=True):
            stream.close()
            tensor.free()
        return found

    for found in run(NODES, work):
        for index, mean in enumerate(found):
            assert (mean == 1.5 + 2 * index).all()


def pipelined():
    """Two updates in one step, nobody waits in between, and the second one's memory is still being read."""

    def work(team, rank):
        with contextlib.closing(Step(team, rank, pipelined=True)) as step:
            step.plan.set_schedule(1, 2)
            more = [Tensor(array) for array in data_of(rank, COUNTS, DTYPES)]
            kept = [Tensor(array) for array in data_of(rank, COUNTS, DTYPES)]
            applied = []
            for number in range(5):
                step.start(data_of(rank, COUNTS, DTYPES, number))
                step.plan.wait_on(step.stream.handle)
                updates = step.plan.updates()
                if updates > 1:
                    # As memory that an allocator in the order of the stream gives: what it was before is not over.
                    for tensor, array in zip(more, data_of(rank, COUNTS, DTYPES, 100), strict=True):
                        tensor.write(step.stream, array)
                    step.stream.take_time(20)
                    for tensor, other in zip(more, kept, strict=True):
                        tensor.copy_to(step.stream, other)
                    step.plan.second_on([tensor.address for tensor in more], step.stream.handle)
                means = [more, step.tensors] if updates > 1 else [step.tensors] * updates
                applied += reversed([[t.read(step.stream) for t in reversed(those)][::-1] for those in means])
            before = [tensor.read(step.stream) for tensor in kept]
            for tensor in more + kept:
                tensor.free()
            return applied, before

    results = run(NODES, work)
    assert [len(applied) for applied, _ in results] == [5, 5]
    _check_steps([applied for applied, _ in results])
    for rank, (_, before) in enumerate(results):
        for found, array in zip(before, data_of(rank, COUNTS, DTYPES, 100), strict=True):
            assert found.tobytes() == array.tobytes()


def finished():
    """Weights that the device has computed, and a step that ends on the host: for who has no stream of its own."""

    def work(team, rank):
        plan = team.plan("finished", [("x", "float32", 5000)], "mean", True, in_segment=True)
        plan.open_device(0)
        x, copy, weight = (Tensor(np.empty(n, np.float32)) for n in (5000, 5000, 1))
        stream = Stream()
        found = []
        for number in range(3):
            weight.write(stream, np.full(1, 1 + 2 * rank, np.float32))
            x.write(stream, np.full(5000, 4.0 * rank + number, np.float32))
            assert engine.khpc_start_on(plan.id, 0, x.address, weight.address, 4, stream.handle) == 0
            assert engine.khpc_wait_on(plan.id, None) == 0
            driver().fake_take_time(None, 20)
            driver().fake_copy(None, copy.address, x.address, x.nbytes)
            assert engine.khpc_finish_on(plan.id) == 0
            found.append(copy.peek())
        driver().fake_finish(None)
        plan.end()
        stream.close()
        for tensor in (x, copy, weight):
            tensor.free()
        return found

    for found in run(NODES, work):
        for number, mean in enumerate(found):
            assert (mean == 3.0 + number).all()


def calls():
    """keras_hpc.allreduce on two streams in turn and on the default one, and a team that is closed at once."""

    def work(team, rank):
        streams = [Stream(), Stream()]
        tensors = [Tensor(np.empty(count, np.float32)) for count in (100, 100, 20_000, 100, 40_000)]
        for number, tensor in enumerate(tensors):
            stream = streams[number % 2]
            tensor.write(stream, np.full(tensor.size, 1.0 + rank + number, np.float32))
            team_allreduce(team, tensor, "mean", stream)
        found = [tensor.read(streams[number % 2]) for number, tensor in enumerate(tensors)]
        driver().fake_write(None, tensors[0].address, np.full(100, 6.0 + rank, np.float32).ctypes.data, 400)
        _native.allreduce_on(team, 0, tensors[0].address, "float32", "mean", "x", [100], DEFAULT)
        found.append(tensors[0].peek())
        team_allreduce(team, tensors[1], "mean", streams[1])
        team.barrier()
        team.close()
        for stream in streams:
            stream.close()
        for tensor in tensors:
            tensor.free()
        return found

    for found in run(NODES, work):
        for number, array in enumerate(found):
            assert (array == 1.5 + number).all()


def _directly(ids, run=run):
    """Steps with weights that the device computes, and tensors on the host; two streams in turn."""

    def work(team, rank):
        plan = team.plan("direct", [("x", "float32", 5000), ("n", "float32", 6)], "mean", True, in_segment=True)
        ids.open(plan, rank)
        streams = [Stream(), Stream()]
        tensors = [Tensor(np.empty(5000, np.float32), rank) for _ in streams]
        weight = Tensor(np.empty(1, np.float32), rank)
        found = []
        for number in range(6):
            stream, x = streams[number % 2], tensors[number % 2]
            weight.write(stream, np.full(1, 1 + 2 * rank + number, np.float32))
            x.write(stream, np.full(5000, 4.0 * rank + number, np.float32))
            assert engine.khpc_start_on(plan.id, 0, x.address, weight.address, 4, stream.handle) == 0
            plan.start_beside(1, as_bytes(np.full(6, 4.0 * rank, np.float32)), 1.0)
            plan.wait_on(stream.handle)
            found.append([x.peek(), plan.memory(1).view(np.float32).copy()])
        plan.end()
        for stream in streams:
            stream.close()
        for tensor in (*tensors, weight):
            tensor.free()
        return found

    for found in run(NODES, work):
        for number, (x, n) in enumerate(found):
            share = (3 + number) / (4 + 2 * number)
            assert np.allclose(x, 4 * share + number, rtol=1e-5)
            assert np.allclose(n, 4 * share, rtol=1e-5)
    # And with a weight that the host knows, where nothing but its own event says that a tensor is there.
    _check_steps(run(NODES, lambda team, rank: direct_steps.steps(team, rank, ids, 3)))


def by_nccl():
    """Steps that NCCL reduces."""
    _directly(Ids(2))


def by_peer():
    """Steps that the engine's kernel reduces."""
    _directly(Peers())


def by_mpi():
    """Steps that MPI sends from GPU to GPU."""
    ids = ByMpi()
    _directly(ids, ids.run)


def by_nccl_within_nodes():
    """What goes between nodes is copied from the device before, and after it is reduced back."""
    nodes = [0, 0, 1, 1]
    many = direct_steps.Nodes(nodes)
    results = many.run(lambda team, rank: direct_steps.steps(team, rank, many, 2))
    for number in range(2):
        check([of_rank[number] for of_rank in results], nodes, COUNTS, DTYPES, "mean", step=number)


def failing_steps_by_nccl():
    """A call fails while NCCL has something under way: once there is the error, memory is given back."""
    ids = Ids(2)

    def work(team, rank):
        step = DirectStep(team, rank, ids)
        step.start(data_of(rank, COUNTS, DTYPES))
        step.wait()
        team.barrier()
        if rank == 0:
            driver().fake_fail(b"cuMemcpyDtoDAsync", 6)

        def go_on():
            for _ in range(3):
                step.start(data_of(rank, COUNTS, DTYPES))
                step.wait()

        with pytest.raises(_native.Error):
            go_on()
        step.abandon(team)
        step.close()

    run(NODES, work)


def failing_steps():
    """A call of the driver fails while there are copies on their way: once there is the error, memory is given back."""

    def work(team, rank, failing, number):
        step = Step(team, rank)
        step.start(data_of(rank, COUNTS, DTYPES))
        step.plan.wait_on(step.stream.handle)
        if failing == b"cuMemcpyDtoHAsync":
            driver().fake_finish(step.stream.handle)
            step.stream.take_time(50)
        driver().fake_fail(failing, number)

        def start():
            for index, tensor in enumerate(step.tensors):
                step.plan.start_on(index, tensor.address, tensor.nbytes, 1.0, step.stream.handle)

        with pytest.raises(_native.Error, match="CUDA_ERROR_UNKNOWN"):
            start()
        for tensor in step.tensors:
            tensor.free()
        step.tensors = []
        step.abandon(team)
        step.close()

    run([0], lambda team, rank: work(team, rank, b"cuMemcpyDtoHAsync", 3))
    run([0], lambda team, rank: work(team, rank, b"cuEventRecord", 0))


def ended_at_once():
    """Plans that end while means are copied back."""

    def work(team, rank):
        step = Step(team, rank)
        step.start(data_of(rank, COUNTS, DTYPES))
        step.plan.wait_on(step.stream.handle)
        driver().fake_in_step(0)
        step.plan.end()
        for tensor in step.tensors:
            tensor.free()
        step.stream.close()

    run([0], work)


# The quick ones first.
SCENARIOS = [
    calls,
    by_nccl,
    by_peer,
    by_mpi,
    by_nccl_within_nodes,
    beside_the_host,
    ended_at_once,
    finished,
    failing_steps,
    failing_steps_by_nccl,
]
SCENARIOS += [two_streams, pipelined, one_stream]


def sites() -> list[str]:
    """The places of the engine that have asked the driver for order since `fake_watch`."""
    text = ctypes.create_string_buffer(1 << 16)
    driver().fake_sites(text, len(text))
    return text.value.decode().splitlines()


def is_right(scenario) -> bool:
    """Run it once; copies back take their time."""
    driver().fake_reset(4, 200)
    driver().fake_slow_back(1)
    try:
        scenario()
    except AssertionError:
        return False
    return driver().fake_faults() == 0
