# SPDX-License-Identifier: Apache-2.0
"""Read showers: each rank its own part of the files, batch by batch, one batch ahead of the training step."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

ENERGY_UNIT_GEV = 100.0  # what the networks call an energy of 1
CELL_UNIT_GEV = 0.01  # what they call a cell energy of 1
SMALLEST_CELL_GEV = 1e-6  # what a cell holds below this is taken as nothing


class Batch(NamedTuple):
    """What one training step needs.

    Attributes:
        images: cell energies in units of 10 MeV, float32 of shape `(b, s, s, s, 1)`: event, x, y, layer, channel.
        energies: primary energies in units of 100 GeV, float32 of shape `(b, 1)`.
        sums: sums of the images, float32 of shape `(b, 1)`.
    """

    images: np.ndarray
    energies: np.ndarray
    sums: np.ndarray


class Showers:
    """One rank's share of the showers in some HDF5 files.

    The training part is cut into one contiguous share per rank, all of the same length, so that every rank takes the
    same number of steps; up to `size - 1` events at its end belong to no rank. The first epoch reads the file in slabs
    of one batch, in random order, and keeps them in memory; later epochs shuffle all events of the share and read
    nothing. The order depends only on `seed`, the rank and the epoch.

    Args:
        files: HDF5 files with `ECAL` (n, s, s, s) in GeV and `target` (n, 2), whose second column is the primary
            energy in GeV.
        batch_size: events per rank and step.
        rank: of this process.
        size: number of ranks.
        part: `"train"`, `"test"` (the last `test_fraction` of the events) or `"all"`.
        test_fraction: share of the events that is kept for tests.
        seed: of the shuffling.
        cache: keep the share in memory after its first reading: 4 s^3 bytes per event. Without it, each epoch reads
            the files again, in slabs.
        drop_last: leave out the last batch of an epoch where it is shorter than the others.

    Raises:
        ValueError: files without showers of one common shape, or fewer events than ranks (with `drop_last`, than
            ranks times `batch_size`).

    Example:
        reader = Showers("showers.h5", batch_size=64, rank=keras_hpc.rank(), size=keras_hpc.size())
        for epoch in range(30):
            for images, energies, sums in reader.epoch(epoch):
                ...
    """

    def __init__(
        self,
        files,
        batch_size,
        *,
        rank=0,
        size=1,
        part="train",
        test_fraction=0.1,
        seed=0,
        cache=True,
        drop_last=False,
    ):
        if not 0 <= rank < size:
            raise ValueError(f"Expected 0 <= rank < size. Received: rank={rank}, size={size}")
        if batch_size < 1:
            raise ValueError(f"Expected a positive batch_size. Received: batch_size={batch_size}")
        self.batch_size, self.rank, self.seed = batch_size, rank, seed
        self.cache, self.drop_last = cache, drop_last
        self._files = _paths(files)
        shapes = [_shape(path) for path in self._files]
        if len({shape[1:] for shape in shapes}) > 1:
            found = dict(zip(map(str, self._files), shapes, strict=True))
            raise ValueError(f"The files differ. Expected images of one shape. Received: {found}")
        self.image_shape = (*shapes[0][1:], 1)
        self._starts = np.concatenate([[0], np.cumsum([shape[0] for shape in shapes])])  # of each file, in all events
        begin, end = part_range(int(self._starts[-1]), part, test_fraction)
        self.events = (end - begin) // size
        if self.events < (batch_size if drop_last else 1):
            raise ValueError(
                f"Too few events for {size} ranks. Expected at least {size * (batch_size if drop_last else 1)} in part "
                f"{part!r}. Received: {end - begin} of {self._starts[-1]} events"
            )
        self._first = begin + rank * self.events
        self._images = self._energies = None
        self._loaded = np.zeros(self.events, bool)
        self._open = {}

    def __len__(self):
        """Steps per epoch, the same on every rank."""
        whole, rest = divmod(self.events, self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def epoch(self, number):
        """Yield the batches of epoch `number`, from 0; the next one is read while the caller works on this one."""
        if number and self.cache:
            self._load()  # no reading unless an earlier epoch was left out or broken off
        steps = self._order(number)
        with ThreadPoolExecutor(1, "showers") as thread:
            ahead = thread.submit(self._batch, steps[0])
            for following in [*steps[1:], None]:
                batch = ahead.result()
                if following is not None:
                    ahead = thread.submit(self._batch, following)
                yield batch
        if not self.cache or self._loaded.all():
            self.close()

    def all(self):
        """This rank's whole share as one `Batch`, in the order of the files."""
        return self._batch(np.arange(self.events))

    def close(self):
        """Close the files. They open again when they are needed."""
        for file in self._open.values():
            file.close()
        self._open = {}

    def _order(self, number):
        rng = np.random.default_rng([self.seed, number, self.rank])
        if number and self.cache:
            order = rng.permutation(self.events)
            return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(len(self))]
        # Neighbours stay together, because reading them one by one is slow; a short batch comes last.
        slabs = [np.arange(i, min(i + self.batch_size, self.events)) for i in range(0, self.events, self.batch_size)]
        whole = self.events // self.batch_size
        return ([slabs[i] for i in rng.permutation(whole)] + slabs[whole:])[: len(self)]

    def _batch(self, indices):
        if not self.cache:
            images, energies = self._read(indices[0], indices[-1] + 1)
        else:
            self._load(indices)
            images, energies = self._images[indices], self._energies[indices]
        sums = images.sum((1, 2, 3, 4), dtype=np.float64).astype(np.float32)
        return Batch(images, energies[:, None], sums[:, None])

    def _load(self, indices=None):
        """Read into memory what of `indices` (all, if `None`) is not yet there."""
        if self._images is None:
            self._images = np.empty((self.events, *self.image_shape), np.float32)
            self._energies = np.empty(self.events, np.float32)
        missing = np.arange(self.events) if indices is None else indices
        missing = missing[~self._loaded[missing]]
        for run in np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1):
            for first in range(0, len(run), self.batch_size):
                slab = slice(run[first], run[min(first + self.batch_size, len(run)) - 1] + 1)
                self._images[slab], self._energies[slab] = self._read(slab.start, slab.stop)
                self._loaded[slab] = True

    def _read(self, start, stop):
        """Events `start` to `stop` of the share: (images, energies), scaled."""
        start, stop = start + self._first, stop + self._first
        images = np.empty((stop - start, *self.image_shape[:-1]), np.float32)
        energies = np.empty(stop - start, np.float32)
        for number, path in enumerate(self._files):
            first, last = max(start, self._starts[number]), min(stop, self._starts[number + 1])
            if first >= last:
                continue
            if path not in self._open:
                self._open[path] = h5py.File(path)
            inside, here = slice(*(x - self._starts[number] for x in (first, last))), slice(first - start, last - start)
            images[here] = self._open[path]["ECAL"][inside]
            energies[here] = self._open[path]["target"][inside, 1]
        images[images < SMALLEST_CELL_GEV] = 0
        if not (np.all(energies > 0) and np.all(images.sum((1, 2, 3)) > 0)):
            raise ValueError(  # relative errors of nothing
                "Expected showers with energy in them. "
                f"Received: some without, between events {start} and {stop} of {', '.join(map(str, self._files))}"
            )
        return (images / np.float32(CELL_UNIT_GEV))[..., None], energies / np.float32(ENERGY_UNIT_GEV)


