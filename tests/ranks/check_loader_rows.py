# SPDX-License-Identifier: Apache-2.0
"""Batches of a torch `DataLoader` that have unequal numbers of rows: ranks compute what one rank computes on them."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, assert_identical, enough, on_one_rank, values
from regression import X, Y, dense

import keras_hpc

torch = pytest.importorskip("torch")
data = torch.utils.data

RANKS = {"torch": (2,)}
SOAK = {"torch": (3,)}
ROWS = [5, 1, 3, 7, 2, 4, 1]  # of each batch; not as many for each rank, or for one rank alone
ENDS = np.cumsum(ROWS)
BATCHES = [(X[end - rows : end], Y[end - rows : end]) for end, rows in zip(ENDS, ROWS, strict=True)]


class Items(data.Dataset):
    """What has an index is a sample, or a batch."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Stream(data.IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def joined(items):
    """A collate function of samples that have rows of their own, as points of an event."""
    return tuple(torch.as_tensor(np.concatenate(parts)) for parts in zip(*items, strict=True))


def chosen():
    """A sampler of batches, as those that group samples of a length."""
    return data.DataLoader(
        data.TensorDataset(torch.as_tensor(X), torch.as_tensor(Y)),
        batch_sampler=[list(range(end - rows, end)) for end, rows in zip(ENDS, ROWS, strict=True)],
    )


def ready():
    return data.DataLoader(Items(BATCHES), batch_size=None)


def ready_stream():
    return data.DataLoader(Stream(BATCHES), batch_size=None)


def bags():
    """Two samples a batch, each with rows of its own."""
    return data.DataLoader(Items(BATCHES), batch_size=2, collate_fn=joined)


def bags_in_a_stream():
    return data.DataLoader(Stream(BATCHES), batch_size=2, collate_fn=joined)


def empty_bags():
    """A sample may have no rows."""
    none = X[:0], Y[:0]
    items = [none, BATCHES[0], BATCHES[1], none, BATCHES[3], BATCHES[2], BATCHES[4]]
    return data.DataLoader(Items(items), batch_size=2, collate_fn=joined)


LOADERS = [chosen, bags, *enough([ready_stream, empty_bags], "torch"), *enough([ready, bags_in_a_stream])]


def trained(loader):
    keras.utils.set_random_seed(5)
    model = dense()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    history = model.fit(loader, epochs=2, shuffle=False, verbose=0).history
    return values(model), history


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # how Keras takes the end of any stream
@pytest.mark.parametrize("batch", ["global", *enough(["local"])])
@pytest.mark.parametrize("make", LOADERS)
def test_like_one_rank_on_the_same_rows(make, batch):
    keras_hpc.init(batch=batch)
    together = keras_hpc.size() if batch == "local" else 1  # batches of a step

    def alone():
        batches = [tuple(map(np.asarray, one)) for one in make()]
        steps = [batches[first : first + together] for first in range(0, len(batches), together)]
        return trained(data.DataLoader(Items([joined(step) for step in steps]), batch_size=None))

    try:
        expected, logs = on_one_rank(alone)
        weights, history = trained(make())
        assert_identical(weights)
    finally:
        keras_hpc.finalize()
    assert_close(weights, expected, 1e-5)
    for name, numbers in logs.items():
        np.testing.assert_allclose(history[name], numbers, rtol=1e-5, err_msg=name)


def weighed(samples):
    """A collate function that shares out a weight of 1 among the samples that it gets."""
    return (*data.default_collate(samples), torch.full((len(samples),), 1 / len(samples)))


def turned(samples):
    """One that puts samples into an order of its own, as for packed sequences."""
    return data.default_collate(samples[::-1])


def noisy(samples):
    x, y = data.default_collate(samples)
    return x + torch.randn_like(x), y


def padded(samples):
    """To the longest: `exactness.md` says what that means."""
    rows = [torch.ones(int(number) % 3 + 1) for number, _ in enumerate(samples)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.ones(len(samples), 1)


@pytest.mark.parametrize("collate", [weighed, turned, noisy, padded])
def test_what_a_collate_function_makes_of_all_samples_is_named(collate, caplog):
    caplog.set_level("WARNING", logger="keras_hpc")
    keras_hpc.init(batch="global")
    try:
        loader = data.DataLoader(Items(list(zip(X[:4], Y[:4], strict=True))), batch_size=2, collate_fn=collate)
        model = keras.Sequential([keras.layers.Lambda(lambda x: x[:, :1]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(loader, verbose=0)
        named = any("collate_fn" in record.getMessage() for record in caplog.records)
        assert named == (collate is weighed and keras_hpc.rank() == 0)
    finally:
        keras_hpc.finalize()
