"""examples.atoms: its crystals against textbooks, its images by counting, its network's size, and one small study."""

import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT, child_environment, launch

from examples.atoms import crystals, study, train


def neighbours(crystal, axis):
    """The distance of each column to its nearest one, Angstrom."""
    sides, places, _ = crystals.columns(crystal, axis)
    steps = np.stack(np.meshgrid([-1, 0, 1], [-1, 0, 1]), axis=-1).reshape(-1, 1, 2) * sides
    away = np.linalg.norm((places + steps).reshape(-1, 1, 2) - places, axis=-1)
    return np.where(away > 1e-6, away, np.inf).min(axis=0)


@pytest.mark.parametrize(
    ("crystal", "axis", "expected"),
    [
        ("Cu", "001", 3.615 / 2),
        ("Cu", "110", 3.615 * (1 / 8 + 1 / 4) ** 0.5),
        ("Au", "111", 4.078 / 6**0.5),
        ("Nb", "001", 3.300 / 2**0.5),
        ("Nb", "111", 3.300 * (2 / 3) ** 0.5),
        ("Si", "110", 5.431 / 4),  # its dumbbells: 1.36 Angstrom
        ("SrO", "001", 5.160 / 2),
        ("CsCl", "001", 4.123 / 2**0.5),
    ],
)
def test_columns_stand_as_in_textbooks(crystal, axis, expected):
    np.testing.assert_allclose(neighbours(crystal, axis), expected, rtol=1e-3)


def test_columns_hold_all_atoms():
    for crystal, axis in crystals.CLASSES:
        edge, elements = crystals.CRYSTALS[crystal]
        sides, places, brightness = crystals.columns(crystal, axis)
        assert np.all((places >= 0) & (places < sides))
        exact = sum(number**1.7 * len(atoms) for number, atoms in elements.items()) / edge**3
        assert brightness.sum() / np.prod(sides) == pytest.approx(exact), "of a cubic Angstrom"
    _, _, bright = crystals.columns("SrTiO3", "001")
    np.testing.assert_allclose(sorted(bright * 3.905), sorted([38**1.7, 22**1.7 + 8**1.7, 8**1.7, 8**1.7]))


def test_columns_in_view_are_all_there_wherever_the_crystal_is():
    rng = np.random.default_rng(0)
    crystal = crystals.columns("Cu", "111")
    density = len(crystal[1]) / np.prod(crystal[0])
    area = np.prod([n * crystals.PIXEL + 4 for n in crystals.SHAPE])
    for turn in np.linspace(0, 2 * np.pi, 13):
        matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        places, bright = crystals.columns_in_view(*crystal, matrix, rng.uniform(0, 1, 2) * crystal[0])
        assert len(places) == len(bright) == pytest.approx(area * density, rel=0.04)
        assert len(np.unique(np.round(places, 3), axis=0)) == len(places)


def test_images_show_their_class_at_its_angle(monkeypatch):
    """The strongest waves of SrO along 001 are a square's: their lengths and angles are those it was made with."""
    many = (1000.0, 1001.0)
    number = crystals.CLASSES.index(("SrO", "001"))
    for seed in range(3):
        image = crystals.image(number, np.random.default_rng(seed), (10, 10), many)[..., 0]
        assert (image.shape, image.dtype) == (crystals.SHAPE, np.float32)
        assert image.mean() == pytest.approx(0, abs=1e-5)
        assert image.std() == pytest.approx(1, abs=1e-4)
        windowed = image * np.outer(*(np.hanning(n) for n in crystals.SHAPE))
        power = np.abs(np.fft.fft2(windowed, (1024, 1024)))
        down, right = np.unravel_index(power[:, :512].argmax(), (1024, 512))
        wave = np.array([np.fft.fftfreq(1024, crystals.PIXEL)[down], right / 1024 / crystals.PIXEL])
        assert np.linalg.norm(wave) == pytest.approx(2 / 5.160, rel=0.05)
        turned = np.rad2deg(np.arctan2(wave[1], wave[0])) % crystals.PERIOD
        assert turned == pytest.approx(10, abs=3)


