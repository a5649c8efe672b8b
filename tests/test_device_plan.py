"""Plans with tensors on a GPU, on a GPU that is not there: each value, each order, each error."""

import contextlib
import random
import threading
import time

import numpy as np
import pytest
from fake_cuda import ORDERS, Stream, Tensor, driver
from in_process import NODES, as_bytes, check, data_of, run

from keras_hpc import _native

DTYPES = ["float32", "float16", "float32", "bfloat16", "float64", "float32"]
COUNTS = [7, 1000, 300_000, 0, 4096, 70_001]


@pytest.fixture(autouse=True)
def fake():
    found = driver()
    found.fake_reset(2, 200)
    yield found
    assert found.fake_left() == 0


class Step:
    """What a rank has on the device: tensors, a stream, a plan."""

    def __init__(self, team, rank, *, weighted=False, pipelined=False, wire=""):
        self.specs = [(f"t{i}", dtype, n) for i, (n, dtype) in enumerate(zip(COUNTS, DTYPES, strict=True))]
        self.plan = team.plan("on device", self.specs, "mean", weighted, wire, True, pipelined)
        self.plan.open_device(0)
        self.stream = Stream()
        self.tensors = [Tensor(array) for array in data_of(rank, COUNTS, DTYPES)]
        self.random = random.Random(rank)
        self.is_over = False

    def start(self, arrays, weight=1.0, stream=None):
        driver().fake_in_step(1)
        stream = stream or self.stream
        order = list(range(len(arrays)))
        self.random.shuffle(order)
        for index in order:
            self.tensors[index].write(stream, arrays[index])
            tensor = self.tensors[index]
            self.plan.start_on(index, tensor.address, tensor.nbytes, weight, stream.handle)

    def wait(self, stream=None):
        stream = stream or self.stream
        self.plan.wait_on(stream.handle)
        return [tensor.read(stream) for tensor in reversed(self.tensors)][::-1]  # first what comes back last

    def abandon(self, team):
        """What cannot go on, ends with its team."""
        driver().fake_in_step(0)
        team.close()
        self.is_over = True

    def close(self):
        driver().fake_in_step(0)
        if not self.is_over:
            self.plan.end()
        self.stream.close()
        for tensor in self.tensors:
            tensor.free()


def steps(team, rank, count, weights=None, **options):
    with contextlib.closing(Step(team, rank, **options)) as step:
        results = []
        for number in range(count):
            arrays = data_of(rank, COUNTS, DTYPES, number)
            step.start(arrays, 1.0 if weights is None else weights[rank])
            results.append(step.wait())
        return results


@pytest.mark.parametrize("threads", [0, 1, 2])
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


def test_steps_on_streams_without_an_order():
    results = run([0, 0], lambda team, rank: overlapping_steps(team, rank, 6))
    for number in range(6):
        check([of_rank[number] for of_rank in results], [0, 0], COUNTS, DTYPES, "mean", step=number)


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


@pytest.mark.parametrize("order", ORDERS)
def test_each_order_matters(order, fake):
    """The same steps, with one kind of order that the driver does not keep, must be seen to be wrong."""
    work = overlapping_steps if order == "out waits for back" else steps
    fake.fake_slow_back(order.endswith("back"))
    for _attempt in range(10):
        fake.fake_drop(order.encode())
        results = run([0, 0], lambda team, rank: work(team, rank, 6))
        try:
            for number in range(6):
                check([of_rank[number] for of_rank in results], [0, 0], COUNTS, DTYPES, "mean", step=number)
        except AssertionError:
            return
    pytest.fail("nobody missed it")


CALLS = ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventQuery"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [0, 9])
def test_a_call_that_fails_in_a_step_is_an_error_on_all_ranks(call, after, fake):
    def work(team, rank):
        with contextlib.closing(Step(team, rank)) as step:
            step.start(data_of(rank, COUNTS, DTYPES))
            step.wait()
            team.barrier()
            if rank == 0:
                fake.fake_fail(call.encode(), after)

            def go_on():
                for number in range(10):
                    step.start(data_of(rank, COUNTS, DTYPES, number))
                    step.wait()

            with pytest.raises(_native.Error) as error:
                go_on()
            step.abandon(team)
            return str(error.value)

    texts = run([0, 0], work)
    of_driver = [text == f"The GPU's driver: {call} failed with CUDA_ERROR_UNKNOWN." for text in texts]
    assert sorted(of_driver) == [False, True], texts
    assert texts[of_driver.index(False)].endswith("met an error, which it tells of itself.")


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuDevicePrimaryCtxRetain", "cuStreamCreateWithPriority"])
def test_a_device_that_cannot_be_had_is_an_error_of_this_rank(call, fake):
    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 10)], "mean", False, in_segment=True)
        fake.fake_fail(call.encode(), 0)
        with pytest.raises(_native.Error, match=f"{call} failed with CUDA_ERROR_UNKNOWN"):
            plan.open_device(0)
        fake.fake_fail(b"", 0)
        x = np.full(10, 2.0, np.float32)
        plan.start(0, as_bytes(x), 1.0)
        plan.wait(0)
        return plan.memory(0).view(np.float32)[0]

    assert run([0], work) == [2.0]


