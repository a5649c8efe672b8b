"""Plans with tensors on GPUs that are not there, reduced from GPU to GPU by an NCCL that is not there."""

import contextlib
import signal
import threading
import time

import numpy as np
import pytest
from device_steps import COUNTS, DTYPES
from direct_steps import (
    DirectStep,
    Ids,
    check_end_in_a_step,
    check_host_and_device,
    check_one_failed,
    check_weights_on_the_device,
    error_without_the_other,
    errors_in_a_step,
    fail_by_nccl,
    steps,
)
from fake_cuda import Tensor, driver, nccl
from in_process import check, data_of, run

from keras_hpc import _native

STEPS = 4


@pytest.fixture(autouse=True)
def fake():
    nccl().fake_nccl_reset()
    driver().fake_reset(4, 200)
    yield driver()
    assert driver().fake_left() == driver().fake_faults() == nccl().fake_nccl_left() == 0


@pytest.mark.parametrize(
    ("nodes", "bucket_bytes"),
    [([0], 0), ([0] * 2, 0), ([0] * 3, 4096), ([0] * 4, 0), ([0, 1], 0), ([0, 0, 1, 1], 4096)],
)
def test_means_are_those_of_all_ranks(nodes, bucket_bytes):
    """On several nodes NCCL sends between them, too."""
    ids = Ids(len(nodes))
    results = run(nodes, lambda team, rank: steps(team, rank, ids, STEPS, bucket_bytes=bucket_bytes))
    for number in range(STEPS):
        check([of_rank[number] for of_rank in results], nodes, COUNTS, DTYPES, "mean", step=number)


def test_sums():
    ids = Ids(3)
    results = run([0] * 3, lambda team, rank: steps(team, rank, ids, 2, op="sum"))
    for number in range(2):
        check([of_rank[number] for of_rank in results], [0] * 3, COUNTS, DTYPES, "sum", step=number)


@pytest.mark.parametrize("weights", [[1.0, 3.0], [16.0, 16.0, 5.0], [2.0, 0.0, 7.0, 0.0], [0.0, 0.0]])
def test_weighted_means(weights):
    """A rank without samples has NaN; a mean of no samples is zero."""
    n = len(weights)
    ids, nobody = Ids(n), [rank for rank in range(n) if weights[rank] == 0]
    results = run([0] * n, lambda team, rank: steps(team, rank, ids, STEPS, weights, nobody))
    for number in range(STEPS):
        if any(weights):
            check([of_rank[number] for of_rank in results], [0] * n, COUNTS, DTYPES, "mean", weights, number)
        else:
            assert all((array == 0).all() for of_rank in results for array in of_rank[number])


def test_large_float16_do_not_overflow():
    """They are multiplied before they are added up."""
    ids = Ids(4)

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, ids, weighted=True, counts=[50], dtypes=["float16"])) as step:
            step.start([np.full(50, 60000.0, np.float16)], 64.0)
            return step.wait()[0]

    for found in run([0] * 4, work):
        assert (found == 60000.0).all()


