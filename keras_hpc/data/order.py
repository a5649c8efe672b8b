# SPDX-License-Identifier: Apache-2.0
"""In which order an epoch visits the samples: arithmetic, the same on every rank.

An order of samples drawn one by one reads a large file in tiny pieces all over. So by default blocks of neighbouring
samples are drawn, and the samples of a few blocks are mixed. Nothing of the length of the data set is kept but one
number for each block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import numpy as np

Shuffle = Literal["blocks", "all", False]


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of one epoch.

    Attributes:
        samples: how many there are.
        shuffle: "blocks", "all" samples one by one, or False.
        block: samples of a block.
        mixed: blocks whose samples are mixed.
        seed: of the job.
        epoch: number of the epoch; each has an order of its own.
    """

    samples: int
    shuffle: Shuffle
    block: int
    mixed: int
    seed: int
    epoch: int

    def at(self, start: int, stop: int) -> np.ndarray:
        """Return the samples at places `start` to `stop` of the order, int64 of shape `(stop - start,)`."""
        stop = min(stop, self.samples)
        if self.shuffle is False:
            return np.arange(start, stop)
        if self.shuffle == "all":
            return self._all[start:stop]
        first = int(np.searchsorted(self._windows, start, side="right")) - 1
        last = int(np.searchsorted(self._windows, stop, side="left"))
        places = np.concatenate([np.empty(0, np.int64), *(self._window(number) for number in range(first, last))])
        return places[start - self._windows[first] : stop - self._windows[first]]

    def window(self, place: int) -> int:
        """Return the number of the window of mixed blocks in which a place of the order is."""
        if self.shuffle == "blocks":
            return int(np.searchsorted(self._windows, place, side="right")) - 1
        return place // (self.block * self.mixed)

    def ranges(self, number: int) -> list[tuple[int, int]]:
        """Return the samples of a window as ranges; none behind the last one, or if samples are drawn one by one."""
        blocks = np.arange(number * self.mixed, (number + 1) * self.mixed)
        blocks = blocks[blocks < -(-self.samples // self.block)]
        if self.shuffle == "all":
            return []
        found = (self._blocks[blocks] if self.shuffle else blocks) * self.block
        return [(begin, min(begin + self.block, self.samples)) for begin in found.tolist()]

    @functools.cached_property
    def _all(self) -> np.ndarray:
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.samples)

    @functools.cached_property
    def _blocks(self) -> np.ndarray:
        return np.random.default_rng((self.seed, self.epoch)).permutation(-(-self.samples // self.block))

    @functools.cached_property
    def _windows(self) -> np.ndarray:
        """The place at which each window of mixed blocks begins."""
        sizes = np.minimum(self.block, self.samples - self._blocks * self.block)
        return np.append(np.concatenate([[0], np.cumsum(sizes)])[:-1][:: self.mixed], self.samples)

    def _window(self, number: int) -> np.ndarray:
        blocks = self._blocks[number * self.mixed : (number + 1) * self.mixed]
        samples = (blocks[:, None] * self.block + np.arange(self.block)).ravel()
        return np.random.default_rng((self.seed, self.epoch, number)).permutation(samples[samples < self.samples])
