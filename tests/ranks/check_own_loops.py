# SPDX-License-Identifier: Apache-2.0
"""Loops of the user's own on parts of whole data: the same as one rank."""

import contextlib

import keras
import numpy as np
import pytest
from keras_cases import assert_close, assert_identical, enough_on, everyone, job, on_one_rank, values
from regression import BATCH, X, Y, dense

import keras_hpc
from keras_hpc.keras_hooks import keras_private

RANKS = {"tensorflow": (2,), "torch": (2,)}  # steps of JAX hand their state on
SOAK = {"tensorflow": (2,)}
BACKEND = keras.backend.backend()
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


def test_a_loop_with_step_and_shard_is_exact():
    rows = {0: 5, 1: 9}.get(job().rank, 2)  # each rank has its own number of samples
    start = sum({0: 5, 1: 9}.get(rank, 2) for rank in range(job().rank))
    total = sum({0: 5, 1: 9}.get(rank, 2) for rank in range(job().size))

    def gradients(model, x, y):
        if BACKEND == "torch":
            model.zero_grad()
            ops.mean(ops.square(model(x) - y)).backward()
            return [v.value.grad for v in model.trainable_variables]
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(x) - y))
        return tape.gradient(loss, model.trainable_variables)

    def train(x, y, samples):
        keras.utils.set_random_seed(3)
        model, optimizer = dense(), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        for _ in range(3):
            with keras_hpc.step(samples=samples):
                own = gradients(model, ops.convert_to_tensor(x), ops.convert_to_tensor(y))
                if BACKEND == "torch":
                    own = [g.detach() for g in own]
                optimizer.apply(own, model.trainable_variables)
        return values(model)

    alone = on_one_rank(lambda: train(X[:total], Y[:total], total))
    together = train(X[start : start + rows], Y[start : start + rows], rows)
    assert_identical(together)
    assert_close(together, alone, 3e-6)


@pytest.mark.skipif(BACKEND != "torch", reason="optimizers of PyTorch")
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_optimizers_of_pytorch(kind):
    import torch

    def train(x, y):
        keras.utils.set_random_seed(3)
        model = dense()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            ops.mean(ops.square(model(x) - y)).backward()
            optimizer.step()
        return values(model)

    whole = X[: 10 * job().size], Y[: 10 * job().size]
    alone = on_one_rank(lambda: train(*map(ops.convert_to_tensor, whole)))
    together = train(*map(ops.convert_to_tensor, keras_hpc.shard(whole)))
    assert_identical(together)
    assert_close(together, alone, 3e-6)


@pytest.mark.skipif(BACKEND != "torch", reason="optimizers of PyTorch")
def test_sparse_gradients_of_pytorch():
    import torch

    def train(rows):
        torch.manual_seed(3)
        words = torch.nn.Embedding(9, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(words.parameters(), lr=0.01)
        for _ in range(3):  # rank 0 has other words than rank 1, and neither has all
            with keras_hpc.step(samples=len(rows)):
                optimizer.zero_grad()
                if len(rows):
                    torch.square(words(torch.as_tensor(rows)) - 1).mean().backward()
                optimizer.step()
        return [words.weight.detach().numpy()]

    whole = np.int64([0, 1, 2, 1, 4, 4, 0, 7])
    for last in (2, 0):  # samples of the last rank
        lengths = [8 - last - 2 * (job().size - 2), *[2] * (job().size - 2), last] if job().size > 1 else [8]
        start, rows = sum(lengths[: job().rank]), lengths[job().rank]
        alone = on_one_rank(lambda: train(whole))
        together = train(whole[start : start + rows])
        assert_identical(together)
        assert_close(together, alone, 3e-6)


@enough_on("torch")
def test_parts_of_a_loops_data_are_equally_long_and_different():
    whole = np.arange(11)
    parts = everyone(keras_hpc.shard(whole).tolist())
    assert {len(part) for part in parts} == {11 // job().size}
    assert len({number for part in parts for number in part}) == job().size * (11 // job().size)
    batches = everyone([batch for batch in keras_hpc.shard(iter(range(11)))])
    assert {len(part) for part in batches} == {11 // job().size}
    if keras_private.find("tensorflow:data") is not None and BACKEND == "tensorflow":
        import tensorflow as tf

        for data in (tf.data.Dataset.range(11), tf.data.Dataset.range(11).filter(lambda x: x >= 0)):
            taken = everyone([int(x) for x in keras_hpc.shard(data)])
            assert sorted(x for part in taken for x in part) == list(range(job().size * (11 // job().size)))


@enough_on("torch")
def test_a_layer_that_stays_local():
    keras.utils.set_random_seed(1)
    model = dense()
    keras_hpc.keep_local(model.layers[0])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.layers[0].set_weights([w + job().rank for w in model.layers[0].get_weights()])
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    keras_hpc.check_replicas(model)
    kernels = everyone(np.array(model.layers[0].kernel).tolist())
    assert len({str(kernel) for kernel in kernels}) == job().size


@enough_on("torch")
@pytest.mark.parametrize("averages", ["nothing", "gradients", "alone"])
def test_a_loop_that_averages_nothing_is_mentioned(averages, caplog):
    keras_hpc.finalize()
    caplog.clear()
    keras_hpc.init()
    x, y = keras_hpc.shard((X, Y))
    alone = keras_hpc.local() if averages == "alone" else contextlib.nullcontext()
    with alone, caplog.at_level("INFO", "keras_hpc"):
        kernel = np.zeros((X.shape[1], Y.shape[1]))
        for _ in range(2):
            gradient = x.T @ (x @ kernel - y)
            kernel -= 1e-3 * (keras_hpc.allreduce(gradient) if averages == "gradients" else gradient)
        keras_hpc.finalize()
    keras_hpc.init(batch="global")
    told = "have averaged nothing" in caplog.text
    assert told == (averages == "nothing" and job().rank == 0 and job().size > 1)