def test_tensors_on_the_host_beside_others():
    check_host_and_device(Ids(2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_that_the_device_has(dtype):
    check_weights_on_the_device(Ids(2), dtype)


CALLS = ["ncclAllReduce", "ncclRedOpCreatePreMulSum", "ncclRedOpDestroy", "ncclCommGetAsyncError"]
DRIVER = ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"]
DRIVER += ["cuEventQuery", "cuPointerGetAttribute"]


@pytest.mark.parametrize(
    "call",
    [*CALLS, "what is under way", "cuMemcpyDtoDAsync", *(pytest.param(c, marks=pytest.mark.soak) for c in DRIVER)],
)
def test_an_error_in_a_step_is_one_on_all_ranks(call):
    """At once, whatever NCCL has under way; then the tensors are freed."""
    fail, said = fail_by_nccl(call, 2)
    check_one_failed(errors_in_a_step(Ids(3), [0] * 3, fail), said)


@pytest.mark.parametrize(("how", "nodes"), [("late", [0, 0]), ("closed", [0, 0]), ("late", [0, 1])])
def test_a_rank_that_does_not_come_is_an_error_in_time(how, nodes):
    """What the others have under way is aborted."""
    text = error_without_the_other(Ids(2), how, nodes)
    assert ("NCCL has not reduced the tensors" if how == "late" else "rank 1") in text


def test_plans_started_together_keep_one_order():
    """Where a GPU has room for one kernel, and the tensors of the plan that comes first are late on one rank."""
    ids = Ids(2)
    nccl().fake_nccl_narrow()

    def work(team, rank):
        with (
            contextlib.closing(DirectStep(team, rank, ids, weighted=True)) as first,
            contextlib.closing(DirectStep(team, rank, ids)) as second,
        ):
            found = []
            for number in range(STEPS):
                if number % 2 == rank:
                    first.stream.take_time(20)
                first.start(data_of(rank, COUNTS, DTYPES, number))
                second.start(data_of(rank, COUNTS, DTYPES, 100 + number))
                # Who waits for them does so in any order.
                found.append([step.wait() for step in ((first, second) if rank else (second, first))][:: rank * 2 - 1])
            return found

    results = run([0, 0], work, timeout=5)
    for number in range(STEPS):
        for plan in range(2):
            check([r[number][plan] for r in results], [0, 0], COUNTS, DTYPES, "mean", step=100 * plan + number)


def test_a_plan_that_ends_in_a_step_leaves_the_team_alone():
    """What it has under way is aborted, though the other rank has not come."""
    check_end_in_a_step(Ids(2))


def test_bad_input():
    ids = Ids(1)

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, ids)) as step:
            arrays = data_of(rank, COUNTS, DTYPES)
            elsewhere = Tensor(arrays[0], device=1)
            with pytest.raises(_native.Error, match=r"'t0' is on another GPU than its plan.*Received: GPU 1"):
                step.plan.start_on(0, elsewhere.address, elsewhere.nbytes, 1.0, step.stream.handle)
            elsewhere.free()
            with pytest.raises(_native.Error, match="was waited for but not started"):
                step.plan.wait_on(step.stream.handle)
            with pytest.raises(ValueError, match="Expected the bytes that nccl_id returned"):
                step.plan.open_nccl(0, b"x")
            step.start(arrays)
            with pytest.raises(_native.Error, match="was started twice"):
                step.start(arrays)
            return step.wait()

    check(run([0], work), [0], COUNTS, DTYPES, "mean")


def test_ctrl_c_ends_the_wait_for_nccl_to_connect():
    transports, ids, over = _native.in_process_transports([0, 0]), Ids(1), threading.Event()

    def make(rank):
        team = _native.Team(transports[rank], 0, 0, 30.0, 30.0)
        return team, team.plan("x", [("x", "float32", 100)], "mean", False, in_segment=True)

    def never_comes():
        team, _ = make(1)
        over.wait(30)
        team.close()

    other = threading.Thread(target=never_comes)
    other.start()
    team, plan = make(0)
    begin = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit that it is ignored
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        plan.open_nccl(0, ids.next())
    assert time.monotonic() - begin < 5
    over.set()
    team.close()
    other.join(30)
    nccl().fake_nccl_reset()  # who waits there still
    until = time.monotonic() + 10
    while driver().fake_left() and time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["one GPU for all", "one cannot", "no memory"])
def test_gpus_that_nccl_cannot_connect(how, fake):
    """All ranks hear of it, and can go on without."""
    ids = Ids(2)

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 100)], "mean", False, in_segment=True)
        number = ids.next()
        if how == "one cannot" and rank == 0:
            nccl().fake_nccl_fail(b"ncclCommInitRank", 0)
        if how == "no memory" and rank == 0:
            fake.fake_fail(b"cuMemAlloc", 0)
        with pytest.raises(_native.Error) as error:
            plan.open_nccl(0 if how == "one GPU for all" else rank, number)
        team.barrier()  # who cannot connect waits for longer than who hangs
        return str(error.value)

    texts = run([0, 0], work, timeout=1.0)
    if how == "one GPU for all":
        assert texts == ["NCCL: ncclCommInitRank failed: invalid usage."] * 2
    else:
        call = "ncclCommInitRank" if how == "one cannot" else "cuMemAlloc"
        assert sum(f"{call} failed" in text for text in texts) == 1
        (hung,) = [text for text in texts if "NCCL has not connected the GPUs" in text]
        assert "NCCL_SOCKET_IFNAME" in hung
        assert "number of steps" not in hung
    nccl().fake_nccl_reset()  # who waits there still
    until = time.monotonic() + 10
    while driver().fake_left() and time.monotonic() < until:
        time.sleep(0.01)
