"""Plans with tensors on GPUs that are not there, reduced by an MPI library that takes their memory, and a kernel.

Between ranks that are threads, messages are copied as such a library would: at once, whatever streams have still to do.
"""

import numpy as np
import pytest
from device_steps import COUNTS, DTYPES, fresh_driver
from direct_steps import (
    ByMpi,
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
from fake_cuda import nvrtc
from in_process import check, run

from keras_hpc import _native

STEPS = 3


@pytest.fixture(autouse=True)
def fake():
    for found in fresh_driver():
        found.fake_reset(4, 200)
        yield found


@pytest.fixture
def by_mpi():
    return ByMpi()


@pytest.mark.parametrize("weights", [None, [1.0, 3.0], [16.0, 16.0, 5.0], [2.0, 0.0, 7.0, 0.0], [0.0, 0.0]])
@pytest.mark.parametrize(("gpus", "bucket_bytes"), [(4, 0), (1, 4096)])
def test_means_are_added_up_in_the_order_of_the_ranks(weights, gpus, bucket_bytes):
    """So they have the bits of a plan on the host of one node. A rank without samples has NaN."""
    n = 3 if weights is None else len(weights)
    nobody = [rank for rank in range(n) if weights and weights[rank] == 0]
    by_mpi, nodes = ByMpi(gpus), list(range(n))
    found = by_mpi.run(
        nodes, lambda team, rank: steps(team, rank, by_mpi, STEPS, weights, nobody, bucket_bytes=bucket_bytes)
    )
    expected = run([0] * n, lambda team, rank: on_the_host(team, rank, STEPS, weights, nobody))
    for rank in range(n):
        for number in range(STEPS):
            for mine, theirs in zip(found[rank][number], expected[rank][number], strict=True):
                assert mine.tobytes() == theirs.tobytes()
            if weights is None or any(weights):
                check([r[number] for r in found], nodes, COUNTS, DTYPES, "mean", weights, number)


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 1, 1], [0, 1, 0, 1]])
def test_sums_on_nodes_of_any_shape(nodes, by_mpi):
    results = by_mpi.run(nodes, lambda team, rank: steps(team, rank, by_mpi, 2, op="sum"))
    for number in range(2):
        check([of_rank[number] for of_rank in results], nodes, COUNTS, DTYPES, "sum", step=number)


def test_tensors_on_the_host_beside_others(by_mpi):
    check_host_and_device(by_mpi, lambda work: by_mpi.run([0, 1], work))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_that_the_device_has(dtype, by_mpi):
    check_weights_on_the_device(by_mpi, dtype, by_mpi.run)


CALLS = ["cuLaunchKernel", "cuEventQuery", "cuEventRecord"]
MORE = ["cuMemcpyDtoDAsync", "cuStreamWaitEvent", "cuMemcpyDtoHAsync", "cuPointerGetAttribute"]


@pytest.mark.parametrize("call", [*CALLS, *(pytest.param(c, marks=pytest.mark.soak) for c in MORE)])
def test_an_error_in_a_step_is_one_on_all_ranks(call, by_mpi):
    check_an_error_in_a_step(by_mpi, call, by_mpi.run)


@pytest.mark.parametrize("how", ["late", "closed"])
def test_a_rank_that_does_not_come_is_an_error_in_time(how, by_mpi):
    text = error_without_the_other(by_mpi, how, [0, 0], by_mpi.run)
    assert ("Not all ranks have reduced the tensors" if how == "late" else "rank 1") in text


def test_plans_of_two_teams_at_the_same_time(by_mpi):
    check_two_teams(by_mpi, by_mpi.run, by_mpi.copy)


def test_a_plan_that_ends_in_a_step_leaves_the_team_alone(by_mpi):
    check_end_in_a_step(by_mpi, by_mpi.run)


@pytest.mark.parametrize("call", ["cuMemAlloc", "cuModuleLoadData", "cuLaunchKernel"])
def test_gpus_that_cannot_be_used(call, fake, by_mpi):
    """It is an error on that rank alone, which the others hear of elsewhere; both can go on without."""

    def work(team, rank):
        plan = team.plan("x", [("x", "float32", 100)], "mean", False, in_segment=True)
        team.barrier()
        if rank == 0:
            fake.fake_fail(call.encode(), 0)  # on the rank that comes first
        team.barrier()
        said = ""
        try:
            plan.open_mpi(rank)
        except _native.Error as error:
            said = str(error)
        team.barrier()
        if not said:
            plan.close_device()
        check_on_the_host(team, plan, rank)
        return said

    assert sorted(by_mpi.run([0, 0], work)) == ["", f"The GPU's driver: {call} failed with CUDA_ERROR_UNKNOWN."]


def test_a_library_that_does_not_take_their_memory():
    nvrtc()

    def work(team, rank):
        assert not team.takes_device_memory
        plan = team.plan("x", [("x", "float32", 100)], "mean", False, in_segment=True)
        with pytest.raises(_native.Error, match="does not say that it takes memory of GPUs"):
            plan.open_mpi(rank)
        check_on_the_host(team, plan, rank)

    run([0, 0], work)
