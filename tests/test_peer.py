"""Plans with tensors on GPUs that are not there, reduced from GPU to GPU by the engine's kernel."""

import re

import numpy as np
import pytest
from device_steps import COUNTS, DTYPES, fresh_driver
from direct_steps import (
    Peers,
    check_an_error_in_a_step,
    check_end_in_a_step,
    check_host_and_device,
    check_on_the_host,
    check_two_teams,
    check_weights_on_the_device,
    error_without_the_other,
    on_the_host,
    steps,
)
from fake_cuda import Stream, Tensor, nvrtc
from in_process import as_bytes, check, run

from keras_hpc import _native

STEPS = 3


@pytest.fixture(autouse=True)
def fake():
    for found in fresh_driver():
        found.fake_reset(4, 200)
        yield found
        # What a rank could not give back, because another one had not left yet, it does now.
        run([0], lambda team, rank: steps(team, rank, Peers(), 1))


@pytest.mark.parametrize("weights", [None, [1.0, 3.0], [16.0, 16.0, 5.0], [2.0, 0.0, 7.0, 0.0], [0.0, 0.0]])
@pytest.mark.parametrize(("gpus", "bucket_bytes"), [(4, 0), (1, 4096)])
def test_means_have_the_bits_of_the_host(weights, gpus, bucket_bytes):
    """Also on GPUs that ranks share. A rank without samples has NaN; a mean of no samples is zero."""
    n = 3 if weights is None else len(weights)
    nobody = [rank for rank in range(n) if weights and weights[rank] == 0]
    peers = Peers(gpus)
    found = run([0] * n, lambda team, rank: steps(team, rank, peers, STEPS, weights, nobody, bucket_bytes=bucket_bytes))
    expected = run([0] * n, lambda team, rank: on_the_host(team, rank, STEPS, weights, nobody))
    for rank in range(n):
        for number in range(STEPS):
            for mine, theirs in zip(found[rank][number], expected[rank][number], strict=True):
                assert mine.tobytes() == theirs.tobytes()
            if weights is None or any(weights):
                check([r[number] for r in found], [0] * n, COUNTS, DTYPES, "mean", weights, number)


def test_sums_of_one_to_four_ranks():
    for n in range(1, 5):
        peers = Peers()
        results = run([0] * n, lambda team, rank, peers=peers: steps(team, rank, peers, 2, op="sum"))
        for number in range(2):
            check([of_rank[number] for of_rank in results], [0] * n, COUNTS, DTYPES, "sum", step=number)


def test_every_value_of_16_bits():
    """Sums with all of them are those of the host: subnormals, infinities, ties between two values."""
    for dtype in ("float16", "bfloat16"):
        every = np.arange(1 << 16, dtype=np.uint16)
        every = [every, np.roll(every, 4321), np.full_like(every, 1)]  # of each rank, as bits

        def on_device(team, rank, dtype=dtype, every=every):
            plan = team.plan("x", [("x", dtype, 1 << 16)], "mean", True, in_segment=True)
            plan.open_peer(0)  # all on one GPU
            stream, x = Stream(), Tensor(every[rank])
            x.write(stream, every[rank])
            plan.start_on(0, x.address, x.nbytes, 1.0 + rank, stream.handle)
            plan.wait_on(stream.handle)
            found = x.read(stream)
            plan.end()
            stream.close()
            x.free()
            return found

        def on_host(team, rank, dtype=dtype, every=every):
            plan = team.plan("x", [("x", dtype, 1 << 16)], "mean", True)
            array = every[rank].copy()
            plan.start(0, as_bytes(array), 1.0 + rank)
            plan.wait(0)
            plan.end()
            return array

        nvrtc()
        largest = 0x7C00 if dtype == "float16" else 0x7F80
        expected = run([0] * 3, on_host)[0]
        for found in run([0] * 3, on_device):
            numbers = (expected & 0x7FFF) <= largest  # the bits of a NaN are the processor's
            assert ((found & 0x7FFF) <= largest).tolist() == numbers.tolist()
            assert (found[numbers] == expected[numbers]).all()


def test_tensors_on_the_host_beside_others():
    check_host_and_device(Peers())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_that_the_device_has(dtype):
    check_weights_on_the_device(Peers(), dtype)


CALLS = ["cuLaunchKernel", "cuMemcpyDtoDAsync", "cuEventQuery"]
MORE = ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync", "cuPointerGetAttribute"]


@pytest.mark.parametrize("call", [*CALLS, *(pytest.param(c, marks=pytest.mark.soak) for c in MORE)])
def test_an_error_in_a_step_is_one_on_all_ranks(call):
    check_an_error_in_a_step(Peers(), call)


@pytest.mark.parametrize("how", ["late", "closed"])
def test_a_rank_that_does_not_come_is_an_error_in_time(how):
    text = error_without_the_other(Peers(), how, [0, 0])
    assert ("The node's GPUs have not reduced the tensors" if how == "late" else "rank 1") in text


def test_plans_of_two_teams_at_the_same_time():
    """No kernel waits for another: so steps may overlap in any order, and what is late on one rank only is right."""
    check_two_teams(Peers())


def test_a_plan_that_ends_in_a_step_leaves_the_team_alone():
    check_end_in_a_step(Peers())


@pytest.mark.parametrize(
    "call", ["cuMemAlloc", "cuIpcGetMemHandle", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"]
)
def test_gpus_that_cannot_be_used(call, fake):
    """All ranks hear of it, and can go on without."""
    nvrtc()

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 100)], "mean", False, in_segment=True)
        if rank == 0:
            fake.fake_fail(call.encode(), 0)  # on the rank that comes first
        team.barrier()
        with pytest.raises(_native.Error) as error:
            plan.open_peer(rank)
        check_on_the_host(team, plan, rank)
        return str(error.value)

    reason, other = sorted(run([0, 0], work), key=len)
    assert f"The GPU's driver: {call} failed" in reason
    assert re.fullmatch("rank [01]: " + re.escape(reason), other)
