"""examples.cnn.jets and hep_cnn: images of events by hand, files, training and its ROC curve."""

import csv
import json

import numpy as np
import pytest

from examples.cnn import jets

PHOTON, ELECTRON, MUON, PION = 22, 11, 13, 211


class Exact:
    """Random numbers that smear nothing."""

    @staticmethod
    def standard_normal(count):
        return np.zeros(count)


def test_particles_go_where_they_belong():
    # eta, phi, energy, kind, charge
    image = jets.image_of(
        [
            (0.01, 0.01, 10, PHOTON, 0),
            (0.02, 0.02, 5, -PION, -1),
            (2.49, -3.14, 20, -ELECTRON, 1),
            (-2.49, 3.14, 30, MUON, -1),
            (2.6, 0, 99, PHOTON, 0),  # outside
        ],
        Exact,
    )
    assert image.shape == (64, 64, 3)
    np.testing.assert_allclose(image[32, 32], [10 / np.cosh(0.01) + 5 / np.cosh(0.02), 10 / np.cosh(0.01), 1], 1e-6)
    np.testing.assert_allclose(image[63, 0], [20 / np.cosh(2.49)] * 2 + [1], 1e-6)
    np.testing.assert_allclose(image[0, 63], [0, 0, 1], err_msg="a muon leaves a track only")
    assert np.count_nonzero(image.any(axis=-1)) == 3


def test_energies_are_smeared_by_kind():
    rng = np.random.default_rng(1)
    for kind, charge, resolution in ((PHOTON, 0, 0.1), (PION, 1, 0.5)):
        found = [jets.image_of([(0.01, 0.01, 100, kind, charge)], rng).max() for _ in range(2000)]
        assert np.mean(found) == pytest.approx(100, rel=0.01)
        assert np.std(found) == pytest.approx(resolution * np.sqrt(100), rel=0.1)


def test_files_hold_what_was_saved(tmp_path):
    rng = np.random.default_rng(1)
    images = np.where(rng.random((5, 64, 64, 1)) < 0.05, rng.random((5, 64, 64, 3)), 0).astype("float32")
    images[3] = 0  # an event without anything
    labels = np.array([0, 1, 1, 0, 1])
    jets.save(tmp_path / "jets.npz", images, labels)
    again, labels_again = jets.load(tmp_path / "jets.npz")
    np.testing.assert_allclose(again, images, rtol=1e-3)
    np.testing.assert_array_equal(labels_again, labels)


def test_the_set_in_the_repository():
    images, labels = jets.load(jets.SMALL)
    assert (images.shape, images.dtype, labels.sum()) == ((2000, 64, 64, 3), np.float32, 1000)
    assert jets.SMALL.stat().st_size < 5e6
    sums = images.sum(axis=(1, 2))
    assert (sums > 0).all()
    assert (sums[:, 1] < sums[:, 0]).all(), "a part is electromagnetic"
    # Two jets of at least that, mostly inside; two gluinos of 600 GeV.
    medians = [np.median(sums[labels == label, 0]) for label in (0, 1)]
    assert medians[0] > 2 * jets.PT_HAT_MIN_GEV[0] * 0.8
    assert 800 < medians[1] < 1600
    for label in (0, 1):
        em_fraction = np.median(sums[labels == label, 1] / sums[labels == label, 0])
        assert 0.2 < em_fraction < 0.4, "neutral pions are a third of the pions"


@pytest.mark.soak
@pytest.mark.mpi
def test_two_ranks_learn(run_ranks, tmp_path):
    args = ["-m", "examples.cnn.hep_cnn", "--epochs", "2", "--filters", "8", "--out", tmp_path]
    run_ranks(2, args, backend="torch", timeout=200)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert summary["auc"] > 0.85
    with (tmp_path / "roc.csv").open() as file:
        lines = [{k: float(v) for k, v in line.items()} for line in csv.DictReader(file)]
    false, true = (np.array([line[name] for line in lines]) for name in ("false", "true"))
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    area = np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2)
    assert area == pytest.approx(summary["auc"], abs=1e-4)
    assert (tmp_path / "roc.png").read_bytes().startswith(b"\x89PNG")
