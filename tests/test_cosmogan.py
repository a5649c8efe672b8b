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
    assert -1 < seen.min() < -0.5
    assert 0 < seen.max() < 0.98
    np.testing.assert_allclose(maps.stretched(seen), found, atol=1e-6)
    assert np.isfinite(maps.stretched(np.ones(3))).all()


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
    turned = train.turned(found, np.random.default_rng(1))
    assert turned.shape == found.shape
    assert not any(np.array_equal(one, other) for one, other in zip(turned, found, strict=True))
    np.testing.assert_allclose(maps.powers(turned), maps.powers(found), rtol=1e-4)
    np.testing.assert_array_equal(maps.intensities(turned), maps.intensities(found))


ONE_STEP = """
import numpy as np, keras, keras_hpc
from examples.cosmogan import maps, train
keras_hpc.init(teams=2)
make, judge, both = train.compiled(1e-3, filters=4)
values = lambda model: [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
same = lambda one, other: [np.array_equal(a, b) for a, b in zip(one, other)]
noise, ones = np.ones((4, 64), "float32"), np.ones((4, 1), "float32")
before = values(judge), values(make)
with train.frozen(judge):
    assert not judge.trainable_variables and len(both.trainable_variables) == len(make.trainable_variables)
    both.train_on_batch(noise, ones)
assert all(same(before[0], values(judge))) and not any(same(before[1], values(make)))
(norm,) = [layer for layer in judge.layers if "batch_norm" in layer.name][:1]
assert not np.array_equal(norm.moving_mean, 0 * norm.moving_mean), "it has normalized over the batch"
before = values(judge), values(make)
train.step((make, judge, both), maps.squeezed(maps.simulate(4, np.random.default_rng(0))), np.random.default_rng(0))
assert not any(same(before[0], values(judge))) and not any(same(before[1], values(make)))
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
    assert len((tmp_path / "2-ranks-seed-1" / "losses.csv").read_text().splitlines()) == 3
