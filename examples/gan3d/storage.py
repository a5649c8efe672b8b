# SPDX-License-Identifier: Apache-2.0
"""How showers lie on disk: one small HDF5 file per block of events while they are made, joined in order at the end.

A finished block is renamed into place, so a killed run leaves whole blocks or none, and no HDF5 file is ever written
by two processes.
"""

import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np

PARTICLES = {"electron": 11, "photon": 22}  # and their numbers by the Particle Data Group
DESCRIPTIONS = {
    "ECAL": "energy in silicon, GeV; axes: event, x, y, layer",
    "target": "particle (11: electron, 22: photon), primary energy in GeV",
    "visible": "sum of ECAL over the cells, GeV",
}


class Blocks:
    """The blocks of a file that is being made.

    Args:
        out: the HDF5 file to end up with.
        attributes: what defines its content: `events`, `block_events`, `size`, `particle` and whatever else it depends
            on. They become the file's attributes.
    """

    def __init__(self, out, attributes):
        self.out = Path(out)
        self.folder = self.out.with_name(self.out.name + ".blocks")
        self.attributes = attributes
        self.count = -(-attributes["events"] // attributes["block_events"])

    def length(self, number):
        """Events in block `number`: the last one may be shorter."""
        size = self.attributes["block_events"]
        return min(size, self.attributes["events"] - number * size)

    def path(self, number):
        return self.folder / f"{number:06d}.h5"

    def prepare(self):
        """Make the folder, or check that what is there belongs to the same file. On one rank only.

        Returns:
            The numbers of the blocks that are still to be made.

        Raises:
            ValueError: the file or its folder of blocks was made with other parameters.
        """
        if self.out.exists():
            if not h5py.is_hdf5(self.out):
                raise ValueError(f"{self.out} exists. Expected a new file, or one of showers. Received: no HDF5 file")
            with h5py.File(self.out) as file:
                self._compare(self.out, {k: v.item() if hasattr(v, "item") else v for k, v in file.attrs.items()})
            shutil.rmtree(self.folder, ignore_errors=True)  # a run that was killed while it tidied up
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "attributes.json"
        if note.exists():
            self._compare(self.folder, json.loads(note.read_text()))
        else:
            _replace(note, lambda path: path.write_text(json.dumps(self.attributes, indent=1)))
        return [number for number in range(self.count) if not self.path(number).exists()]

    def _compare(self, path, found):
        names = {**found, **self.attributes}
        other = {name: found.get(name) for name in names if found.get(name) != self.attributes.get(name)}
        if other:
            wanted = {name: self.attributes.get(name) for name in other}
            raise ValueError(
                f"{path} was made with other parameters; remove it or choose another name. "
                f"Expected {wanted}. Received: {other}"
            )

    def events_done(self):
        done = {int(path.stem) for path in self.folder.glob("[0-9]*.h5")}
        return sum(self.length(number) for number in done)

    def write(self, number, images, energies):
        """Write one block.

        Args:
            number: of the block.
            images: energies in GeV, float32 of shape `(n, s, s, s)`.
            energies: primary energies in GeV, shape `(n,)`.
        """

        def fill(path):
            with h5py.File(path, "w") as file:
                _create(file, len(images), self.attributes["size"])
                file["ECAL"][:] = images
                particle = PARTICLES[self.attributes["particle"]]
                file["target"][:] = np.stack([np.full(len(energies), particle), energies], axis=1)
                file["visible"][:] = images.sum((1, 2, 3), dtype=np.float64)

        _replace(self.path(number), fill)

    def join(self):
        """Copy all blocks, in order, to the file and remove them. On one rank only."""

        def fill(path):
            with h5py.File(path, "w") as file:
                file.attrs.update(self.attributes)
                _create(file, self.attributes["events"], self.attributes["size"])
                for number in range(self.count):
                    self._copy(number, file)

        _replace(self.out, fill, self.folder)
        shutil.rmtree(self.folder)

    def _copy(self, number, file):
        first = number * self.attributes["block_events"]
        with h5py.File(self.path(number)) as block:
            last = first + self.length(number)
            for name in ("target", "visible"):
                file[name][first:last] = block[name][:]
            # Compressed chunks move as they are: each holds one event.
            for event in range(self.length(number)):
                mask, chunk = block["ECAL"].id.read_direct_chunk((event, 0, 0, 0))
                file["ECAL"].id.write_direct_chunk((first + event, 0, 0, 0), chunk, mask)


def _create(file, events, size):
    shape = (events, size, size, size)
    # One event per chunk: readers shuffle, and nine cells in ten are empty.
    options = {"chunks": (1, *shape[1:]), "compression": "gzip", "compression_opts": 1, "shuffle": True}
    file.create_dataset("ECAL", shape, "float32", **options)
    file.create_dataset("target", (events, 2), "float32")
    file.create_dataset("visible", (events,), "float32")
    for name, text in DESCRIPTIONS.items():
        file[name].attrs["description"] = text


def _replace(path, write, folder=None):
    """Let `write` make a file in `folder` (that of `path`, if `None`), then put it in place at once."""
    temporary = (folder or path.parent) / f".{path.name}.{os.getpid()}"
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
