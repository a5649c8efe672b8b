"""Plans on GPUs that are not there, reduced by a fake NCCL within nodes and by the engine's network between them."""

import contextlib
import threading
import time

import numpy as np
import pytest
from device_steps import COUNTS, DTYPES
from direct_steps import DirectStep, Nodes, check_host_and_device, errors_in_a_step, fail_by_nccl, steps
from fake_cuda import driver, nccl
from in_process import SOON, check, data_of

from keras_hpc import _native

STEPS = 3
TWO = [0, 0, 1, 1]


@pytest.fixture(autouse=True)
def fake():
    nccl().fake_nccl_reset()
    driver().fake_reset(8, 200)
    yield driver()
    assert driver().fake_left() == driver().fake_faults() == nccl().fake_nccl_left() == 0


@pytest.mark.parametrize(
    ("nodes", "bucket_bytes"), [(TWO, 0), (TWO, 4096), ([0, 1, 0, 1], 100_000), ([0, 0, 0, 1, 1, 1], 0), ([0, 1], 0)]
)
def test_means_are_those_of_all_ranks(nodes, bucket_bytes):
    """With buckets whose parts are short, or empty, at the end."""
    many = Nodes(nodes)
    results = many.run(lambda team, rank: steps(team, rank, many, STEPS, bucket_bytes=bucket_bytes))
    for number in range(STEPS):
        check([of_rank[number] for of_rank in results], nodes, COUNTS, DTYPES, "mean", step=number)
    assert nccl().fake_nccl_calls(b"ncclAllReduce") == 0  # nothing is reduced twice
    assert nccl().fake_nccl_calls(b"ncclReduceScatter") == nccl().fake_nccl_calls(b"ncclAllGather") > 0


@pytest.mark.parametrize("counts", [[1], [2, 1, 3], [0, 31, 33], [100_001]])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tails_that_ranks_do_not_divide(dtype, counts):
    many, dtypes = Nodes([0, 0, 0, 1, 1, 1]), [dtype] * len(counts)
    results = many.run(lambda team, rank: steps(team, rank, many, 1, counts=counts, dtypes=dtypes))
    check([of_rank[0] for of_rank in results], [0] * 6, counts, dtypes, "mean")


def test_sums():
    many = Nodes(TWO)
    results = many.run(lambda team, rank: steps(team, rank, many, 2, op="sum"))
    for number in range(2):
        check([of_rank[number] for of_rank in results], TWO, COUNTS, DTYPES, "sum", step=number)


@pytest.mark.parametrize(
    "weights", [[1.0, 3.0, 2.0, 2.0], [16.0, 0.0, 5.0, 1.0], [2.0, 7.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
)
def test_weighted_means(weights):
    """A rank, or a node, without samples has NaN; a mean of no samples is zero."""
    many, nobody = Nodes(TWO), [rank for rank in range(4) if weights[rank] == 0]
    results = many.run(lambda team, rank: steps(team, rank, many, STEPS, weights, nobody))
    for number in range(STEPS):
        if any(weights):
            check([of_rank[number] for of_rank in results], TWO, COUNTS, DTYPES, "mean", weights, number)
        else:
            assert all((array == 0).all() for of_rank in results for array in of_rank[number])


def test_large_float16_do_not_overflow():
    many = Nodes(TWO)

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, many, weighted=True, counts=[50], dtypes=["float16"])) as step:
            step.start([np.full(50, 60000.0, np.float16)], 64.0)
            return step.wait()[0]

    for found in many.run(work):
        assert (found == 60000.0).all()


def test_values_may_be_rounded_between_nodes():
    """Only there: what one node has is not rounded, or its mean would be another."""
    many = Nodes(TWO)
    values = [1.0, 1 + 2**-9, 3.0, 3.0]  # the node's mean, 1 + 2^-10, is no bfloat16

    def work(team, rank):
        with contextlib.closing(
            DirectStep(team, rank, many, counts=[70], dtypes=["float32"], wire="bfloat16", op="sum")
        ) as step:
            step.start([np.full(70, values[rank], np.float32)])
            return step.wait()[0]

    found = many.run(work)
    assert all((array == array[0]).all() and array.tobytes() == found[0].tobytes() for array in found)
    assert found[0][0] == 8.0  # of 2 + 2^-9, rounded, and 6


