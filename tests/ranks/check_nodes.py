# SPDX-License-Identifier: Apache-2.0
"""Across nodes, also uneven ones: MPICH is told that its ranks live on two nodes, so slices go over MPI."""

import keras
import numpy as np
import pytest
from keras_cases import Parts, assert_like_one_rank, data, dense, job
from mpi4py import MPI

import keras_hpc

RANKS = {"jax": (3,)}
SOAK = {"torch": (3,)}
ENV = {"MPIR_CVAR_NUM_CLIQUES": "2"}


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(shard=False)
    yield
    keras_hpc.finalize()


def test_two_nodes_are_seen():
    assert keras_hpc.node_count() == 2
    assert job().teams[0].native.threads == 1
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert (keras_hpc.local_rank(), keras_hpc.local_size()) == (node.rank, node.size)


@pytest.mark.parametrize("count", [1, 1000, 1_000_003])
def test_allreduce_equals_mpi(count):
    x = np.random.default_rng(keras_hpc.rank()).normal(size=count).astype(np.float32)
    want = np.empty_like(x)
    MPI.COMM_WORLD.Allreduce(x, want)
    got = keras_hpc.allreduce(x, op="sum")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert MPI.COMM_WORLD.allgather(got.tobytes()) == [got.tobytes()] * keras_hpc.size()


def test_training_equals_one_rank():
    arrays = data()

    def make():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def train(model, whole):
        return model.fit(Parts(*arrays, whole=whole), epochs=3, shuffle=False, verbose=0).history

    assert_like_one_rank(make, train)
