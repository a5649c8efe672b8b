# SPDX-License-Identifier: Apache-2.0
"""Across nodes, also uneven ones: MPICH is told that its ranks live on two nodes, so slices go over MPI."""

import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from checkpoint_cases import BATCH, X, Y, folder, network, resumed_equals_uninterrupted
from keras_cases import Parts, assert_identical, assert_like_one_rank, data, dense, job, on_one_rank, values
from mpi4py import MPI

import keras_hpc
from keras_hpc import _native
from keras_hpc.job import launch
from keras_hpc.keras_hooks.checkpoint import storage
from keras_hpc.spatial import geometry

__all__ = ["folder"]
RANKS = {"torch": (3,)}
SOAK = {"jax": (3,)}
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


def test_messages_longer_than_mpi_takes_go_in_parts():
    extent, inner = 6, 30_000
    leaders = MPI.COMM_WORLD.allgather(MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).bcast(keras_hpc.rank()))
    nodes = [sorted(set(leaders)).index(leader) for leader in leaders]
    transport = launch._native_mpi(MPI.COMM_WORLD).transport(nodes, largest_message=70_000)
    team = _native.Team(transport, 9, 0, 20.0, 20.0)
    move = geometry.move(extent, team.size, [(0, extent)] * team.size, team.rank)
    sends = [(other, *rows) for other, rows in move.sends]
    args = (move.extent, move.own, move.pads, 0.0, sends, list(move.receives), move.lower, 1, (0, 0))
    rows = _native.make_exchange(team, "rows", "", *args)
    whole = np.arange(extent * inner, dtype=np.float32).reshape(extent, inner)
    begin, end = geometry.bounds(extent, team.size)[team.rank]
    found = np.empty_like(whole)
    rows.run(whole[begin:end].reshape(-1).view(np.uint8), found.reshape(-1).view(np.uint8), 1, inner, "float32", False)
    np.testing.assert_array_equal(found, whole)
    x = np.ones(100_003, np.float32)
    team.allreduce(x.view(np.uint8), "float32", "sum")
    assert np.all(x == team.size)
    team.close()


def test_training_equals_one_rank():
    arrays = data()

    def make():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def train(model, whole):
        return model.fit(Parts(*arrays, whole=whole), epochs=3, shuffle=False, verbose=0).history

    assert_like_one_rank(make, train)


def test_a_model_in_parts():
    """Rows go between nodes as messages, and inside of one by its memory."""

    def train():
        keras.utils.set_random_seed(3)
        layers = keras.layers
        model = keras.Sequential([
            keras.Input((23, 6, 2)), layers.Conv2D(4, 5, strides=2, padding="same", activation="tanh"),
            layers.BatchNormalization(), layers.Conv2D(4, 3, padding="same"),
            layers.GlobalMaxPooling2D(), layers.Dense(3),
        ])  # fmt: skip
        model.compile(keras.optimizers.SGD(0.01), "mse")
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(6, 23, 6, 2)).astype("float32"), rng.normal(size=(6, 3)).astype("float32")
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return values(model)

    keras_hpc.finalize()
    keras_hpc.init(spatial=MPI.COMM_WORLD.size)
    assert keras_hpc.node_count() == 2
    expected = on_one_rank(train)
    found = train()
    assert_identical(found)
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_loses_no_checkpoint(lost, folder, monkeypatch):
    """Each node has a folder that the other one does not see, and one of them loses it."""
    mine = os.path.join(folder, f"node{keras_hpc.node()}")
    answer = storage.Probe.answer
    monkeypatch.setattr(storage.Probe, "answer", lambda path, rank: path.is_relative_to(mine) and answer(path, rank))
    written = {}

    def lose(path):
        written.update({step.name: len(list(step.glob("rank*"))) for step in Path(path).glob("step-*")})
        keras_hpc.barrier()
        if keras_hpc.node() == lost and keras_hpc.local_rank() == 0:
            shutil.rmtree(path)
        keras_hpc.barrier()

    resumed_equals_uninterrupted(mine, network, (7,), lambda: (X, Y), between=lose, batch_size=BATCH, every=3)
    assert written["step-000000003"] == keras_hpc.local_size(), "the ranks of a node write it together"
