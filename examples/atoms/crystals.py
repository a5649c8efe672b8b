# SPDX-License-Identifier: Apache-2.0
"""Images of crystals as an electron microscope sees them along columns of atoms: 9 crystals along 3 axes, 27 classes.

A column is as bright as the sum of Z^1.7 of its atoms (dark field at high angles), and as wide as the beam. Crystals
are turned, tilted a little, and thicker at one side; scales and scans are off by some percent; electrons are few.
"""

import functools

import numpy as np

SHAPE = (120, 85)
PIXEL = 0.25  # Angstrom
PERIOD = 30  # degrees: divides all angles by which a class may be turned into itself
SEEN = (0, 20)  # degrees, modulo PERIOD, that networks learn from
HELD_OUT = (22, 28)  # and that they never saw
ELECTRONS = (5.0, 50.0)  # that a pixel has, on average, in what networks learn from
FEW = (2.5, 4.0)  # and in what they never saw
BACKGROUND = 0.5  # of the mean

_FCC = ((0, 0, 0), (0, 0.5, 0.5), (0.5, 0, 0.5), (0.5, 0.5, 0))


def _fcc(shift):
    return [tuple(x + shift for x in atom) for atom in _FCC]


# Edge of the cubic cell in Angstrom, and places of each element, by its number, in edges.
CRYSTALS = {
    "Cu": (3.615, {29: _FCC}),
    "Au": (4.078, {79: _FCC}),
    "Nb": (3.300, {41: [(0, 0, 0), (0.5, 0.5, 0.5)]}),
    "Si": (5.431, {14: [*_FCC, *_fcc(0.25)]}),
    "InP": (5.869, {49: _FCC, 15: _fcc(0.25)}),
    "SrO": (5.160, {38: _FCC, 8: _fcc(0.5)}),
    "CsCl": (4.123, {55: [(0, 0, 0)], 17: [(0.5, 0.5, 0.5)]}),
    "SrTiO3": (3.905, {38: [(0, 0, 0)], 22: [(0.5, 0.5, 0.5)], 8: [(0, 0.5, 0.5), (0.5, 0, 0.5), (0.5, 0.5, 0)]}),
    "BaF2": (6.200, {56: _FCC, 9: [*_fcc(0.25), *_fcc(0.75)]}),
}
# Of each axis two directions across it, at right angles, and itself.
AXES = {
    "001": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "110": ((1, -1, 0), (0, 0, 1), (1, 1, 0)),
    "111": ((1, -1, 0), (1, 1, -2), (1, 1, 1)),
}
CLASSES = [(crystal, axis) for crystal in CRYSTALS for axis in AXES]


@functools.cache
def columns(crystal, axis):
    """Returns the columns of a rectangle that repeats: its sides in Angstrom, places, (n, 2), and brightness, (n,).

    Brightness is that of an Angstrom of a column.
    """
    edge, elements = CRYSTALS[crystal]
    cell = np.array(AXES[axis], float)
    sides = edge * np.linalg.norm(cell, axis=1)
    steps = np.stack(np.meshgrid(*[np.arange(-3, 4)] * 3), axis=-1).reshape(-1, 3)
    found = {}
    for number, places in elements.items():
        inside = (np.array(places)[:, None] + steps).reshape(-1, 3) @ np.linalg.inv(cell)
        inside = inside[np.all((inside > -1e-6) & (inside < 1 - 1e-6), axis=1)]
        for place in np.round(inside[:, :2], 4):
            key = tuple(np.abs(place))
            found[key] = found.get(key, 0) + number**1.7 / sides[2]
    return sides[:2], np.array(list(found)) * sides[:2], np.array(list(found.values()))


def columns_in_view(sides, places, brightness, matrix, shift):
    """Returns places in Angstrom from the middle of the image, (n, 2), and brightness of all columns in it.

    Args:
        sides, places, brightness: of `columns`.
        matrix: (2, 2), what turns and stretches the crystal.
        shift: (2,), Angstrom in the crystal.
    """
    reach = np.hypot(*SHAPE) * PIXEL / 2 * 1.15 + 2
    tiles = [np.arange(-int(reach // side) - 2, int(reach // side) + 2) * side for side in sides]
    corners = np.stack(np.meshgrid(*tiles), axis=-1).reshape(-1, 1, 2)
    found = (corners + places + shift).reshape(-1, 2) @ matrix.T
    bright = np.tile(brightness, len(corners))
    inside = np.all(np.abs(found) < np.array(SHAPE) * PIXEL / 2 + 2, axis=1)
    return found[inside], bright[inside]


def image(number, rng, angles, electrons):
    """Returns an image of a class, float32, (120, 85, 1): counts' square roots, of mean 0 and deviation 1.

    Args:
        number: of the class.
        rng: draws all that is random.
        angles: degrees, modulo PERIOD, between which the crystal is turned.
        electrons: a pixel, between which they are.
    """
    crystal = columns(*CLASSES[number])
    turn = np.deg2rad(rng.uniform(*angles) + PERIOD * rng.integers(360 // PERIOD))
    drift = rng.normal(0, 0.01, (2, 2))  # of the specimen during the scan, and of the scale
    turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    matrix = (np.eye(2) + drift) @ turned
    places, bright = columns_in_view(*crystal, matrix, rng.uniform(0, 1, 2) * crystal[0])
    bright = bright * (1 + places @ rng.uniform(-0.02, 0.02, 2))  # a wedge
    smear = rng.normal(0, 0.12, 2)  # Angstrom between top and middle of a tilted column
    places = np.concatenate([places + t * smear for t in (-1, 0, 1)])
    width = rng.uniform(0.4, 0.55)
    axes = [(np.arange(n) - (n - 1) / 2) * PIXEL for n in SHAPE]
    away = (((x - p[:, None]) / width).astype("float32") for x, p in zip(axes, places.T, strict=True))
    down, right = (np.exp(-np.minimum(x * x / 2, 30)) for x in away)  # what is less costs much and counts nothing
    exact = (down * np.tile(bright, 3).astype("float32")[:, None]).T @ right
    exact = (BACKGROUND + (1 - BACKGROUND) * exact / exact.mean()) * np.exp(rng.uniform(*np.log(electrons)))
    counts = np.sqrt(rng.poisson(exact) + 3 / 8)  # whose noise is as large everywhere
    return ((counts - counts.mean()) / counts.std()).astype("float32")[..., None]


def images(numbers, rngs, angles=SEEN, electrons=ELECTRONS):
    """Returns an image of each class in `numbers`, (n, 120, 85, 1); each of `rngs` draws one."""
    return np.stack([image(number, rng, angles, electrons) for number, rng in zip(numbers, rngs, strict=True)])
