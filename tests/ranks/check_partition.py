# SPDX-License-Identifier: Apache-2.0
"""Every sample goes to exactly one rank and step, for any number of samples, ranks and batch size."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranges import assert_even

from keras_hpc.keras_hooks.data.partition import Partition, Shard, deal

RANKS = {"torch": (1,)}  # any backend: to import it is all that it is needed for

SIZES = st.integers(1, 9)
MODES = st.sampled_from(["local", "global"])


def shards(size, batch="local"):
    return [Shard(rank, size, batch) for rank in range(size)]


@settings(deadline=None)
@given(count=st.integers(0, 200), size=SIZES)
def test_parts_are_contiguous_and_even(count, size):
    assert_even([shard.part(count) for shard in shards(size)], count)


def test_an_odd_global_batch_gives_the_first_ranks_one_more():
    assert [shard.part(25) for shard in shards(2, "global")] == [(0, 13), (13, 25)]


@settings(deadline=None)
@given(samples=st.integers(1, 300), batch_size=st.integers(1, 70), size=SIZES, mode=MODES)
def test_ranks_in_order_make_up_each_global_batch(samples, batch_size, size, mode):
    partitions = [Partition(samples, p.global_batch(batch_size), p) for p in shards(size, mode)]
    assert len({p.steps for p in partitions}) == 1
    assert len({p.may_be_empty for p in partitions}) == 1
    global_batch = batch_size * size if mode == "local" else batch_size
    seen, empty = [], False
    for step in range(partitions[0].steps):
        parts = [p.bounds(step) for p in partitions]
        counts = [stop - start for start, stop in parts]
        assert max(counts) - min(counts) <= 1
        empty |= min(counts) == 0
        seen += [i for start, stop in parts for i in range(start, stop)]
        assert len(seen) == min(samples, (step + 1) * global_batch)
    assert seen == list(range(samples))
    assert partitions[0].may_be_empty == empty


@settings(deadline=None)
@given(samples=st.integers(1, 300), batch_size=st.integers(1, 70), size=SIZES, mode=MODES)
def test_mine_lists_the_same_samples_as_bounds(samples, batch_size, size, mode):
    order = np.random.default_rng(0).permutation(samples)
    for shard in shards(size, mode):
        partition = Partition(samples, shard.global_batch(batch_size), shard)
        full, tail = partition.mine(order)
        rows = [*full, tail][: partition.steps]
        for step, row in enumerate(rows):
            start, stop = partition.bounds(step)
            np.testing.assert_array_equal(row, order[start:stop])


@settings(deadline=None)
@given(
    samples=st.integers(1, 300),
    batch=st.integers(1, 70),
    size=SIZES,
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 5),
)
def test_order_is_common_reproducible_and_complete(samples, batch, size, seed, epoch):
    for shuffle in (False, True, "batch"):
        orders = [Partition(samples, batch, shard).order(shuffle, seed, epoch) for shard in shards(size)]
        assert all(np.array_equal(orders[0], order) for order in orders)
        np.testing.assert_array_equal(np.sort(orders[0]), np.arange(samples))
        for start in range(0, samples, batch) if shuffle == "batch" else ():
            chunk = orders[0][start : start + batch]
            np.testing.assert_array_equal(np.sort(chunk), np.arange(start, start + len(chunk)))


def test_each_epoch_has_its_own_permutation():
    partition = Partition(1000, 10, Shard(0, 1))
    first, second = (partition.order(True, 7, epoch) for epoch in (0, 1))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(1000))


@settings(deadline=None)
@given(batches=st.integers(0, 60), size=SIZES)
def test_dealt_batches_reach_one_rank_each(batches, size):
    hands = [list(deal(iter(range(batches)), lambda _: "empty", shard)) for shard in shards(size)]
    steps = Shard(0, size).steps(batches)
    assert [len(hand) for hand in hands] == [steps] * size
    dealt = [hand[step] for step in range(steps) for hand in hands]
    assert dealt == list(range(batches)) + ["empty"] * (steps * size - batches)


def test_endless_batches_are_dealt():
    hand = deal(itertools.count(), lambda _: "empty", Shard(1, 3))
    assert list(itertools.islice(hand, 4)) == [1, 4, 7, 10]


def test_what_is_read_once_stands_at_the_same_place_on_all_ranks_after_a_step():
    streams = [itertools.count() for _ in range(3)]
    for shard, stream in zip(shards(3), streams, strict=True):
        next(deal(stream, lambda _: "empty", shard))
    assert [next(stream) for stream in streams] == [3, 3, 3]


@pytest.mark.parametrize(("samples", "parts"), [(48, [(32, 48), (48, 48)]), (37, [(32, 37), (37, 37)])])
def test_a_fixed_batch_is_not_cut(samples, parts):
    partitions = [Partition(samples, 32, dataclasses.replace(shard, fixed=16)) for shard in shards(2)]
    assert [partition.bounds(0) for partition in partitions] == [(0, 16), (16, 32)]
    assert [partition.bounds(1) for partition in partitions] == parts
    assert all(partition.may_be_empty for partition in partitions)
    whole = [partition.mine(np.arange(samples)) for partition in partitions]
    seen = np.concatenate([part.ravel() for pair in whole for part in pair])
    assert sorted(seen) == list(range(samples))
