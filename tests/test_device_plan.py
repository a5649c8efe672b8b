"""Plans with tensors on a GPU, on a GPU that is not there: each value, each order."""

import concurrent.futures
import contextlib
import time

import numpy as np
import pytest
from device_orders import DEFAULT, SCENARIOS, is_right
from device_steps import COUNTS, DTYPES, Step, fresh_driver, steps, team_allreduce
from direct_steps import Ids
from fake_cuda import Stream, Tensor
from in_process import NODES, as_bytes, check, data_of, run, soak

from keras_hpc import _native


@pytest.fixture(autouse=True)
def fake():
    yield from fresh_driver()


@pytest.mark.parametrize("threads", [0, 2, *soak(1)])
@pytest.mark.parametrize("nodes", ["1 rank", "2 on 1", "3 on 1", "2 x 1", "2 x 2", "2 + 1"])
def test_means_are_those_of_numpy(nodes, threads):
    nodes = NODES[nodes]
    results = run(nodes, lambda team, rank: steps(team, rank, 4), threads)
    for number in range(4):
        check([of_rank[number] for of_rank in results], nodes, COUNTS, DTYPES, "mean", step=number)


@pytest.mark.parametrize("nodes", ["2 on 1", "2 x 1"])
def test_the_bits_are_those_of_a_plan_on_the_host(nodes):
    nodes = NODES[nodes]

    def on_host(team, rank):
        plan = team.plan(
            "on host", [(f"t{i}", d, n) for i, (n, d) in enumerate(zip(COUNTS, DTYPES, strict=True))], "mean", True
        )
        arrays = data_of(rank, COUNTS, DTYPES)
        for index, array in enumerate(arrays):
            plan.start(index, as_bytes(array), 1.0 + rank)
        plan.wait_all()
        return arrays

    weights = [1.0, 2.0]
    host = run(nodes, on_host)
    device = run(nodes, lambda team, rank: steps(team, rank, 1, weights, weighted=True)[0])
    for a, b in zip(host[0], device[1], strict=True):
        assert a.tobytes() == b.tobytes()


def test_weights_and_a_rank_without_samples():
    nodes = NODES["3 on 1"]

    def work(team, rank):
        with contextlib.closing(Step(team, rank, weighted=True)) as step:
            arrays = data_of(rank, COUNTS, DTYPES)
            if rank == 1:
                for array in arrays:
                    array.fill(np.nan)
            step.start(arrays, [3.0, 0.0, 1.0][rank])
            return step.wait()

    results = run(nodes, work)
    inputs = [data_of(rank, COUNTS, DTYPES) for rank in (0, 2)]
    for index, (first, third) in enumerate(zip(*inputs, strict=True)):
        want = np.average([first.astype(float), third.astype(float)], axis=0, weights=[3, 1])
        np.testing.assert_allclose(results[1][index].astype(float), want, rtol=2e-2, atol=2e-2)


def test_tensors_on_the_host_beside_those_on_the_device():
    def work(team, rank):
        plan = team.plan(
            "mixed",
            [("a", "float32", 5000), ("b", "float32", 6), ("c", "float32", 100)],
            "mean",
            False,
            in_segment=True,
        )
        plan.open_device(0)
        stream, tensor = Stream(), Tensor(np.empty(5000, np.float32))
        flags = plan.memory(1).view(np.float32)
        found = []
        for number in range(3):
            tensor.write(stream, np.full(5000, rank + number, np.float32))
            if number % 2 == rank:
                plan.start_zeros(0, 1.0)
            else:
                plan.start_on(0, tensor.address, tensor.nbytes, 1.0, stream.handle)
            flags[:] = rank
            plan.start_beside(1, as_bytes(flags), 1.0)
            plan.start_beside(2, as_bytes(np.full(100, 3 * rank, np.float32)), 1.0)
            plan.wait_on(stream.handle)
            found.append((tensor.read(stream)[0], flags[5], plan.memory(2).view(np.float32)[99], number % 2 == rank))
        plan.end()
        stream.close()
        tensor.free()
        return found

    for rank, found in enumerate(run([0, 0], work)):
        for number, (mean, flag, other, was_zero) in enumerate(found):
            assert (flag, other) == (0.5, 1.5)
            giver = 1 - number % 2
            # Who gave zeros from the host keeps what it has on the device.
            assert mean == (rank + number if was_zero else (giver + number) / 2)