def test_no_two_classes_look_alike_however_they_are_turned():
    """Sharp and without noise: the power of waves of each length and direction."""
    spectra = []
    for crystal, axis in crystals.CLASSES:
        sides, places, bright = crystals.columns(crystal, axis)
        steps = np.stack(np.meshgrid(range(-20, 21), range(-20, 21)), axis=-1).reshape(-1, 2)
        waves = steps / sides
        length = np.linalg.norm(waves, axis=1)
        waves, length = (of[(length > 0) & (length < 1.2)] for of in (waves, length))
        power = np.abs(np.exp(2j * np.pi * waves @ places.T) @ bright) ** 2 * np.exp(-((2 * np.pi * 0.5 * length) ** 2))
        near = np.exp(-(((length[:, None] - np.linspace(0, 1.2, 121)) / 0.012) ** 2) / 2)  # as near as drifts leave it
        away = np.arctan2(waves[:, 1], waves[:, 0])[:, None] - np.deg2rad(np.arange(0, 180, 5))
        spectrum = (power[:, None] * near).T @ np.exp((np.cos(2 * away) - 1) / (2 * np.deg2rad(5)) ** 2)
        spectra.append(spectrum / np.linalg.norm(spectrum))
    spectra = np.array(spectra)
    turned = [np.tensordot(spectra, np.roll(spectra, turn, axis=2), ((1, 2), (1, 2))) for turn in range(36)]
    alike = np.max(turned, axis=0) - np.eye(len(spectra))
    worst = np.unravel_index(alike.argmax(), alike.shape)
    assert alike.max() < 0.9, [crystals.CLASSES[n] for n in worst]


def test_tests_are_at_angles_and_in_noise_that_were_not_seen():
    assert crystals.HELD_OUT[0] > crystals.SEEN[1]
    assert crystals.HELD_OUT[1] < crystals.PERIOD
    assert crystals.FEW[1] < crystals.ELECTRONS[0]
    x, classes = train.test_images("both", 1)
    assert np.bincount(classes).tolist() == [1] * 27
    np.testing.assert_array_equal(x, train.test_images("both", 1)[0])


def test_confusion_by_hand():
    found = study.confusion(np.arange(54) % 27, np.r_[np.arange(27), np.zeros(27, int)])
    assert found[0, 0] == 1
    assert found[5, 5] == found[5, 0] == 0.5
    np.testing.assert_allclose(found.sum(axis=1), 1)


IMAGES = """
import numpy as np
from examples.atoms import train

print(train.resnet50((120, 85, 1), 27, 8).get_layer(index=-3).output.shape[1:])
whole, parts = train.new_images(54, 54, 3), train.new_images(54, 18, 3)
(x, y), found = whole[0], [parts[n] for n in range(3)]
assert np.bincount(y).tolist() == [2] * 27
np.testing.assert_array_equal(y, np.concatenate([p[1] for p in found]))
np.testing.assert_array_equal(x, np.concatenate([p[0] for p in found]))
whole.on_epoch_end()
assert not np.any([np.array_equal(a, b) for a in whole[0][0] for b in x])
"""


@pytest.mark.soak
def test_images_do_not_depend_on_the_number_of_ranks_and_are_new_in_each_epoch():
    command = [sys.executable, "-c", IMAGES]
    env = child_environment("tensorflow")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env, cwd=ROOT)
    assert done.stdout.strip() == "(4, 3, 256)"


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_study_draws_and_says_what_it_found(tmp_path):
    words = f"--out {tmp_path} --seeds 1 --epochs 2 --images 108 --tests 2".split()
    command = [sys.executable, "-m", "examples.atoms.study", *words]
    done = launch(1, command, timeout=280, env=child_environment("tensorflow"), mpi=False)
    assert done.returncode == 0, done.output
    for name in ("summary.csv", "table.md", "images.png", "confusion.png", "confusion.csv"):
        assert (tmp_path / name).stat().st_size > 100
    assert "| ranks | angles and noise as learnt | held-out angles |" in done.output
    assert len((tmp_path / "2-ranks-seed-1" / "history.csv").read_text().splitlines()) == 3
