# SPDX-License-Identifier: Apache-2.0
"""What one asks of generated showers: shapes, sums, fluctuations, against Monte Carlo. NumPy only.

`images` are (n, x, y, z) arrays of cell energies in GeV, not negative; `energies` are (n,) arrays of the energy of the
primary particle in GeV. "Reference" is the Monte Carlo, "generated" the network's. z is the layer.
"""

import dataclasses

import numpy as np

AXES = ("x", "y", "z")
HIT_GEV = 1e-4  # a cell with more is a hit


@dataclasses.dataclass(frozen=True)
class FigureOfMerit:
    """How far mean shapes are from each other; 0 is perfect.

    Attributes:
        p: mean relative difference of mean moments, over axes and orders.
        q: mean relative difference of mean profiles, over axes and cells, where each cell counts alike.
        d_w: the same with each cell weighted by its energy; `q` is dominated by nearly empty cells at the edges.
    """

    p: float
    q: float
    d_w: float

    @property
    def total(self):
        """P + Q."""
        return self.p + self.q


def profiles(images):
    """Returns three arrays (n, cells): the energy in GeV along x, y and z, summed over the other two axes."""
    images = np.asarray(images, "float64")
    return images.sum(axis=(2, 3)), images.sum(axis=(1, 3)), images.sum(axis=(1, 2))


def moments(images, orders=2):
    """Returns moments of each shower along each axis, (n, 3, orders), in powers of a cell.

    The first is the mean index weighted with energy; the others are central: sum s_i (i - mean)^k / sum s_i. Showers
    without energy have moments of zero.
    """
    result = np.zeros((len(images), 3, orders))
    for axis, profile in enumerate(profiles(images)):
        total = profile.sum(axis=1, keepdims=True)
        share = np.divide(profile, total, out=np.zeros_like(profile), where=total > 0)
        index = np.arange(profile.shape[1])
        mean = share @ index
        result[:, axis, 0] = mean
        for order in range(2, orders + 1):
            result[:, axis, order - 1] = np.sum(share * (index - mean[:, None]) ** order, axis=1)
    return result


def figure_of_merit(reference, generated, orders=2):
    """Compares mean moments and mean profiles of two samples of showers of about the same energy.

    Args:
        reference: images of the Monte Carlo.
        generated: images of the generator.
        orders: moments per axis.

    Returns:
        a FigureOfMerit. Cells and moments that are zero on average in the reference are left out.
    """
    a, b = (moments(images, orders).mean(axis=0).ravel() for images in (reference, generated))
    q, d_w = [], []
    for ours, theirs in zip(profiles(reference), profiles(generated), strict=True):
        u, v = ours.mean(axis=0), theirs.mean(axis=0)
        q.append(_relative(u, v))
        d_w.append(np.abs(u - v).sum() / u.sum())
    return FigureOfMerit(_relative(a, b), float(np.mean(q)), float(np.mean(d_w)))


def _relative(a, b):
    known = a != 0
    return float(np.mean(np.abs(a[known] - b[known]) / np.abs(a[known]))) if known.any() else 0.0


def sums(images):
    """Returns (n,): the energy of all cells in GeV."""
    return np.asarray(images).sum(axis=(1, 2, 3), dtype="float64")


def hits(images, threshold=HIT_GEV):
    """Returns (n,): the number of cells with more than `threshold` GeV."""
    return (np.asarray(images) > threshold).sum(axis=(1, 2, 3))


def maximum_layer(images):
    """Returns (n,): the layer with the most energy, counted from 0."""
    return profiles(images)[2].argmax(axis=1)


def spectrum(images, edges=None):
    """Returns edges in GeV and the mean number of cells per shower between them; logarithmic, 10 keV to 10 GeV."""
    edges = np.geomspace(1e-5, 10, 61) if edges is None else edges
    return edges, np.histogram(images, edges)[0] / len(images)