def test_a_rank_ends_while_the_next_one_copies(fake):
    def work(team, rank):
        with contextlib.closing(Step(team, rank)) as step:
            if rank == 1:  # nothing is copied back to it
                for index in range(len(COUNTS)):
                    step.plan.start_zeros(index, 1.0)
                step.plan.wait_on(step.stream.handle)
                return None
            step.start(data_of(rank, COUNTS, DTYPES))
            return step.wait()

    fake.fake_slow_back(1)
    means = run(NODES["3 on 1"], work)
    inputs = [data_of(rank, COUNTS, DTYPES) for rank in (0, 2)]
    for mean, first, third in zip(means[2], *inputs, strict=True):
        want = (first.astype(float) + third.astype(float)) / 3
        np.testing.assert_allclose(mean.astype(float), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_steps_in_which_each_order_matters(scenario):
    assert is_right(scenario)


@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_threads_start_tensors_at_the_same_time(way):
    """As those of a framework may that compute gradients beside each other."""
    count, ids = 60, Ids(2)

    def work(team, rank):
        plan = team.plan("x", [(str(n), "float32", 20) for n in range(count)], "sum", False, in_segment=True)
        plan.open_device(rank) if way == "staged" else ids.open(plan, rank)
        streams = [Stream() for _ in range(3)]
        tensors = [Tensor(np.empty(20, np.float32), rank) for _ in range(count)]

        def start(number):
            for index in range(number, count, len(streams)):
                tensor, stream = tensors[index], streams[number]
                tensor.write(stream, np.full(20, index, np.float32))
                plan.start_on(index, tensor.address, tensor.nbytes, 1.0, stream.handle)

        with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
            begin = time.monotonic()
            for _ in range(8):
                list(pool.map(start, range(len(streams))))
                plan.wait_on(streams[0].handle)
                for index, tensor in enumerate(tensors):
                    assert (tensor.read(streams[0]) == 2 * index).all()
            assert time.monotonic() - begin < 8 * 0.8  # who waits is woken, and does not look now and then
        plan.end()
        for stream in streams:
            stream.close()
        for tensor in tensors:
            tensor.free()

    run([0, 0], work)


def test_two_teams_at_once(fake):
    def work(team, rank):
        with contextlib.closing(Step(team, rank)) as one:
            second = team.plan("second", [("x", "float32", 50_000)], "mean", False, in_segment=True)
            second.open_device(0)
            stream, x = Stream(), Tensor(np.empty(50_000, np.float32))
            for number in range(3):
                x.write(stream, np.full(50_000, rank, np.float32))
                second.start_on(0, x.address, x.nbytes, 1.0, stream.handle)
                one.start(data_of(rank, COUNTS, DTYPES, number))
                second.wait_on(stream.handle)
                assert (x.read(stream) == 0.5).all()
                result = one.wait()
            fake.fake_in_step(0)
            second.end()
            stream.close()
            x.free()
            return result

    check(run([0, 0], work, threads=2), [0, 0], COUNTS, DTYPES, "mean", step=2)


def test_pipelined_steps_apply_each_mean_once():
    total = 8

    def work(team, rank):
        with contextlib.closing(Step(team, rank, pipelined=True)) as step:
            step.plan.set_schedule(2, 4)  # two synchronous, four pipelined, the rest synchronous again
            applied = []
            for number in range(total):
                step.start(data_of(rank, COUNTS, DTYPES, number))
                means = step.wait()
                updates = step.plan.updates()
                if updates > 0:
                    applied.append(means)
                if updates > 1:
                    step.plan.second_on([t.address for t in step.tensors], step.stream.handle)
                    applied.append([tensor.read(step.stream) for tensor in step.tensors])
            return applied

    results = run([0, 0], work)
    assert [len(applied) for applied in results] == [total, total]
    for number in range(total):
        check([applied[number] for applied in results], [0, 0], COUNTS, DTYPES, "mean", step=number)


def test_a_call_of_its_own(fake):
    """keras_hpc.allreduce of a tensor on a GPU: after what its stream does, and before what it does next."""

    def work(team, rank):
        stream = Stream()
        found = []
        for count in (1000, 10, 50_000):
            tensor = Tensor(np.empty(count, np.float32))
            for number in range(3):
                tensor.write(stream, np.full(count, 1.0 + rank + number, np.float32))
                team_allreduce(team, tensor, "mean", stream)
                found.append(tensor.read(stream))
            tensor.free()
        stream.close()
        return found

    for found in run([0, 0, 1], work):
        for place, array in enumerate(found):
            assert (array == 2.0 + place % 3).all()
    assert fake.fake_calls(b"cuMemHostRegister") == 6  # pinned for the largest so far, and kept


def test_calls_on_several_gpus_of_empty_arrays_and_of_the_only_rank(fake):
    def work(team, rank):
        stream, found = Stream(), []
        for device in range(2):
            x = Tensor(np.empty(30, np.float32), device)
            x.write(stream, np.full(30, rank + device, np.float32))
            for address, shape in ((0, [0]), (x.address, [30])):
                _native.allreduce_on(team, device, address, "float32", "sum", "x", shape, stream.handle)
            found.append(x.read(stream))
            x.free()
        stream.close()
        if rank == 0:
            with pytest.raises(_native.Error, match="disagree"):
                _native.allreduce_on(team, 0, 0, "float32", "sum", "x", [0], DEFAULT)
        else:
            with pytest.raises(_native.Error, match="disagree"):
                team.allreduce(as_bytes(np.zeros(3, np.float32)), "float32", "sum", what="x", shape=[3])
        return found

    for found in run([0, 0], work):
        assert all((array == 1 + 2 * device).all() for device, array in enumerate(found))
    before = fake.fake_calls(b"cuCtxPushCurrent")
    run([0], lambda team, rank: _native.allreduce_on(team, 0, 64, "float32", "sum", "x", [30], DEFAULT))
    assert fake.fake_calls(b"cuCtxPushCurrent") == before


def test_speeds(fake):
    fake.fake_reset(2, 0)
    assert all(speed > 0 for speed in _native.device_speeds(1, 1 << 20))
    fake.fake_fail(b"cuMemAlloc", 0)
    with pytest.raises(_native.Error, match="cuMemAlloc failed"):
        _native.device_speeds(0, 1 << 20)
    assert _native.pinned_bytes() == 0


def test_devices_are_listed(fake):
    fake.fake_reset(2, 0)
    assert _native.visible_devices() == [
        ("Fake GPU", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "0000:00:00.0"),
        ("Fake GPU", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f", "0000:01:00.0"),
    ]
    assert _native.device_driver_version() == 13000
