# SPDX-License-Identifier: Apache-2.0
"""Makes meshes that a flow deforms, and says which of their cells it is going to turn inside out.

python -m examples.mesh.meshes --size 64 --count 120 --out meshes

A simulation whose mesh moves with the fluid stops when a cell of the mesh *tangles*. Here the fluid is a random, smooth
and incompressible flow that stands still, and the vertices of a mesh of squares are carried along. An image has a pixel
for each cell and 18 channels: of the cell's first vertex the displacement and velocity at three times (in cells, and
cells per time), and of the cell, at the last of them, area, ratio of edges, skewness and smallest corner, and smallest
corner and area if the velocities stayed what they are. The target is 1 where the cell is tangled at `LATER`: one of its
corners is turned over.
"""

import argparse
from pathlib import Path

import numpy as np
from scipy import ndimage

CHANNELS = 18
SEEN = (2.0, 3.0, 4.0)  # times
LATER = 16.0
STEP = 0.25
SWIRL, REGION = 8.0, 24.0  # cells, of a swirl and of a calm or a stormy region


def flow(size, rng):
    """Returns a velocity, (2, size + 1, size + 1), along rows and columns: curl of a stream function."""

    def smooth(width):
        field = ndimage.gaussian_filter(rng.standard_normal((size + 1, size + 1)), width, mode="wrap")
        return (field - field.mean()) / field.std()

    stream = 5.0 * smooth(SWIRL) * np.exp(0.5 * smooth(REGION))
    rows, columns = np.gradient(stream)
    return np.stack([columns, -rows])


def carried(places, velocity, duration):
    """Returns where the flow has brought places after some time (midpoint rule)."""

    def at(points):
        return np.stack([ndimage.map_coordinates(v, points, order=1, mode="grid-wrap") for v in velocity])

    for _ in range(round(duration / STEP)):
        places = places + STEP * at(places + STEP / 2 * at(places))
    return places, at(places)


def corners(places):
    """Returns the four corners of each cell, (4, n, n): twice the area of the triangle, negative if turned."""
    a, b = places[:, :-1, :-1], places[:, 1:, :-1]
    d, c = places[:, :-1, 1:], places[:, 1:, 1:]

    def turn(corner, towards, other):
        (r, s), (t, u) = towards - corner, other - corner
        return r * u - s * t

    return np.stack([turn(a, b, d), turn(b, c, a), turn(c, d, b), turn(d, a, c)])


def sample(size, seed):
    """Returns an image, (size, size, 18) float32; its target, (size, size, 1); and what velocities let us expect."""
    rng = np.random.default_rng([seed, size])
    start = np.stack(np.meshgrid(np.arange(size + 1.0), np.arange(size + 1.0), indexing="ij"))
    velocity = flow(size, rng)
    places, now, channels = start, 0.0, []
    for time in SEEN:
        places, speed = carried(places, velocity, time - now)
        now = time
        channels += [*(places - start)[:, :-1, :-1], *speed[:, :-1, :-1]]
    edges = [np.hypot(*np.diff(places, axis=axis)) for axis in (1, 2)]
    down, right = edges[0][:, :-1], edges[1][:-1]
    four = corners(places)
    expected = corners(places + (LATER - now) * speed)
    channels += [four.sum(axis=0) / 4, np.log(down / right), four[0] / (down * right)]
    channels += [np.arcsinh(worst.min(axis=0)) for worst in (four, expected)] + [np.arcsinh(expected.sum(axis=0))]
    image = np.stack(channels, axis=-1).astype("float32")
    later = corners(carried(places, velocity, LATER - now)[0])
    return image, *(each.min(axis=0)[..., None] <= 0 for each in (later, expected))


def patches(targets, patch):
    """Returns of (n, rows, columns, 1) whether any cell of each patch of patch x patch cells is set."""
    n, rows, columns, _ = targets.shape
    return targets.reshape(n, rows // patch, patch, columns // patch, patch).max(axis=(2, 4))[..., None]


def iou(found, expected):
    """Returns how many of the cells that are tangled by either are tangled by both."""
    found, expected = np.asarray(found) > 0, np.asarray(expected) > 0
    return float((found & expected).sum() / max((found | expected).sum(), 1))


def write(folder, size, count, first_seed=0):
    """Writes images.npy and targets.npy, of which ranks map what they need, and guesses.npy, by extrapolation."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"images": ("float32", CHANNELS), "targets": ("uint8", 1), "guesses": ("uint8", 1)}
    files = [
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (count, size, size, channels))
        for name, (dtype, channels) in names.items()
    ]
    for number in range(count):
        for file, values in zip(files, sample(size, first_seed + number), strict=True):
            file[number] = values


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="cells along each side (default: 64)")
    parser.add_argument("--count", type=int, default=120, help="meshes (default: 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--out", type=Path, default=Path("results") / "mesh" / "meshes")
    args = parser.parse_args(argv)
    write(args.out, args.size, args.count, args.seed)
    share = np.load(args.out / "targets.npy", mmap_mode="r").mean()
    print(f"{args.count} meshes of {args.size} x {args.size} cells, {share:.1%} of which will be tangled")


if __name__ == "__main__":
    main()
