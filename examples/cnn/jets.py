# SPDX-License-Identifier: Apache-2.0
"""Images of proton collisions at 13 TeV: pairs of gluinos, the signal, against jets of QCD.

python -m examples.cnn.jets --events 20000 --out jets.npz

As in Kurth et al. (2017, arXiv:1708.05256) each gluino decays into three quarks, which breaks R-parity; here it weighs
600 GeV. Events come from Pythia 8 (`pip install keras_hpc[jets]`), whose licence is the GPL; only this script uses it.
Their visible particles are put into a calorimeter of 64 x 64 cells in pseudorapidity, -2.5 to 2.5, and azimuth. A cell
has three channels, as in that paper: transverse energy, the part of it that is electromagnetic, and the number of
charged particles. Energies are smeared, by 10 % / sqrt(E / GeV) for electrons and photons, by 50 % for hadrons. No
detector is simulated otherwise.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CELLS = 64
ETA = 2.5
EM_RESOLUTION, HADRON_RESOLUTION = 0.1, 0.5  # times sqrt(E / GeV)
ELECTROMAGNETIC = (11, 22)  # electrons, photons
INVISIBLE_CALORIMETER = 13  # muons leave a track, and little energy
PROCESSES = {  # label: settings
    0: ("HardQCD:all = on",),
    1: ("SUSY:gg2gluinogluino = on",),
}
PT_HAT_MIN_GEV = {0: 300, 1: 0}  # of the hard process; a gluino's mass does it for the signal
# Half of the gluinos decay into quarks, half into antiquarks: masses and branching ratios as SUSY Les Houches Accord.
GLUINO = """BLOCK MODSEL
  1  0
BLOCK MASS
  1000021  600.0
DECAY 1000021 1.0
  0.25  3   1  2  3
  0.25  3  -1 -2 -3
  0.25  3   1  2  5
  0.25  3  -1 -2 -5
"""
SMALL = Path(__file__).parent / "jets_small.npz"  # 2,000 events that this script made


def image_of(particles, rng):
    """Returns the image of an event, (64, 64, 3), float32.

    Args:
        particles: array (n, 5): pseudorapidity, azimuth from -pi to pi, energy in GeV, kind as the number of the
            Particle Data Group, electric charge.
        rng: a `numpy.random.Generator`, for the smearing.
    """
    eta, phi, energy, kind, charge = np.asarray(particles, float).reshape(-1, 5).T
    inside = np.abs(eta) < ETA
    eta, phi, energy, kind, charge = (x[inside] for x in (eta, phi, energy, np.abs(kind), charge))
    electromagnetic = np.isin(kind, ELECTROMAGNETIC)
    resolution = np.where(electromagnetic, EM_RESOLUTION, HADRON_RESOLUTION)
    measured = np.maximum(0, energy + resolution * np.sqrt(energy) * rng.standard_normal(len(energy)))
    transverse = np.where(kind == INVISIBLE_CALORIMETER, 0, measured / np.cosh(eta))
    row = np.minimum(((eta + ETA) / (2 * ETA) * CELLS).astype(int), CELLS - 1)
    column = ((phi + np.pi) / (2 * np.pi) * CELLS).astype(int) % CELLS
    image = np.zeros((CELLS, CELLS, 3), np.float32)
    for channel, weight in enumerate((transverse, transverse * electromagnetic, charge != 0)):
        np.add.at(image[..., channel], (row, column), weight)
    return image


def generate(label, events, seed):
    """Yields the visible particles of events, as `image_of` wants them.

    Args:
        label: of a process in PROCESSES.
        events: how many.
        seed: of Pythia, 1 to 900,000,000.
    """
    import pythia8mc

    pythia = pythia8mc.Pythia("", False)
    settings = ["Print:quiet = on", "Beams:eCM = 13000.", "Random:setSeed = on", f"Random:seed = {seed}"]
    settings += [f"PhaseSpace:pTHatMin = {PT_HAT_MIN_GEV[label]}.", "SLHA:verbose = 0", *PROCESSES[label]]
    with tempfile.NamedTemporaryFile("w", suffix=".slha") as spectrum:
        spectrum.write(GLUINO)
        spectrum.flush()
        for setting in (*settings, f"SLHA:file = {spectrum.name}"):
            pythia.readString(setting)
        if not pythia.init():
            raise RuntimeError("Pythia does not start; see its messages")
    done = 0
    while done < events:
        if not pythia.next():
            continue
        found = (pythia.event[i] for i in range(pythia.event.size()))
        yield [(p.eta(), p.phi(), p.e(), p.id(), p.charge()) for p in found if p.isFinal() and p.isVisible()]
        done += 1


def save(path, images, labels):
    """Writes images as the cells that are not empty, energies in half precision: 2 kB for an event."""
    event, cell = np.nonzero(images.any(axis=-1).reshape(len(images), -1))
    values = images.reshape(len(images), -1, 3)[event, cell]
    np.savez_compressed(
        path,
        counts=np.bincount(event, minlength=len(images)).astype("uint16"),
        cells=cell.astype("uint16"),
        values=values.astype("float16"),
        labels=labels.astype("uint8"),
    )


def load(path):
    """Returns images, (n, 64, 64, 3), float32, and labels, (n,), int32: 1 for gluinos, 0 for QCD."""
    with np.load(path, allow_pickle=False) as file:
        counts, cells, values, labels = (file[name] for name in ("counts", "cells", "values", "labels"))
    images = np.zeros((len(counts), CELLS * CELLS, 3), np.float32)
    images[np.repeat(np.arange(len(counts)), counts), cells] = values
    return images.reshape(-1, CELLS, CELLS, 3), labels.astype("int32")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2000, help="half of them gluinos (default: 2000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="file of images and labels (.npz)")
    args = parser.parse_args(argv)
    if args.events < 2 or args.events % 2:
        parser.error(f"--events is an even number, at least 2. Received: {args.events}")
    if importlib.util.find_spec("pythia8mc") is None:
        sys.exit("Events are made by Pythia 8: pip install 'keras_hpc[jets]'")
    begin, images, labels = time.perf_counter(), [], []
    rng = np.random.default_rng(args.seed)
    for label in PROCESSES:
        for particles in generate(label, args.events // 2, seed=args.seed + label):
            images.append(image_of(particles, rng))
            labels.append(label)
            if len(images) % 500 == 0 or len(images) == args.events:
                seconds = time.perf_counter() - begin
                left = seconds / len(images) * (args.events - len(images))
                print(f"{len(images)}/{args.events} events, {seconds:.0f} s, {left:.0f} s left", flush=True)
    order = rng.permutation(len(images))
    save(args.out, np.array(images)[order], np.array(labels)[order])
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
