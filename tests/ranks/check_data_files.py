# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811
"""`keras_hpc.data`: each sample once an epoch by all ranks together, each byte read once by all of them."""

import os
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from data_cases import SAMPLES, X, Y, _job, mode, opened, rows_of_all, steps_of_all, visits_each_once
from keras_cases import assert_like_one_rank, data, dense, enough, everyone, job

import keras_hpc
from keras_hpc.data import files
from keras_hpc.data.files import Source

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (1, 2), "jax": (1, 2), "torch": (3,)}


@pytest.fixture(scope="module")
def folder():
    """A folder with files of samples, the same for all ranks, in which `stage` keeps what is read."""
    path = Path(keras_hpc.broadcast_object(tempfile.mkdtemp()))
    if job().rank == 0:
        with h5py.File(path / "rows.h5", "w") as file:
            file["x"], file["y"] = X, Y
        x, y = data()
        with h5py.File(path / "train.h5", "w") as file:
            file["x"], file["y"] = x, y
        np.save(path / "large.npy", np.random.default_rng(1).normal(size=(640, 32 << 10)))  # 160 MiB: 40 blocks
    keras_hpc.barrier()
    yield path
    keras_hpc.barrier()
    if job().rank == 0:
        for name in os.listdir(path):
            (path / name).unlink()
        path.rmdir()


def rows(folder, batch=8, **kwargs):
    return keras_hpc.data.Dataset(folder / "rows.h5", batch, fields=("x", "y"), block=4, mixed=3, **kwargs)


def test_each_sample_comes_once_in_a_new_order_each_epoch(mode, folder):
    adapter = opened(rows(folder, seed=5), shuffle=True)
    passes = []
    for _ in range(3):
        passes.append(rows_of_all(adapter))
        adapter.on_epoch_end()
    assert all(map(visits_each_once, passes))
    assert not np.array_equal(passes[0], passes[1])
    assert not np.array_equal(passes[1], passes[2])
    # Of the same seed and epoch, wherever it stands: what one rank would see, batch by batch.
    alone = rows(folder, seed=5)
    alone.set_epoch(2)
    np.testing.assert_array_equal(passes[2], np.concatenate([alone[number][1] for number in range(len(alone))]))


def test_a_share_of_a_loop_of_ones_own_has_a_new_order_each_epoch(folder):
    """Of a pass rank 0 alone reads the first batch."""
    part = keras_hpc.shard(rows(folder, batch=1))
    passes = []
    for _ in range(2):
        mine = [int(part[number][1][0]) for number in range(len(part))]
        passes.append([row for rank in everyone(mine) for row in rank])
        part.on_epoch_end()
    assert [len(set(seen)) for seen in passes] == [len(part) * job().size] * 2
    assert passes[0] != passes[1]


def test_a_pass_goes_on_in_its_middle(mode, folder):
    adapter = opened(rows(folder, batch=4))
    whole = []
    for _ in range(2):
        whole = steps_of_all(adapter)
        adapter.on_epoch_end()
    adapter.passes.next, adapter.passes.first = 1, 2  # as Checkpoint does
    rest = steps_of_all(adapter)
    assert [np.concatenate(step).tolist() for step in rest] == [np.concatenate(step).tolist() for step in whole[2:]]


@pytest.mark.parametrize("mode", ["global", *enough(["local"])], indirect=True)
def test_fit_and_evaluate_are_those_of_one_rank(mode, folder):
    def make():
        model = dense()
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def train(model, whole):
        batch = 24 * (job().size if whole and mode == "local" else 1)
        found = keras_hpc.data.Dataset(folder / "train.h5", batch, fields=("x", "y"), block=16)
        held_out = keras_hpc.data.Dataset(folder / "train.h5", 10, fields=("x", "y"), samples=(100, 185), shuffle=False)
        history = model.fit(found, epochs=3, validation_data=held_out, shuffle=False, verbose=0).history
        return history, model.predict(held_out, verbose=0)

    assert_like_one_rank(make, train)


def test_each_byte_is_read_once_by_all_ranks(folder):
    with pytest.raises(Exception, match=r"limit|refused on rank"):  # a limit that only one rank gives wrongly
        keras_hpc.data.stage(folder, "nothing" if job().rank == job().size - 1 else "400MB")
    keras_hpc.data.stage(folder, "400MB")
    with pytest.raises(RuntimeError, match="twice"):
        keras_hpc.data.stage(folder, "400MB")
    keras_hpc.barrier()
    assert set(os.listdir(folder)) == {"rows.h5", "train.h5", "large.npy"}  # no name is left to clean up
    size = os.path.getsize(folder / "large.npy")
    adapter = opened(keras_hpc.data.Dataset(folder / "large.npy", 16, decode=lambda rows: (rows["array"][:, :1],) * 2))
    for epoch in range(2):
        before, counted = keras_hpc.data.traffic()["read"], read_by_this_process()
        keras_hpc.barrier()
        steps_of_all(adapter)
        adapter.on_epoch_end()
        keras_hpc.barrier()
        traffic = keras_hpc.data.traffic()
        nodes = everyone({"node": job().node, **traffic})
        total = sum({each["node"]: each["read"] for each in nodes}.values())
        if epoch == 0:
            assert total == size
            assert all(each["read"] < 1.2 * size / job().node_count for each in nodes)
            assert (traffic["from_nodes"] > 0) == (job().node_count > 1)
        else:
            assert traffic["read"] == before
            assert traffic["refused"] == 0
            assert read_by_this_process() - counted < 1.1 * size  # from the cache, in memory or not


def read_by_this_process():
    """Bytes that system calls of this process have read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_what_a_node_cannot_read_is_named_by_those_who_ask(folder):
    if job().node_count > 1:
        other = (job().node + 1) % job().node_count
        with pytest.raises(OSError, match=f"Node {other} cannot read.*nothing there"):
            files.reader().fetch(other, Source("/nothing there", 10, 0), 0, 0, 10)
    keras_hpc.barrier()
