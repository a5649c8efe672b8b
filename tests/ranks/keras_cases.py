# SPDX-License-Identifier: Apache-2.0
"""What the Keras checks share: data, models, this rank's part of a global batch, and the comparison with one rank."""

import os

import keras
import numpy as np
import pytest

import keras_hpc

SAMPLES, BATCH = 185, 24  # 8 steps an epoch; the last holds 17 samples
TOLERANCE = 3e-6


def enough_on(*backends):
    """Marks a test that finds nothing more on other backends; without any, one that takes long. `make soak` runs it."""
    everywhere = keras.backend.backend() in backends or os.environ.get("TESTS_SOAK")
    return pytest.mark.skipif(not everywhere, reason="finds nothing more on this backend")


def enough(cases, *backends):
    """Returns cases for `parametrize` that find nothing more on other backends."""
    return [pytest.param(case, marks=enough_on(*backends)) for case in cases]


def job():
    from keras_hpc.job import current

    return current.job()


def everyone(value):
    """Returns every rank's value, in rank order. Collective."""
    return job().teams[0].allgather_object(value)


def data(features=6, classes=3, samples=SAMPLES):
    random = np.random.default_rng(7)
    x = random.normal(size=(samples, features)).astype("float32")
    y = np.argmax(x[:, :classes] + 0.3 * random.normal(size=(samples, classes)), axis=1).astype("int32")
    return x, y


class Parts(keras.utils.PyDataset):
    """The global batches of some arrays: whole, or this rank's part of each."""

    def __init__(self, *arrays, batch=BATCH, whole=False):
        super().__init__()
        self.arrays, self.batch, self.whole = arrays, batch, whole
        self._samples = len(keras.tree.flatten(arrays)[0])

    def __len__(self):
        return -(-self._samples // self.batch)

    def __getitem__(self, index):
        rows = np.arange(self._samples)[index * self.batch : (index + 1) * self.batch]
        if not self.whole:
            rows = np.array_split(rows, job().size)[job().rank]
        return tuple(keras.tree.map_structure(lambda array: array[rows], array) for array in self.arrays)


def part(array, step, whole, batch=BATCH):
    """Returns the rows of a global batch: all, or this rank's."""
    return Parts(array, batch=batch, whole=whole)[step][0]


def dense(seed=3, features=6, classes=3, **kwargs):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((features,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(classes, activation="softmax", **kwargs),
        ]
    )


def values(model):
    return [np.array(v) for v in model.get_weights()]


def assert_identical(arrays, what="weights"):
    """Asserts that every rank holds the same bits."""
    mine = np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])
    everyone = job().comm.allgather(mine.tobytes()) if job().size > 1 else [mine.tobytes()]
    assert all(theirs == everyone[0] for theirs in everyone), f"{what} differ between ranks"


def assert_close(ours, reference, tolerance=TOLERANCE):
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def on_one_rank(compute):
    """Returns on all ranks what `compute()`, on rank 0 alone, returns: arrays, numbers, structures of them. Collective.

    It is what ranks are compared with, and need not be computed on each of them. Layers are counted from zero after it,
    because Keras names them by their number, and the others have made none.
    """
    result = None
    if job().rank == 0:
        with keras_hpc.local():
            result = compute()
    keras.src.utils.naming.reset_uids()
    return keras_hpc.broadcast_object(result)


def assert_like_one_rank(make, train, tolerance=TOLERANCE):
    """Trains on all ranks and on one rank alone; weights must agree, and be the same bits on every rank.

    Args:
        make: returns a compiled model. Ranks other than 0 start from other weights, which must not matter.
        train: called with the model and `whole`; what it returns must agree too.
    """

    def alone():
        model = make()
        return train(model, True), values(model)

    expected, weights = on_one_rank(alone)
    model = make()
    if job().rank > 0:
        model.set_weights([v + 0.1 if np.issubdtype(v.dtype, np.floating) else v for v in model.get_weights()])
    received = train(model, False)
    assert_identical(values(model))
    assert_close(values(model), weights, tolerance)
    if expected is not None:
        keras.tree.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), received, expected
        )
        assert_identical([np.asarray(v, np.float64) for v in keras.tree.flatten(received)], "results")
    return model
