"""Which bits the engine gives: the order of sums, weights, NaN, denormals, 16-bit values; against NumPy."""

import ctypes
import platform

import numpy as np
import pytest
from in_process import DTYPES, as_bytes, reduce_plan, run


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 1], [0, 1, 2]])
def test_sum_is_taken_in_rank_order_and_equal_weights_give_the_plain_mean(nodes):
    """On one node the result is NumPy's in float32, added rank by rank, to the last bit.

    Between nodes, sums travel multiplied by the weight: rounded once more on each node.
    """

    def work(team, rank):
        x = np.random.default_rng(rank).normal(size=50_000).astype(np.float32)
        y = x.copy()
        reduce_plan(team, [x], ["float32"], "mean", True, 24.0)
        team.allreduce(as_bytes(y), "float32", "mean")
        return x, y

    results = run(nodes, work)
    for x, y in results:
        np.testing.assert_allclose(x, y, rtol=3e-7, atol=3e-7)
        assert x.tobytes() == results[0][0].tobytes()
    if nodes == [0, 0, 0]:
        assert results[0][0].tobytes() == results[0][1].tobytes()
        a, b, c = (np.random.default_rng(r).normal(size=50_000).astype(np.float32) for r in range(3))
        assert results[0][0].tobytes() == (((a + b) + c) * np.float32(1 / 3)).tobytes()


@pytest.mark.parametrize("nodes", [[0, 0, 0], [0, 1, 1]])
def test_values_of_a_rank_without_samples_are_not_read(nodes):
    def work(team, rank):
        x = np.full(1000, np.nan if rank == 1 else rank + 1.0, np.float32)
        reduce_plan(team, [x], ["float32"], "mean", True, 0.0 if rank == 1 else 2.0)
        return x

    for x in run(nodes, work):
        np.testing.assert_array_equal(x, 2.0)


@pytest.mark.parametrize("op", ["sum", "min", "max"])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], [0, 1, 2]])
def test_nan_reaches_all_ranks_bit_for_bit(nodes, op):
    def work(team, rank):
        x = np.array([np.nan, 1.0, -0.0, 0.0] if rank == 0 else [1.0, np.nan, 0.0, -0.0], np.float32)
        team.allreduce(as_bytes(x), "float32", op)
        return x

    results = run(nodes, work)
    assert np.isnan(results[0][:2]).all()
    assert len({x.tobytes() for x in results}) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets a register of that processor")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=str)
def test_denormals_count_on_threads_that_take_them_for_zero(nodes, dtype):
    """TensorFlow and XLA set it so on their threads, which may come to reduce."""
    small = {"float16": 3e-5, "bfloat16": 1e-39, "float32": 1e-39}[dtype]
    x = np.full(100, small, np.float64).astype(DTYPES[dtype])
    libm = ctypes.CDLL("libm.so.6")

    def work(team, rank):
        results = [x.copy(), x.copy()]
        plan = team.plan("p", [("a", dtype, 100)], "sum", False, "float16" if dtype == "float32" else "")
        environment = (ctypes.c_uint32 * 8)()
        libm.fegetenv(environment)
        environment[7] |= 0x8040  # of the last word, MXCSR
        libm.fesetenv(environment)
        try:
            plan.start(0, as_bytes(results[0]))
            plan.wait(0)
            team.allreduce(as_bytes(results[1]), dtype, "sum")
        finally:
            environment[7] &= ~0x8040
            libm.fesetenv(environment)
        return [result.tobytes() for result in results]

    # As float16 on the wire such a float32 is none.
    plan_sum = x * 0 if dtype == "float32" and nodes == [0, 1] else x + x
    assert run(nodes, work, 0) == [[plan_sum.tobytes(), (x + x).tobytes()]] * 2


def test_a_weighted_mean_has_the_bits_of_numpy():
    """Multiplied, rounded, added, rounded: also where a processor could do it with one rounding."""
    weights = [3.0, 1.0, 7.0]
    factors = [np.float32(weight / sum(weights)) for weight in weights]

    def work(team, rank):
        x = np.random.default_rng(rank).normal(size=50_000).astype(np.float32)
        reduce_plan(team, [x], ["float32"], "mean", True, weights[rank])
        return x.tobytes()

    a, b, c = (np.random.default_rng(r).normal(size=50_000).astype(np.float32) for r in range(3))
    want = (a * factors[0] + b * factors[1]) + c * factors[2]
    assert set(run([0, 0, 0], work)) == {want.tobytes()}


def test_every_float16_is_read_and_written_right():
    bits = np.arange(2**16, dtype=np.uint16)
    every = bits.view(np.float16)

    def work(team, rank):
        x = every.copy() if rank == 0 else np.zeros_like(every)
        team.allreduce(as_bytes(x), "float16", "sum")
        return x

    for x in run([0, 0], work, 0):
        nan = np.isnan(every)
        np.testing.assert_array_equal(x[~nan], every[~nan] + np.float16(0))
        assert np.isnan(x[nan]).all()