def response(images, energies, edges):
    """Returns mean, standard deviation and error of the mean of (sum of cells / energy) in bins of energy.

    Args:
        images: showers.
        energies: theirs, GeV.
        edges: of the bins, GeV.

    Returns:
        three arrays, one value for each bin; NaN in bins with less than two showers.
    """
    ratio = sums(images) / energies
    number = np.digitize(energies, edges) - 1
    rows = []
    for index in range(len(edges) - 1):
        inside = ratio[number == index]
        enough = len(inside) > 1
        spread = inside.std(ddof=1) if enough else np.nan
        rows.append((inside.mean() if enough else np.nan, spread, spread / np.sqrt(max(len(inside), 1))))
    return tuple(np.array(rows).T)


def observables(images, energies):
    """Returns numbers that describe each shower: a dictionary of arrays (n,), always in the same order."""
    m = moments(images)
    layers = profiles(images)[2]
    total = np.maximum(sums(images), 1e-12)
    thirds = np.array_split(layers, 3, axis=1)
    named = {f"{axis}, moment {order + 1}": m[:, i, order] for order in range(2) for i, axis in enumerate(AXES)}
    return named | {
        "sum / energy": sums(images) / energies,
        "hits": hits(images).astype("float64"),
        "maximum layer": layers.argmax(axis=1).astype("float64"),
        "first third of layers": thirds[0].sum(axis=1) / total,
        "last third of layers": thirds[2].sum(axis=1) / total,
    }


def correlations(values):
    """Returns the matrix of correlations of a dictionary of arrays (n,); 0 where one is constant."""
    table = np.array(list(values.values()))
    table = table - table.mean(axis=1, keepdims=True)
    spread = np.sqrt((table**2).sum(axis=1))
    spread[spread < 1e-12 * np.sqrt(table.shape[1])] = np.inf
    return table @ table.T / np.outer(spread, spread)


def chi2(reference, generated, edges):
    """Compares the histograms of two samples, which may differ in size.

    Returns:
        chi2 and the number of degrees of freedom: bins that are not empty in both, less one for the total. About equal
        if both samples are of one distribution.
    """
    a, b = (np.histogram(values, edges)[0].astype("float64") for values in (reference, generated))
    used = a + b > 0
    a, b = a[used], b[used]
    if len(a) < 2 or not (a.any() and b.any()):
        return (0.0 if not len(a) or (a.any() and b.any()) else float("inf")), max(len(a) - 1, 0)
    scale = np.sqrt(b.sum() / a.sum())
    return float(np.sum((scale * a - b / scale) ** 2 / (a + b))), len(a) - 1


def chi2_of_profiles(reference, generated):
    """Compares mean profiles, (n, cells) each, cell by cell, as if cells were independent, which they are not.

    Returns:
        chi2 and the number of cells in which any shower has energy.
    """
    a, b = np.asarray(reference, "float64"), np.asarray(generated, "float64")
    variance = a.var(axis=0, ddof=1) / len(a) + b.var(axis=0, ddof=1) / len(b)
    difference = a.mean(axis=0) - b.mean(axis=0)
    used = variance > 0
    return float(np.sum(difference[used] ** 2 / variance[used])), int(used.sum())


def kolmogorov_smirnov(reference, generated):
    """Returns the largest distance of two samples' distribution functions, and how probable a larger one is.

    The probability is Kolmogorov's for large samples with Stephens' correction for small ones; ties make it too large.
    """
    a, b = np.sort(reference), np.sort(generated)
    both = np.concatenate([a, b])
    distance = np.abs(np.searchsorted(a, both, "right") / len(a) - np.searchsorted(b, both, "right") / len(b)).max()
    root = np.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:  # the series converges slowly here, to 1
        return float(distance), 1.0
    k = np.arange(1, 101)
    probability = 2 * np.sum((-1.0) ** (k - 1) * np.exp(-2 * k**2 * x**2))
    return float(distance), float(np.clip(probability, 0, 1))
