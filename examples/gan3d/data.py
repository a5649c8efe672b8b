# SPDX-License-Identifier: Apache-2.0
"""Showers in batches for the networks, from HDF5 files that `keras_hpc.data` reads."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

import keras_hpc

ENERGY_UNIT_GEV = 100.0  # what the networks call an energy of 1
CELL_UNIT_GEV = 0.01  # what they call a cell energy of 1
SMALLEST_CELL_GEV = 1e-6  # what a cell holds below this is taken as nothing
SLAB = 256  # events that are read at a time where all are read


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
    """The showers of some HDF5 files in batches, which are dealt to the ranks.

    All ranks make equally many steps with batches of the same size. So an epoch leaves out what is less than a batch
    for each rank: other showers each time, as each epoch has an order of its own, the same on all ranks.

    Args:
        files: HDF5 files with `ECAL` (n, s, s, s) in GeV and `target` (n, 2), whose second column is the primary
            energy in GeV.
        batch_size: events per rank and step.
        rank: of this process.
        size: number of ranks.
        part: `"train"`, `"test"` (the last `test_fraction` of the events) or `"all"`.
        test_fraction: share of the events that is kept for tests.
        seed: of the shuffling.

    Raises:
        ValueError: files without showers of one common shape, or fewer events than ranks times `batch_size`.

    Example:
        reader = Showers("showers.h5", batch_size=64, rank=keras_hpc.rank(), size=keras_hpc.size())
        for epoch in range(30):
            for images, energies, sums in reader.epoch(epoch):
                ...
    """

    def __init__(self, files, batch_size, *, rank=0, size=1, part="train", test_fraction=0.1, seed=0):
        if not 0 <= rank < size:
            raise ValueError(f"Expected 0 <= rank < size. Received: rank={rank}, size={size}")
        self._rank, self._size = rank, size
        self._data = _dataset(files, batch_size, part, test_fraction, seed=seed)
        self.image_shape = (*self._data.store.spec["ECAL"][0], 1)
        whole = len(self._data) - (self._data.count(len(self._data) - 1) < batch_size)
        self._steps = whole // size
        if not self._steps:
            raise ValueError(
                f"Too few events for {size} ranks. Expected at least {size * batch_size} in part {part!r}. "
                f"Received: {whole} batches of {batch_size}"
            )

    def __len__(self):
        """Steps per epoch, the same on every rank."""
        return self._steps

    def epoch(self, number):
        """Yield the batches of epoch `number`, from 0; the next one is read while the caller works on this one."""
        self._data.set_epoch(number)
        with ThreadPoolExecutor(1, "showers") as thread:
            ahead = thread.submit(self._batch, 0)
            for step in range(self._steps):
                batch = ahead.result()
                if step + 1 < self._steps:
                    ahead = thread.submit(self._batch, step + 1)
                yield batch

    def _batch(self, step):
        return self._data[step * self._size + self._rank]


def read(files, part="all", test_fraction=0.1):
    """Return all showers of a part as one `Batch`, in the order of the files."""
    return _dataset(files, None, part, test_fraction, shuffle=False)[0]


def _dataset(files, batch_size, part, test_fraction, **options):
    """Return a `keras_hpc.data.Dataset` whose batches are `Batch`es; without a size, there is one."""
    files = _paths(files)
    shapes = [_shape(path) for path in files]
    if len({shape[1:] for shape in shapes}) > 1:
        found = dict(zip(map(str, files), shapes, strict=True))
        raise ValueError(f"The files differ. Expected images of one shape. Received: {found}")
    samples = part_range(sum(shape[0] for shape in shapes), part, test_fraction)
    batch_size = samples[1] - samples[0] if batch_size is None else batch_size
    names = ", ".join(map(str, files))

    def decode(rows):
        return _scaled(rows["ECAL"].astype("float32"), rows["target"][:, 1].astype("float32"), names)

    fields = ("ECAL", "target")
    return keras_hpc.data.Dataset(files, batch_size, fields=fields, decode=decode, samples=samples, **options)


def _scaled(images, energies, names):
    images[images < SMALLEST_CELL_GEV] = 0
    if not (np.all(energies > 0) and np.all(images.sum((1, 2, 3)) > 0)):
        raise ValueError(f"Expected showers with energy in them. Received: some without, in {names}")  # 0 divides
    images = (images / np.float32(CELL_UNIT_GEV))[..., None]
    sums = images.sum((1, 2, 3, 4), dtype=np.float64).astype(np.float32)
    return Batch(images, (energies / np.float32(ENERGY_UNIT_GEV))[:, None], sums[:, None])


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
    begin, end = part_range(sum(_shape(path)[0] for path in files), part, test_fraction)
    with h5py.File(files[0]) as file:
        seen = "visible" if "visible" in file else "ECAL"
    store = keras_hpc.data.open_store(files, ("target", seen))
    slabs = [store.read(first, min(first + SLAB, end)) for first in range(begin, end, SLAB)]
    y = np.concatenate([slab["target"][:, 1] for slab in slabs]).astype(np.float64) / ENERGY_UNIT_GEV
    visible = np.concatenate([slab[seen].sum(tuple(range(1, slab[seen].ndim)), dtype="f8") for slab in slabs])
    if len(np.unique(y)) < 5:
        raise ValueError(f"A quartic needs five different energies. Received: {len(np.unique(y))} in {len(y)} events")
    # The ratio's relative error falls as 1 / sqrt(energy).
    return Response(np.polyfit(y, visible / y, 4, w=np.sqrt(y)), float(y.min()), float(y.max()))


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