def test_bad_input(fake):
    def work(team, rank):
        with contextlib.closing(Step(team, rank)) as step:
            arrays = data_of(rank, COUNTS, DTYPES)
            elsewhere = Tensor(arrays[0], device=1)
            with pytest.raises(_native.Error, match=r"'t0' is on another GPU than its plan.*Received: GPU 1"):
                step.plan.start_on(0, elsewhere.address, elsewhere.nbytes, 1.0, step.stream.handle)
            elsewhere.free()
            with pytest.raises(_native.Error, match="'t0' is not in a GPU's memory"):
                step.plan.start_on(0, arrays[0].ctypes.data, arrays[0].nbytes, 1.0, step.stream.handle)
            with pytest.raises(ValueError, match=r"has 28 bytes in the plan\. Received: 27"):
                step.plan.start_on(0, step.tensors[0].address, 27, 1.0, step.stream.handle)
            with pytest.raises(_native.Error, match="was waited for but not started"):
                step.plan.wait_on(step.stream.handle)
            with pytest.raises(_native.Error, match=r"This process sees 2 GPUs\. Received: number 2"):
                step.plan.open_device(2)
            step.start(arrays)
            with pytest.raises(_native.Error, match="was started twice"):
                step.start(arrays)
            return step.wait()

    check(run([0], work), [0], COUNTS, DTYPES, "mean")


def test_a_rank_that_does_not_come_is_an_error_in_time(fake):
    def work(team, rank):
        with contextlib.closing(Step(team, rank)) as step:
            if rank == 0:
                return ""
            step.start(data_of(rank, COUNTS, DTYPES))
            with pytest.raises(_native.TimeoutError) as error:
                step.wait()
            step.abandon(team)
            return str(error.value)

    assert "Missing, as far as this rank sees: rank 0" in run([0, 0], work, timeout=1.0)[1]


@pytest.mark.parametrize("where", ["kernel", "copies back"])
def test_a_gpu_that_hangs_is_an_error_in_time(where, fake):
    """Of the rank that has it, which says so; the other one hears of it."""

    def work(team, rank):
        plan = team.plan("x", [("a", "float32", 100), ("b", "float32", 1)], "mean", False, in_segment=True)
        plan.open_device(0)
        stream, tensor = Stream(), Tensor(np.zeros(100, np.float32))
        begin = time.monotonic()
        if rank == 0:
            fake.fake_hang(stream.handle if where == "kernel" else None, 1)
            # As a GPU that is reset: what waits for it, waits for its own copies first, and the test for that.
            threading.Timer(2.5, lambda: fake.fake_hang(None, 0)).start()
        team.barrier()

        def go_on():
            for _ in range(2):
                tensor.write(stream, np.zeros(100, np.float32))
                plan.start_on(0, tensor.address, tensor.nbytes, 1.0, stream.handle)
                plan.start_beside(1, as_bytes(np.zeros(1, np.float32)), 1.0)
                plan.wait_on(stream.handle)

        with pytest.raises(_native.Error) as error:
            go_on()
        assert 0.9 < time.monotonic() - begin < 8
        team.close()
        stream.close()
        tensor.free()
        return str(error.value)

    said = "has not computed 'a'" if where == "kernel" else "has not copied the last step's means"
    texts = run([0, 0], work, timeout=1.0)
    assert f"The GPU of rank 0 {said}" in texts[0] or where == "copies back", texts
    assert any(said in text for text in texts), texts


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


def team_allreduce(team, tensor, op, stream):
    _native.allreduce_on(team, 0, tensor.address, "float32", op, "x", [tensor.size], stream.handle)


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventQuery"])
def test_a_call_of_its_own_that_fails(call, fake):
    def work(team, rank):
        stream, tensor = Stream(), Tensor(np.zeros(100, np.float32))
        tensor.write(stream, np.full(100, rank, np.float32))
        if rank == 0:
            with pytest.raises(_native.Error, match="What is to be reduced is not in a GPU's memory"):
                _native.allreduce_on(team, 0, 64, "float32", "sum", "x", [100], stream.handle)
            fake.fake_fail(call.encode(), 0)
        team.barrier()
        text = ""
        try:
            team_allreduce(team, tensor, "sum", stream)
            assert (tensor.read(stream) == 1).all()
            team.barrier()  # a result that is not on its way back is an error after the other rank has its own
        except _native.Error as error:
            text = str(error)
        team.close()
        stream.close()
        tensor.free()
        return text

    texts = run([0, 0], work)
    if call == "cuMemHostRegister":
        assert texts == ["", ""], "memory that is not pinned serves, too"
    else:
        assert sorted(text == f"The GPU's driver: {call} failed with CUDA_ERROR_UNKNOWN." for text in texts) == [0, 1]
        assert all(texts)


def test_speeds(fake):
    fake.fake_reset(2, 0)
    assert all(speed > 0 for speed in _native.device_speeds(1, 1 << 20))
    fake.fake_fail(b"cuMemAlloc", 0)
    with pytest.raises(_native.Error, match="cuMemAlloc failed"):
        _native.device_speeds(0, 1 << 20)
    assert _native.pinned_bytes() == 0


def test_closing_ends_a_wait(fake):
    everyone = threading.Barrier(2)

    def work(team, rank):
        step = Step(team, rank)
        if rank == 0:
            step.start(data_of(rank, COUNTS, DTYPES))
            driver().fake_in_step(0)
            closer = threading.Thread(target=lambda: (time.sleep(0.3), team.close()))
            closer.start()
            begin = time.monotonic()
            with pytest.raises(_native.Error, match="closed"):
                step.wait()
            assert time.monotonic() - begin < 5
            closer.join()
        everyone.wait(30)
        step.abandon(team)
        step.close()

    run([0, 0], work)


def test_devices_are_listed(fake):
    fake.fake_reset(2, 0)
    assert _native.visible_devices() == [
        ("Fake GPU", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "0000:00:00.0"),
        ("Fake GPU", "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f", "0000:01:00.0"),
    ]
    assert _native.device_driver_version() == 13000