def part_range(events, part, test_fraction=0.1):
    """First event of a part, and the one after its last: the test part is the end of the files."""
    if not 0 <= test_fraction < 1:
        raise ValueError(f"Expected 0 <= test_fraction < 1. Received: test_fraction={test_fraction}")
    cut = events - round(events * test_fraction)
    ranges = {"train": (0, cut), "test": (cut, events), "all": (0, events)}
    if part not in ranges:
        raise ValueError(f"Expected part to be one of {list(ranges)}. Received: part={part!r}")
    return ranges[part]


@dataclasses.dataclass(frozen=True)
class Response:
    """How much of a primary's energy the silicon sees: ratio(y) = visible energy / y, in percent, a quartic.

    Attributes:
        coefficients: of the quartic, highest power first, five of them.
        lowest: primary energy of the showers, in units of 100 GeV.
        highest: the same.
    """

    coefficients: Sequence[float]
    lowest: float
    highest: float

    def ratio(self, y):
        """Visible energy in GeV over y = E / 100 GeV."""
        return np.polyval(self.coefficients, y)

    def expected_sum(self, y):
        """Sum of an image in units of 10 MeV, for y = E / 100 GeV."""
        return self.ratio(y) * y / CELL_UNIT_GEV


def fit_response(files, part="train", test_fraction=0.1):
    """Fit a `Response` to the showers of a part.

    Every rank reads the same two columns and gets the same coefficients; no communication.

    Raises:
        ValueError: fewer than five different energies.
    """
    files = _paths(files)
    counts = [_shape(path)[0] for path in files]
    columns = []
    for path in files:
        with h5py.File(path) as file:
            visible = file["visible"][:] if "visible" in file else _sums(file["ECAL"])
            columns.append(np.stack([file["target"][:, 1] / ENERGY_UNIT_GEV, visible]).astype(np.float64))
    y, visible = np.concatenate(columns, axis=1)[:, slice(*part_range(sum(counts), part, test_fraction))]
    if len(np.unique(y)) < 5:
        raise ValueError(f"A quartic needs five different energies. Received: {len(np.unique(y))} in {len(y)} events")
    # The ratio's relative error falls as 1 / sqrt(energy).
    return Response(np.polyfit(y, visible / y, 4, w=np.sqrt(y)), float(y.min()), float(y.max()))


def _sums(dataset, slab=256):
    return np.concatenate([dataset[i : i + slab].sum((1, 2, 3), dtype="f8") for i in range(0, len(dataset), slab)])


def _paths(files):
    files = [files] if isinstance(files, (str, Path)) else list(files)
    if not files:
        raise ValueError("No files to read. Expected at least one HDF5 file. Received: []")
    return [Path(file) for file in files]


def _shape(path):
    """Shape of the images of a file, once it is clear that they are showers."""
    try:
        with h5py.File(path) as file:
            found = {name: file[name].shape for name in ("ECAL", "target") if name in file}
    except FileNotFoundError:
        raise FileNotFoundError(
            f"No file {path}. Make it with `python -m examples.gan3d.showers --out {path}`"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read. Expected an HDF5 file. Received: {error}") from error
    ecal, target = found.get("ECAL", ()), found.get("target", ())
    if len(ecal) != 4 or len(target) != 2 or target[1] < 2 or len(set(ecal[1:])) > 1 or ecal[0] != target[0]:
        raise ValueError(f"{path} holds no showers. Expected ECAL (n, s, s, s) and target (n, 2). Received: {found}")
    return ecal
