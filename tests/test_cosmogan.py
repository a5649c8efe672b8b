"""examples.cosmogan: its maps against what lognormal fields must have, its statistics by hand, and one small study."""

import sys

import numpy as np
import pytest
from launch import ROOT, child_environment, launch

from examples.cosmogan import maps, train


def test_maps_have_the_moments_of_lognormal_fields():
    found = maps.simulate(2000, np.random.default_rng(0))
    assert (found.shape, found.dtype) == ((2000, 32, 32, 1), np.float32)
    assert found.min() > -maps.SHIFT
    # Of a lognormal field, with the correlation c of g: SHIFT^2 (exp(c) - 1).
    c = np.fft.ifft2(maps.spectrum()).real / maps.SIZE**2
    assert c[0, 0] == pytest.approx(maps.VARIANCE)
    correlation = maps.SHIFT**2 * (np.exp(c) - 1)
    assert found.var() == pytest.approx(correlation[0, 0], rel=0.05)
    powers = maps.powers(found)
    rings = np.round(np.hypot(*np.meshgrid(*[np.fft.fftfreq(32, 1 / 32)] * 2))).astype(int)
    exact = np.fft.fft2(correlation).real / maps.SIZE**2
    for ring in (1, 2, 5, 10, 16):
        error = powers[:, ring - 1].std() / np.sqrt(2000)
        assert powers[:, ring - 1].mean() == pytest.approx(exact[rings == ring].mean(), abs=5 * error)
    share = maps.intensities(found).mean(axis=0)
    edges = -2 + np.arange(1, 20) / 4
    normal = np.random.default_rng(1).normal(-maps.VARIANCE / 2, maps.VARIANCE**0.5, 10**6)
    np.testing.assert_allclose(np.cumsum(share)[:-1], np.searchsorted(np.sort(normal), edges) / 10**6, atol=0.01)


def test_what_networks_see_can_be_turned_back():
    found = maps.simulate(50, np.random.default_rng(0))
    seen = maps.squeezed(found)
    assert (seen.mean(), seen.std()) == pytest.approx((0, maps.VARIANCE**0.5), abs=0.05)
    np.testing.assert_allclose(maps.stretched(seen), found, atol=1e-6)


def test_chi_squared_by_hand():
    rng = np.random.default_rng(0)
    one, two = rng.normal(size=(2, 400, 3000))
    assert maps.chi2(one, two) == pytest.approx(1, abs=0.1)
    # Two sets of 100, 1 apart, of variance 4: 1 / (4 / 100 + 4 / 100).
    steps = np.repeat([[-1.0], [3.0]], 50, axis=0)
    assert maps.chi2(steps + 1, steps) == pytest.approx(12.5)
    rare = np.concatenate([steps, np.repeat([[5.0], [0.0]], [9, 91], axis=0)], axis=1)
    assert maps.chi2(rare + [[1.0, 700.0]], rare) == pytest.approx(12.5), "a bin with nine maps does not count"
    other = maps.simulate(400, rng)
    alike, blurred = (train.quality(x, other) for x in (maps.simulate(400, rng), (other + np.roll(other, 1, 1)) / 2))
    assert max(alike.values()) < 3
    assert min(blurred.values()) > 20


def test_turned_maps_are_as_likely_as_they_were():
    found = maps.simulate(40, np.random.default_rng(0))
    places = train.turns(40, maps.SIZE, np.random.default_rng(1))
    assert len({tuple(some) for some in places}) == 40
    pixels = np.arange(maps.SIZE**2)
    assert all(np.array_equal(np.sort(some), pixels) for some in places)
    turned = np.take_along_axis(found.reshape(40, -1), places, axis=1).reshape(found.shape)
    np.testing.assert_allclose(maps.powers(turned), maps.powers(found), rtol=1e-4)


