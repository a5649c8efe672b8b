# SPDX-License-Identifier: Apache-2.0
"""Algorithms between nodes over real MPI: MPICH is told that each rank lives on a node of its own."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import keras_hpc
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec

RANKS = {"torch": (3,)}
SOAK = {"jax": (3,)}
ENV = {"MPIR_CVAR_NUM_CLIQUES": "8"}

rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ALGORITHMS = ("recursive_doubling", "rabenseifner", "ring", "pairwise", "radix_k", "library")
COUNTS = (1, 5, 4001, 600_001)


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(teams=6, wire_dtype="bfloat16")  # a team for each algorithm
    yield
    keras_hpc.finalize()


def _data(seed):
    return np.random.default_rng([seed, rank]).integers(-8, 8, COUNTS[seed]).astype(np.float32)


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize(("number", "algorithm"), enumerate(ALGORITHMS))
def test_sums_equal_those_of_mpi(number, algorithm, wire):
    team = current.job().teams[number]
    assert team.node_count == size
    team.native.add_choice("network", 0, 2**62, algorithm)
    specs = [TensorSpec(f"t{i}", (count,), "float32") for i, count in enumerate(COUNTS)]
    plan = team.plan(f"test {wire}", specs, op="sum", weighted=False, wire_dtype=wire)
    planned = [_data(i) for i in range(len(COUNTS))]
    for i, x in enumerate(planned):
        plan.start(i, x)
    for i in range(len(planned)):
        plan.wait(i)
    for i, x in enumerate(planned):
        want, called = np.empty_like(x), _data(i)
        MPI.COMM_WORLD.Allreduce(_data(i), want)
        team.native.allreduce(called.view(np.uint8), "float32", "sum", "staged", wire or "")
        np.testing.assert_array_equal(x, want)  # small integers: exact in 16 bits, too
        np.testing.assert_array_equal(called, want)


def test_only_gradients_are_rounded():
    x = np.full(100_000, 1 + 2.0**-20, np.float32)
    np.testing.assert_array_equal(keras_hpc.allreduce(x, "mean"), x)


def test_gradients_of_a_model_are_rounded_alike():
    import keras

    current.job().teams[0].native.add_choice("network", 0, 2**62, "ring")  # which sends all sums rounded
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(300), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = model.get_weights()
    x = np.random.default_rng(rank).normal(size=(8, 16)).astype(np.float32)
    model.train_on_batch(x, x[:, :1])
    steps = np.concatenate([(b - a).ravel() for a, b in zip(model.get_weights(), before, strict=True)])
    everyone = MPI.COMM_WORLD.allgather(steps.tobytes())
    assert everyone == [everyone[0]] * size
    # What travels is the sum of gradients times samples, 8 on each rank: of a bias that was zero, it can be seen.
    total = (before[-1] - model.get_weights()[-1]).astype(np.float32) * 8 * size
    rounded = total.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert size == 1 or np.all(np.abs(total - rounded) <= 1e-6 * np.abs(total))
