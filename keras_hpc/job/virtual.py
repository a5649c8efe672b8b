# SPDX-License-Identifier: Apache-2.0
"""Virtual ranks: the fixed parts of a global batch, which rank computes which, and sums that do not depend on it.

Floating point sums depend on their order. Here that is a tree over the parts, however many ranks there are: the parts
`[first, end)` are the sum of the parts before and behind the largest power of two that is less than their number. A
rank has neighbouring parts, adds up what of them makes whole branches of the tree, and sends a slice of each branch to
the rank that owns the slice, which adds up the rest and sends the result to all. Where ranks have whole branches, as 1,
2, 4 or 8 of 8 parts, that is as many bytes as an allreduce has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc.job.plan import bytes_of

ALIGNMENT = 64  # bytes
CHUNK = 1 << 15  # elements that a cache holds

Branch = tuple[int, int, np.ndarray]  # first part, behind the last one, and their sum


@dataclasses.dataclass
class Virtual:
    """The parts of every global batch.

    Attributes:
        count: how many there are.
        rank: this process' number.
        size: number of ranks.
        states: what each part of this rank has of its own; see `keras_hooks.virtual.states`.
    """

    count: int
    rank: int
    size: int
    states: Any = None

    def of(self, rank: int) -> range:
        """Return the parts of a rank."""
        return range(-(-self.count * rank // self.size), -(-self.count * (rank + 1) // self.size))

    @property
    def mine(self) -> range:
        """The parts of this rank."""
        return self.of(self.rank)


@functools.cache
def branches(count: int) -> frozenset[tuple[int, int]]:
    """Return the branches of the tree over so many parts, each as its first part and the one behind its last."""
    found = set()

    def visit(first: int, end: int) -> None:
        found.add((first, end))
        if end - first > 1:
            middle = first + (1 << (end - first - 1).bit_length() - 1)
            visit(first, middle)
            visit(middle, end)

    visit(0, count)
    return frozenset(found)


def aligned(size: int, dtype: Any) -> np.ndarray:
    """Return memory that begins where a cache line does: frameworks compute alike with it, and take it as it is."""
    dtype = np.dtype(dtype)
    memory = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size * dtype.itemsize].view(dtype)


class Leaf:
    """An array of one part, to be written once: into memory of its own, or at once onto that of the part before.

    Both have the same bits. The second passes over memory once instead of three times.

    Args:
        array: one-dimensional.
        adds: whether it holds what is to be added to.
    """

    def __init__(self, array: np.ndarray, *, adds: bool) -> None:
        self.array, self.adds = array, adds

    def write(self, start: int, values: np.ndarray, weight: float) -> None:
        """Write `weight * values` from an element on.

        Args:
            start: the first element.
            values: one-dimensional.
            weight: rounded to the dtype of the array.
        """
        target = self.array[start : start + len(values)]
        factor = target.dtype.type(weight)
        if not self.adds:
            np.multiply(values, factor, out=target, dtype=target.dtype)
            return
        product = np.empty(min(CHUNK, len(values)), target.dtype)
        for begin in range(0, len(values), CHUNK):
            some, into = values[begin : begin + CHUNK], target[begin : begin + CHUNK]
            np.multiply(some, factor, out=product[: len(some)], dtype=target.dtype)
            np.add(into, product[: len(some)], out=into)

    def clear(self, start: int, end: int) -> None:
        """Write zeros into `[start, end)`."""
        target = self.array[start:end]
        if self.adds:
            np.add(target, 0, out=target)  # which makes 0 of -0, as an array of zeros does
        else:
            target[:] = 0


class TreeSum:
    """Adds up arrays of parts, which come in the order of the parts.

    Args:
        count: how many parts there are of all ranks.
    """

    def __init__(self, count: int) -> None:
        self._branches = branches(count)
        self.sums: list[Branch] = []
        self._free: list[np.ndarray] = []

    def begin(self, part: int, size: int, dtype: Any) -> Leaf:
        """Return where to write a part's array, which comes next."""
        if self.sums and (self.sums[-1][0], part + 1) in self._branches:  # a branch with the sum before: onto that
            return Leaf(self.sums[-1][2], adds=True)
        return Leaf(self._free.pop() if self._free else aligned(size, dtype), adds=False)

    def end(self, part: int, leaf: Leaf) -> None:
        """Take a part's array, which has been written."""
        if leaf.adds:
            first, _, array = self.sums.pop()
            self.add(first, part + 1, array)
        else:
            self.add(part, part + 1, leaf.array)

    def add(self, first: int, end: int, array: np.ndarray) -> None:
        """Add an array, which is changed, of the parts `[first, end)`."""
        self.sums.append((first, end, array))
        while len(self.sums) > 1 and (self.sums[-2][0], self.sums[-1][1]) in self._branches:
            _, behind, later = self.sums.pop()
            begin, _, earlier = self.sums.pop()
            np.add(earlier, later, out=earlier)
            self._free.append(later)
            self.sums.append((begin, behind, earlier))


def whole_branches(count: int, parts: range) -> list[tuple[int, int]]:
    """Return what neighbouring parts add up to: the largest branches that they make."""
    fold = TreeSum(count)
    for part in parts:
        fold.add(part, part + 1, np.zeros(0))
    return [(first, end) for first, end, _ in fold.sums]


def allreduce(virtual: Virtual, team: Any, sums: Sequence[Branch]) -> np.ndarray:
    """Return the sum of all parts, in the order of the tree. Collective.

    Args:
        virtual: the parts.
        team: of all ranks.
        sums: this rank's, as `TreeSum` leaves them: one-dimensional, of the same length and dtype on all ranks.
    """
    if virtual.size == 1:
        ((_, _, whole),) = sums
        return whole
    theirs = [whole_branches(virtual.count, virtual.of(rank)) for rank in range(virtual.size)]
    if virtual.size == 2 and all(len(branches) == 1 for branches in theirs):
        ((_, _, whole),) = sums
        team.allreduce(whole, op="sum", what="gradients of virtual ranks")  # of two there is one order
        return whole
    length, dtype = len(sums[0][2]), sums[0][2].dtype
    ends = [length * rank // virtual.size for rank in range(virtual.size + 1)]
    lengths = np.diff(ends).tolist()
    if len(sums) == 1:
        sent = sums[0][2]  # its slices lie in the order of the ranks
    else:
        arrays = [array for *_, array in sums]
        sent = np.concatenate([a[ends[r] : ends[r + 1]] for r in range(virtual.size) for a in arrays])
    of_mine = lengths[virtual.rank]
    received = np.empty(of_mine * sum(map(len, theirs)), dtype)
    team.native.alltoall(
        bytes_of(sent),
        [len(sums) * n * dtype.itemsize for n in lengths],
        bytes_of(received),
        [len(branches) * of_mine * dtype.itemsize for branches in theirs],
    )
    fold = TreeSum(virtual.count)
    pieces = received.reshape(-1, of_mine) if of_mine else np.empty((sum(map(len, theirs)), 0), dtype)
    for (first, end), piece in zip((branch for found in theirs for branch in found), pieces, strict=True):
        fold.add(first, end, piece)
    ((_, _, whole),) = fold.sums
    result = aligned(length, dtype)
    team.native.allgather(bytes_of(whole), bytes_of(result), [n * dtype.itemsize for n in lengths])
    return result