LAYERS = """
import numpy as np, keras
from examples.cosmogan import train
images = np.random.default_rng(0).normal(size=(3, 4, 4, 1)).astype("float32")
pixels = np.arange(16).reshape(4, 4)
there = np.stack([pixels, np.roll(pixels, 1, 0), pixels.T]).reshape(3, 16)
turned = keras.ops.convert_to_numpy(train.turned(images, there.astype("int32")))
for found, wanted in zip(turned, (images[0], np.roll(images[1], 1, 0), images[2].transpose(1, 0, 2))):
    np.testing.assert_array_equal(found, wanted)
wrapped = keras.ops.convert_to_numpy(train._wrapped(images))
np.testing.assert_array_equal(wrapped, np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), "wrap"))
make = train.generator(16, 2, 2)
hidden = keras.Model(make.layers[2].output, make.output)
noise = np.random.default_rng(0).normal(size=(1, 4, 4, 4)).astype("float32")
moved = [keras.ops.convert_to_numpy(hidden(np.roll(noise, by, axis=(1, 2)))) for by in (0, 1)]
np.testing.assert_allclose(np.roll(moved[0], 4, axis=(1, 2)), moved[1], atol=1e-6)
"""


@pytest.mark.parametrize(
    "backend", ["torch", *(pytest.param(b, marks=pytest.mark.soak) for b in ("tensorflow", "jax"))]
)
def test_maps_have_no_edges(backend):
    done = launch(1, [sys.executable, "-c", LAYERS], timeout=200, env=child_environment(backend), mpi=False, cwd=ROOT)
    assert done.returncode == 0, done.output


ONE_STEP = """
import numpy as np, keras, keras_hpc
from examples.cosmogan import maps, train
keras_hpc.init(teams=2)
models = make, judge, apart, both = train.compiled(1e-3, filters=4)
values = lambda model: [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
same = lambda one, other: [np.array_equal(a, b) for a, b in zip(one, other)]
rng = np.random.default_rng(0)
noise, ones = np.ones((4, 64), "float32"), np.ones((4, 1), "float32")
before = values(judge), values(make)
with train.frozen(judge):
    assert not judge.trainable_variables and len(both.trainable_variables) == len(make.trainable_variables)
    both.train_on_batch([noise, train.turns(4, maps.SIZE, rng)], ones)
assert all(same(before[0], values(judge))) and not any(same(before[1], values(make)))
(norm,) = [layer for layer in judge.layers if "batch_norm" in layer.name][:1]
assert not np.array_equal(norm.moving_mean, 0 * norm.moving_mean), "it has normalized over the batch"
before = values(judge), values(make)
train.step(models, maps.squeezed(maps.simulate(4, rng)), rng)
assert not any(same(before[0], values(judge))) and not any(same(before[1], values(make)))
assert (int(apart.optimizer.iterations), int(both.optimizer.iterations)) == (1, 2)
train.settle(models, rng)
noise = np.random.default_rng(1).normal(size=(512, 64)).astype("float32")
one, other = (keras.ops.convert_to_numpy(make(noise, training=training)) for training in (True, False))
np.testing.assert_allclose(one.std(), other.std(), rtol=0.1)
"""


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_each_network_trains_its_own_weights(backend):
    done = launch(1, [sys.executable, "-c", ONE_STEP], timeout=200, env=child_environment(backend), mpi=False, cwd=ROOT)
    assert done.returncode == 0, done.output


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_study_draws_and_says_what_it_found(tmp_path):
    words = f"--out {tmp_path} --seeds 1 --epochs 2 --maps 128 --tests 64".split()
    command = [sys.executable, "-m", "examples.cosmogan.study", *words]
    done = launch(1, command, timeout=280, env=child_environment("tensorflow"), mpi=False)
    assert done.returncode == 0, done.output
    for name in ("summary.csv", "table.md", "maps.png", "bins.png", "bins.csv"):
        assert (tmp_path / name).stat().st_size > 100
    assert "two sets of simulated maps: histogram" in done.output
    assert "| ranks | pixels: chi² per bin | power spectrum: chi² per bin |" in done.output
    one, two = (
        np.genfromtxt(tmp_path / f"{n}-ranks-seed-1" / "losses.csv", delimiter=",", skip_header=1) for n in (1, 2)
    )
    assert one.shape == (2, 3)
    np.testing.assert_allclose(one[0], two[0], rtol=1e-4)  # later, rounding grows
