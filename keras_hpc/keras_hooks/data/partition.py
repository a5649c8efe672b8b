# SPDX-License-Identifier: Apache-2.0
"""Which samples does a rank see in which step: index arithmetic, without Keras and without communication.

Words: an *order* is the sequence in which one pass over the data visits the samples, the same on every rank. It is cut
into *global batches*, one for each step, and every global batch into one contiguous *part* for each rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Shard:
    """Where this process stands among those that share the data.

    Args:
        rank: index of this process.
        size: number of processes.
        batch: `"local"` if a batch size means each rank's own batch, `"global"` if it means the batch of all ranks.
        fixed: rows of a batch of the only size that the model takes; None: any.
        turns: how many neighbouring ones, beginning with `rank`, this process stands for: it gets their batches of a
            step in turn.
    """

    rank: int
    size: int
    batch: str = "local"
    fixed: int | None = None
    turns: int = 1

    @property
    def each(self) -> list[Shard]:
        """Those that this process stands for, one by one."""
        if self.turns == 1:
            return [self]
        return [dataclasses.replace(self, rank=self.rank + turn, turns=1) for turn in range(self.turns)]

    def part(self, count: int) -> tuple[int, int]:
        """Return `(start, stop)` of this rank's part of `count` rows.

        Parts differ by one row at most; with a fixed batch size, the first ranks get as many rows each, the others
        none. Only plain arithmetic, so without that `count` may be an integer tensor, too.
        """
        if self.fixed is not None:
            batches = -(-count // self.fixed)
            whole = self.fixed * -(-batches // self.size)
            return min(count, self.rank * whole), min(count, (self.rank + 1) * whole)
        start, stop = (-(-count * rank // self.size) for rank in (self.rank, self.rank + 1))
        return start, stop

    def global_batch(self, batch_size: int) -> int:
        """Return how many samples all ranks together see in a step."""
        return batch_size * self.size if self.batch == "local" else batch_size

    @property
    def steps_apart(self) -> int:
        """How many ready-made batches a step takes."""
        return self.size if self.batch == "local" else 1

    def steps(self, batches: int) -> int:
        """Return the number of steps in which ranks get through `batches` ready-made batches."""
        return -(-batches // self.size) if self.batch == "local" else batches


@dataclasses.dataclass
class Passes:
    """Where passes over the data stand.

    Attributes:
        next: number of the pass that begins next.
        running: of the one that began last.
        first: the step that the next pass begins with: 0, unless training goes on in its middle.
    """

    next: int = 0
    running: int = 0
    first: int = 0

    def begin(self) -> tuple[int, int]:
        """Begins a pass. Returns its number and first step."""
        self.running, first, self.first = self.next, self.first, 0
        if first:  # its first batch may be its last; and nobody looks at it only to build a model
            self.next += 1
        return self.running, first

    def end(self) -> None:
        """Must be called when an epoch ends: of a pass of one step nobody has asked for more than the first batch."""
        self.next = self.running + 1


@dataclasses.dataclass(frozen=True)
class Partition:
    """One pass over `samples` in global batches, seen from one rank."""

    samples: int
    global_batch: int
    shard: Shard

    @property
    def steps(self) -> int:
        """Steps of a pass, the same on every rank."""
        return -(-self.samples // self.global_batch)

    @property
    def full_steps(self) -> int:
        """Steps with a whole global batch; at most one step with a smaller one follows."""
        return self.samples // self.global_batch

    @property
    def may_be_empty(self) -> bool:
        """Whether some rank has a step without any sample. The same on every rank."""
        smallest = self.samples % self.global_batch or min(self.samples, self.global_batch)
        last = dataclasses.replace(self.shard, rank=self.shard.size - 1, turns=1)
        first, end = last.part(smallest)
        return first == end

    def bounds(self, step: int) -> tuple[int, int]:
        """Return `(start, stop)` in the order of the samples that this rank sees in `step`."""
        ((start, stop),) = self.turns(step)
        return start, stop

    def turns(self, step: int) -> list[tuple[int, int]]:
        """The same for each rank that this process stands for."""
        offset = step * self.global_batch
        parts = [one.part(min(self.global_batch, self.samples - offset)) for one in self.shard.each]
        return [(offset + start, offset + stop) for start, stop in parts]

    def mine(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's entries of `order`: shape `(full_steps, part)`, and those of the last, smaller step."""
        whole = self.full_steps * self.global_batch
        start, stop = self.shard.part(self.global_batch)
        tail_start, tail_stop = self.shard.part(self.samples - whole)
        full = order[:whole].reshape(self.full_steps, self.global_batch)[:, start:stop]
        return full, order[whole + tail_start : whole + tail_stop]

    def order(self, shuffle: bool | str, seed: int, epoch: int) -> np.ndarray:
        """Return the order of pass number `epoch`, the same wherever `seed` is.

        Args:
            shuffle: `False` keeps the samples as they are, `True` permutes them all, `"batch"` permutes within each
                global batch.
            seed: non-negative integer that all ranks agree on.
            epoch: number of the pass; each has its own permutation.
        """
        order = np.arange(self.samples)
        if not shuffle:
            return order
        random = np.random.default_rng((seed, epoch))
        if shuffle != "batch":
            return random.permutation(self.samples)
        whole = self.full_steps * self.global_batch
        rows = order[:whole].reshape(self.full_steps, self.global_batch)
        return np.concatenate([random.permuted(rows, axis=1).ravel(), random.permutation(order[whole:])])


def deal(batches: Iterable[T], empty_like: Callable[[T], T], shard: Shard) -> Iterator[T]:
    """Deals ready-made batches to ranks: step s takes the next `size` of them, and rank r the r-th of these.

    A process that stands for several ranks gets theirs one after the other. All batches of a step are read before any
    is given out, so that what is read once, as a generator, stands at the same place on all ranks after each step.

    In a last step that is short of batches the ranks left without one get an empty batch, so that all run the same
    number of steps.

    Args:
        batches: the batches, the same on every rank. May be endless.
        empty_like: makes an empty batch from a batch.
        shard: where this rank stands.
    """
    sample: T | None = None
    turn = 0
    mine = range(shard.rank, shard.rank + shard.turns)
    held: list[T] = []
    for sample in batches:
        if turn in mine:
            held.append(sample)
        turn = (turn + 1) % shard.size
        if turn == 0:
            yield from held
            held = []
    yield from held
    if sample is not None and turn > 0:
        for _ in range(max(turn, mine.start), mine.stop):
            yield empty_like(sample)
