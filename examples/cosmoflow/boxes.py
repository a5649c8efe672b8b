# SPDX-License-Identifier: Apache-2.0
"""Boxes of a universe: lognormal fields of matter at four redshifts, for four parameters of cosmology.

The logarithm of the density is a Gaussian field with the linear power spectrum of cold dark matter (Bardeen et al.,
1986, with Sugiyama's baryons), normalized to sigma_8 and grown from redshift to redshift (Carroll et al., 1992); cells
then hold Poisson numbers of particles. No gravity has acted: it is a toy beside the N-body boxes of CosmoFlow, with the
same layout: TFRecord files with features x, int16 of shape (32, 32, 32, 4), and y, the parameters, -1 to 1.
"""

import zlib

import numpy as np

SIZE = 32  # cells along each side
CELL = 4.0  # Mpc/h
REDSHIFTS = (3.0, 1.5, 0.5, 0.0)
PARTICLES = 8  # of a cell, mean
RANGES = {"Omega_m": (0.2, 0.4), "sigma_8": (0.6, 1.0), "n_s": (0.8, 1.1), "H_0": (55.0, 85.0)}
BARYONS = 0.049


def spectrum(k, omega_m, sigma_8, n_s, h_0):
    """Returns the linear power spectrum today, (Mpc/h)^3, at wave numbers k, h/Mpc; 0 at 0."""
    scales = np.geomspace(1e-4, 20, 2000)
    # The variance in spheres of 8 Mpc/h: trapezoids in ln k.
    x = 8 * scales
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    shape = _shape(scales, omega_m, n_s, h_0)
    inside = scales**3 * shape * window**2 / (2 * np.pi**2)
    variance = np.sum((inside[1:] + inside[:-1]) / 2 * np.diff(np.log(scales)))
    return np.where(k > 0, _shape(np.where(k > 0, k, 1.0), omega_m, n_s, h_0), 0.0) * sigma_8**2 / variance


def _shape(k, omega_m, n_s, h_0):
    """The power spectrum up to a factor."""
    h = h_0 / 100
    q = k / (omega_m * h * np.exp(-BARYONS * (1 + np.sqrt(2 * h) / omega_m)))
    transfer = np.log(1 + 2.34 * q) / (2.34 * q)
    transfer *= (1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4) ** -0.25
    return k**n_s * transfer**2


def growth(z, omega_m):
    """Returns by how much smaller fluctuations were at redshift z, in a flat universe; 1 today."""

    def factor(a):
        omega = omega_m / (omega_m + (1 - omega_m) * a**3)
        rest = 1 - omega
        return a * 2.5 * omega / (omega ** (4 / 7) - rest + (1 + omega / 2) * (1 + rest / 70))

    return factor(1 / (1 + z)) / factor(1.0)


def gaussian(power, rng):
    """Returns a Gaussian field, (32, 32, 32), whose spectrum is `power`, a function of wave numbers in h/Mpc."""
    whole, half = (2 * np.pi * f(SIZE, CELL) for f in (np.fft.fftfreq, np.fft.rfftfreq))
    k = np.sqrt(whole[:, None, None] ** 2 + whole[:, None] ** 2 + half**2)
    noise = np.fft.rfftn(rng.normal(size=(SIZE,) * 3))
    return np.fft.irfftn(noise * np.sqrt(power(k) / CELL**3), s=(SIZE,) * 3)


def simulate(parameters, rng):
    """Returns numbers of particles, int16 of shape (32, 32, 32, 4), of a universe: `parameters` as those of RANGES."""
    log_density = gaussian(lambda k: spectrum(k, *parameters), rng)
    grown = log_density[..., None] * np.array([growth(z, parameters[0]) for z in REDSHIFTS])
    density = np.exp(grown - grown.var(axis=(0, 1, 2)) / 2)
    return np.minimum(rng.poisson(PARTICLES * density), np.iinfo("int16").max).astype("int16")


def scaled(parameters):
    """Returns parameters, (..., 4), as -1 to 1, which the network learns."""
    low, high = np.array(list(RANGES.values())).T
    return (2 * (np.asarray(parameters) - low) / (high - low) - 1).astype("float32")


def write(pattern, boxes, seed, files=4):
    """Writes boxes of random parameters into TFRecord files.

    Args:
        pattern: of paths, with {} for the number of the file.
        boxes: how many, in all files.
        seed: of everything random.
        files: how many.
    """
    import tensorflow as tf

    rng = np.random.default_rng(seed)
    low, high = np.array(list(RANGES.values())).T
    writers = [tf.io.TFRecordWriter(str(pattern).format(number)) for number in range(files)]
    for number in range(boxes):
        parameters = rng.uniform(low, high)
        features = {
            "x": tf.train.Feature(bytes_list=tf.train.BytesList(value=[simulate(parameters, rng).tobytes()])),
            "y": tf.train.Feature(float_list=tf.train.FloatList(value=scaled(parameters))),
        }
        example = tf.train.Example(features=tf.train.Features(feature=features))
        writers[number % files].write(example.SerializeToString())
    for writer in writers:
        writer.close()


def parse(records):
    """Makes a batch of records: numbers of particles as ln(1 + n) - 2, (n, 32, 32, 32, 4), and parameters, (n, 4)."""
    import tensorflow as tf

    features = {"x": tf.io.FixedLenFeature([], tf.string), "y": tf.io.FixedLenFeature([len(RANGES)], tf.float32)}
    found = tf.io.parse_example(records, features)
    x = tf.reshape(tf.io.decode_raw(found["x"], tf.int16), (-1, SIZE, SIZE, SIZE, len(REDSHIFTS)))
    return tf.math.log1p(tf.cast(x, tf.float32)) - 2, found["y"]


def turned(x, y):
    """Moves, turns and mirrors a batch of boxes at random, all alike: a universe has no middle and no direction.

    What is random follows from the parameters, of which each batch of each epoch has others.
    """
    rng = np.random.default_rng(zlib.crc32(np.ascontiguousarray(y)))
    x = np.roll(x, rng.integers(0, SIZE, 3), axis=(1, 2, 3)).transpose(0, *(1 + rng.permutation(3)), 4)
    mirrored = [slice(None, None, int(step)) for step in rng.choice([-1, 1], 3)]
    return np.ascontiguousarray(x[:, mirrored[0], mirrored[1], mirrored[2]]), y