def test_tensors_on_the_host_beside_others():
    many = Nodes([0, 0])  # one node: the mean over the peers, who are alone, is what NCCL gives
    check_host_and_device(many, many.run)


def test_what_nccl_is_given_is_in_one_order_whatever_comes_first():
    """Two plans at once on GPUs with room for one kernel, and a node whose GPUs are late in turn."""
    many = Nodes(TWO)
    nccl().fake_nccl_narrow()

    def work(team, rank):
        with (
            contextlib.closing(DirectStep(team, rank, many, weighted=True, bucket_bytes=50_000)) as first,
            contextlib.closing(DirectStep(team, rank, many)) as second,
        ):
            found = []
            for number in range(STEPS):
                if number % 4 == rank:
                    first.stream.take_time(20)
                first.start(data_of(rank, COUNTS, DTYPES, number))
                second.start(data_of(rank, COUNTS, DTYPES, 100 + number))
                found.append([step.wait() for step in (first, second)])
            return found

    results = many.run(work)
    for number in range(STEPS):
        for plan in range(2):
            check([r[number][plan] for r in results], TWO, COUNTS, DTYPES, "mean", step=100 * plan + number)


CALLS = ["ncclReduceScatter", "ncclAllGather", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "what is under way"]


@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_a_step_is_one_on_all_nodes(call):
    """At once on its node, and on others once they are told."""
    many = Nodes(TWO)
    fail, said = fail_by_nccl(call, 5)
    texts = errors_in_a_step(many, TWO, fail, lambda nodes, work: many.run(work), seconds=10)
    failed = [rank for rank, text in enumerate(texts) if said in text]
    assert len(failed) == (2 if call == "what is under way" else 1), texts  # on both nodes there is such a rank of NCCL
    for rank in {0, 1, 2, 3} - set(failed):
        assert any(f"rank {culprit}" in texts[rank] for culprit in failed), texts


def test_a_plan_that_ends_takes_its_parts_along():
    many = Nodes(TWO)

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, many)):
            held = many.peers[rank].report()["plan_bytes"]
        return held, many.peers[rank].report()["plan_bytes"]

    for held, left in many.run(work):
        assert held > left == 0


def test_peers_that_fail_alone_are_an_error_at_once():
    """As where the network between nodes does: nobody waits for the time limit."""
    many, everyone = Nodes(TWO), threading.Barrier(4)

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, many)) as step:
            text = ""
            if rank < 2:
                step.start(data_of(rank, COUNTS, DTYPES))
                time.sleep(0.2)  # parts are on their way to the other node, which does not come
                begin = time.monotonic()
                if rank == 1:
                    many.peers[rank].close()
                with pytest.raises(_native.Error) as error:
                    step.wait()
                assert time.monotonic() - begin < SOON
                text = str(error.value)
            everyone.wait(30)
            step.abandon(team)
            return text

    first, second = many.run(work)[:2]
    assert "Between nodes, where each node counts as one rank" in second
    assert "closed" in second
    assert "rank 1 met an error" in first


def test_a_node_that_does_not_come_is_an_error_in_time():
    many = Nodes(TWO, timeout=1.5)

    def work(team, rank):
        with contextlib.closing(DirectStep(team, rank, many)) as step:
            if rank < 2:
                step.start(data_of(rank, COUNTS, DTYPES))
                with pytest.raises(_native.Error) as error:
                    step.wait()
            else:
                time.sleep(3)
            step.abandon(team)
            return str(error.value) if rank < 2 else ""

    texts = many.run(work)[:2]
    assert any("NCCL has not sent the tensors to the other nodes, or not all nodes theirs" in text for text in texts)
