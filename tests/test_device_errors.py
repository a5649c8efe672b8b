"""Plans with tensors on a GPU, on a GPU that is not there: each error, and what the other ranks hear of it."""

import contextlib
import re
import signal
import threading
import time

import numpy as np
import pytest
from device_steps import COUNTS, DTYPES, Step, fresh_driver, team_allreduce
from direct_steps import Ids
from fake_cuda import Stream, Tensor, driver
from in_process import SOON, as_bytes, check, data_of, run

from keras_hpc import _native


@pytest.fixture(autouse=True)
def fake():
    yield from fresh_driver()


CALLS = ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventQuery"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [9, pytest.param(0, marks=pytest.mark.soak)])
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


@pytest.mark.parametrize("after", [5, 23, *(pytest.param(n, marks=pytest.mark.soak) for n in (0, *range(30, 300, 7)))])
@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_a_gpu_that_is_lost_is_an_error_on_all_ranks(way, after, fake):
    """From then on each call fails. Nobody waits for what it was given."""
    fake.fake_reset(4, 200)
    ids = Ids(2)

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 5000), ("y", "float32", 300_000)], "mean", True, in_segment=True)
        plan.open_device(rank) if way == "staged" else ids.open(plan, rank)
        stream, tensors = Stream(), [Tensor(np.zeros(n, np.float32), rank) for n in (5000, 300_000)]
        team.barrier()
        if rank == 1:
            fake.fake_lose(1, after)

        def go_on():
            for _ in range(40):
                for number, tensor in enumerate(tensors):
                    plan.start_on(number, tensor.address, tensor.nbytes, 1.0 + rank, stream.handle)
                plan.wait_on(stream.handle)

        begin = time.monotonic()
        with pytest.raises(_native.Error) as error:
            go_on()
        team.close()
        assert time.monotonic() - begin < 9  # to wait for what it was given would take longer
        stream.close()
        for tensor in tensors:
            tensor.free()
        return str(error.value)

    texts = run([0, 0], work)
    assert re.fullmatch(r"The GPU's driver: cu\w+ failed with CUDA_ERROR_UNKNOWN\.", texts[1]), texts
    assert "rank 1 met an error" in texts[0]


@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_a_script_that_takes_its_time_is_no_error(way):
    """Between two tensors of a step more than the time limit, nor a first one that takes longer than that."""
    ids = Ids(2)

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 50), ("y", "float64", 50)], "sum", False, in_segment=True)
        plan.open_device(rank) if way == "staged" else ids.open(plan, rank)
        stream, tensors = Stream(), [Tensor(np.empty(50, dtype), rank) for dtype in (np.float32, np.float64)]
        stream.take_time(600)
        for number, tensor in enumerate(tensors):
            tensor.write(stream, np.ones(50, tensor.dtype))
            plan.start_on(number, tensor.address, tensor.nbytes, 1.0, stream.handle)
            time.sleep(0.8 * (1 - number))
        plan.wait_on(stream.handle)
        found = [tensor.read(stream) for tensor in tensors]
        plan.end()
        stream.close()
        for tensor in tensors:
            tensor.free()
        return found

    assert all((array == 2).all() for found in run([0, 0], work, timeout=0.5) for array in found)


@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_means_go_back_while_others_are_computed(way):
    """As soon as all ranks have started a tensor, whatever of the step is still missing."""
    ids = Ids(2)

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 50), ("y", "float64", 50)], "sum", False, in_segment=True)
        plan.open_device(rank) if way == "staged" else ids.open(plan, rank)
        stream, x = Stream(), Tensor(np.empty(50, np.float32), rank)
        x.write(stream, np.ones(50, np.float32))
        plan.start_on(0, x.address, x.nbytes, 1.0, stream.handle)
        begin = time.monotonic()
        while not (x.peek() == 2).all():
            assert time.monotonic() - begin < SOON
            time.sleep(0.001)
        plan.start_zeros(1, 1.0)
        plan.wait_on(stream.handle)
        plan.end()
        stream.close()
        x.free()

    run([0, 0], work)


@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_ctrl_c_ends_a_wait(way):
    transports, ids, over = _native.in_process_transports([0, 0]), Ids(2), threading.Event()

    def make(rank):
        team = _native.Team(transports[rank], 0, 1, 30.0, 30.0)
        plan = team.plan("x", [("x", "float32", 100)], "mean", False, in_segment=True)
        plan.open_device(rank) if way == "staged" else ids.open(plan, rank)
        return team, plan

    def never_comes():
        team, _ = make(1)
        over.wait(30)
        team.close()

    other = threading.Thread(target=never_comes)
    other.start()
    team, plan = make(0)
    plan.start_zeros(0, 1.0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit that it is ignored
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        plan.wait_on(0)
    seconds = time.monotonic() - begin
    over.set()
    team.close()
    other.join(30)
    assert seconds < SOON  # now that nothing is left to the next tests


@pytest.mark.parametrize("way", ["staged", "nccl"])
def test_a_team_that_is_closed_ends_steps_that_are_under_way(way):
    """That the other rank does not come to: at once, and the tensors are the caller's."""
    ids, everyone = Ids(2), threading.Barrier(2)

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 5000)], "mean", True, in_segment=True)
        plan.open_device(rank) if way == "staged" else ids.open(plan, rank)
        x, stream = Tensor(np.zeros(5000, np.float32), rank), Stream()
        everyone.wait(30)
        if rank == 0:
            plan.start_on(0, x.address, x.nbytes, 1.0, stream.handle)
            time.sleep(0.05)
            begin = time.monotonic()
            team.close()
            assert time.monotonic() - begin < SOON
            with pytest.raises(_native.Error, match="closed"):
                plan.wait_on(stream.handle)
        everyone.wait(30)
        stream.close()
        x.free()

    run([0, 0], work)


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


@pytest.mark.parametrize("call", ["cuMemHostRegister", *(call for call in CALLS if call != "cuStreamWaitEvent")])
def test_a_call_of_its_own_that_fails(call, fake):
    def work(team, rank):
        stream, tensor = Stream(), Tensor(np.zeros(100, np.float32))
        tensor.write(stream, np.full(100, rank, np.float32))
        stream.take_time(20)  # so the copies are under way when there is the error, and the team's memory ends
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


@pytest.mark.soak
def test_memory_of_copies_that_never_end_is_not_given_back(fake):
    """Neither of a plan nor of a call: a GPU that goes on after all writes to it."""

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 100)], "mean", False, in_segment=True)
        plan.open_device(0)
        stream, tensor = Stream(), Tensor(np.zeros(100, np.float32))
        fake.fake_hang(stream.handle, 1)
        begin = time.monotonic()
        with pytest.raises(_native.TimeoutError, match="has not copied what is to be reduced"):
            team_allreduce(team, tensor, "sum", stream)
        plan.start_on(0, tensor.address, tensor.nbytes, 1.0, stream.handle)
        with pytest.raises(_native.Error):
            plan.wait_on(stream.handle)
        team.close()
        assert time.monotonic() - begin < 20
        fake.fake_hang(None, 0)
        stream.close()
        tensor.free()

    run([0, 0], work, timeout=1.0)
    assert fake.fake_faults() == 0
    assert fake.fake_left() > 0
    fake.fake_forget()


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
