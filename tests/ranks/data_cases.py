# SPDX-License-Identifier: Apache-2.0
"""What the checks of sharding share: the job in both modes, this rank's batches of a data set, those of all ranks."""

import itertools

import keras
import numpy as np
import pytest
from keras.src.trainers.epoch_iterator import EpochIterator
from keras_cases import everyone, job

import keras_hpc
from keras_hpc.keras_hooks import running

SAMPLES = 37
X = np.arange(SAMPLES * 3, dtype="float32").reshape(SAMPLES, 3)
Y = np.arange(SAMPLES)


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(timeout_seconds=60)
    yield
    keras_hpc.finalize()


@pytest.fixture(params=["local", "global"])
def mode(request, monkeypatch):
    monkeypatch.setattr(job(), "batch", request.param)
    return request.param


def opened(x, y=None, **kwargs):
    """Opens data as `fit` does."""
    with running.running_call(running.Call("fit", keras.Sequential([keras.layers.Dense(1)]), True)):
        return EpochIterator(x=x, y=y, **kwargs).data_adapter


def dense(leaf):
    if type(leaf).__name__ == "SparseTensor":
        import tensorflow as tf

        leaf = tf.sparse.to_dense(leaf)
    elif hasattr(leaf, "to_tensor"):
        leaf = leaf.to_tensor()
    elif hasattr(leaf, "todense"):
        leaf = leaf.todense()
    return np.asarray(leaf)


def batches(adapter, limit=None):
    """This rank's batches of one pass, as the backend gets them."""
    backend = keras.backend.backend()
    stream = {
        "tensorflow": adapter.get_tf_dataset,
        "jax": adapter.get_jax_iterator,
        "torch": adapter.get_torch_dataloader,
    }[backend]()
    return [keras.tree.map_structure(dense, batch) for batch in itertools.islice(stream, limit)]


def steps_of_all(adapter, limit=None, leaf=1):
    """For each step the rows of every rank, of one leaf of the batches."""
    mine = [keras.tree.flatten(batch)[leaf] for batch in batches(adapter, limit)]
    ranks = everyone(mine)
    assert len({len(steps) for steps in ranks}) == 1, "ranks run different numbers of steps"
    empty = any(len(rows) == 0 for steps in ranks for rows in steps)
    assert getattr(adapter, "may_be_empty", False) or not empty
    return [list(step) for step in zip(*ranks, strict=True)]


def rows_of_all(adapter, limit=None):
    """The labels that all ranks see in a pass, step by step and in rank order."""
    return np.concatenate([np.concatenate(step) for step in steps_of_all(adapter, limit)])


def visits_each_once(rows, samples=SAMPLES):
    return sorted(rows.tolist()) == list(range(samples))


class Batches(keras.utils.PyDataset):
    """Batches of eight rows of X and Y."""

    def __init__(self, rows=8, **kwargs):
        super().__init__(**kwargs)
        self.rows = rows
        self.ended = 0

    def __len__(self):
        return -(-SAMPLES // self.rows)

    def __getitem__(self, index):
        part = slice(index * self.rows, (index + 1) * self.rows)
        return X[part], Y[part]

    def on_epoch_end(self):
        self.ended += 1
