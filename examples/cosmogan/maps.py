# SPDX-License-Identifier: Apache-2.0
"""Maps like those of weak lensing: lognormal fields with a known power spectrum, and how alike two sets of them are.

Convergence is SHIFT (exp(g - variance / 2) - 1), with a Gaussian field g whose power spectrum is `spectrum`. So the
correlation of maps is known, too: SHIFT^2 (exp(that of g) - 1).
"""

import numpy as np

SIZE = 32  # pixels along each side; maps are periodic
SHIFT = 0.02  # convergence is above -SHIFT
VARIANCE, BEND, SLOPE = 0.5, 2.0, 3.0  # of g: in all, cycles a map where its spectrum bends, and how it falls then


def spectrum(size=SIZE):
    """Returns the power spectrum of g for np.fft.fft2, (size, size): its sum is VARIANCE times size^4."""
    k = np.hypot(*np.meshgrid(*[np.fft.fftfreq(size, 1 / size)] * 2))
    power = np.where(k > 0, (1 + (k / BEND) ** 2) ** (-SLOPE / 2), 0)
    return power / power.sum() * VARIANCE * size**4


def simulate(count, rng, size=SIZE):
    """Returns maps of convergence, float32 of shape (count, size, size, 1)."""
    noise = np.fft.fft2(rng.normal(size=(count, size, size))) / size
    g = np.fft.ifft2(noise * np.sqrt(spectrum(size))).real
    return (SHIFT * (np.exp(g - VARIANCE / 2) - 1)).astype("float32")[..., None]


def squeezed(convergence):
    """Returns maps as the networks see them, mean 0: in the logarithm the few bright pixels are brought near."""
    return np.log(1 + convergence / SHIFT) + VARIANCE / 2


def stretched(image):
    """Returns convergence again."""
    return SHIFT * (np.exp(image - VARIANCE / 2) - 1)


def intensities(convergence):
    """Returns each map's histogram, shares of its pixels, (count, 20): bins of equal width in ln density, -2 to 3."""
    logs = np.log(np.maximum(1 + convergence / SHIFT, 1e-9))
    places = np.clip(((logs + 2) * 4).astype(int), 0, 19).reshape(len(logs), -1)
    counted = np.zeros((len(logs), 20))
    np.add.at(counted, (np.arange(len(logs))[:, None], places), 1)
    return counted / places.shape[1]


def powers(convergence):
    """Returns each map's power spectrum, (count, size / 2): means over rings of 1, 2, ... cycles a map."""
    size = convergence.shape[1]
    power = np.abs(np.fft.fft2(convergence[..., 0])) ** 2 / size**4
    rings = np.round(np.hypot(*np.meshgrid(*[np.fft.fftfreq(size, 1 / size)] * 2))).astype(int)
    return np.stack([power[:, rings == ring].mean(axis=1) for ring in range(1, size // 2 + 1)], axis=1)


def chi2(found, wanted):
    """Returns chi squared per bin between two sets of maps: 1 if they are alike.

    Args:
        found, wanted: of each map, a number in each bin, (count, bins). Errors are those of the means over maps. Bins
            in which less than ten maps of `wanted` have anything do not count.
    """
    filled = (wanted != 0).sum(axis=0) >= 10
    error = (found.var(axis=0) / len(found) + wanted.var(axis=0) / len(wanted))[filled]
    return float(np.mean((found.mean(axis=0) - wanted.mean(axis=0))[filled] ** 2 / error))


def write(path, count, seed):
    """Writes maps into a .npz file."""
    part = path.with_suffix(".part.npz")
    np.savez(part, convergence=simulate(count, np.random.default_rng(seed)))
    part.rename(path)
