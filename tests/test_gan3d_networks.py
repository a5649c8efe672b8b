"""Showers of the examples compared: every measure against a case computed by hand, and the report. NumPy only.

The networks and their training are tested by ranks/check_gan3d.py.
"""

import csv

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from examples.gan3d import figures, metrics, validate

SIZE = 7


def gaussian(count=60, mean=(3.0, 3.0, 3.0), width=1.0, seed=1, low=10.0, high=100.0):
    """Showers whose profile along each axis is a Gaussian: sum = 2 % of the energy, energies from low to high GeV."""
    rng = np.random.default_rng(seed)
    energies = rng.uniform(low, high, count)
    i = np.arange(SIZE)
    x, y, z = (np.exp(-0.5 * ((i - m) / width) ** 2) for m in mean)
    shape = np.einsum("i,j,k->ijk", x, y, z)
    return figures.Sample(0.02 * energies[:, None, None, None] * (shape / shape.sum()), energies)


def test_profiles_sum_over_the_other_axes():
    images = np.arange(2 * 2 * 3 * 4).reshape(2, 2, 3, 4)
    x, y, z = metrics.profiles(images)
    assert [p.shape for p in (x, y, z)] == [(2, 2), (2, 3), (2, 4)]
    assert x[0].tolist() == [66, 210]
    assert y[0].tolist() == [60, 92, 124]
    assert z[0].tolist() == [60, 66, 72, 78]
    assert metrics.sums(images).tolist() == [276, 852]


def test_moments_of_two_cells_and_of_nothing():
    images = np.zeros((2, 4, 4, 4))
    images[0, 0, 1, 1] = 1.0
    images[0, 3, 1, 2] = 2.0
    moments = metrics.moments(images, orders=3)
    # Along x: mean (0 * 1 + 3 * 2) / 3 = 2, variance (4 * 1 + 1 * 2) / 3 = 2, third (-8 * 1 + 1 * 2) / 3 = -2.
    np.testing.assert_allclose(moments[0, 0], [2, 2, -2])
    np.testing.assert_allclose(moments[0, 1], [1, 0, 0], atol=1e-15)
    np.testing.assert_allclose(moments[0, 2], [5 / 3, 2 / 9, -2 / 27])
    assert not moments[1].any()


def test_identical_samples_differ_in_nothing():
    sample = gaussian()
    merit = metrics.figure_of_merit(sample.images, sample.images)
    assert (merit.p, merit.q, merit.d_w, merit.total) == (0, 0, 0, 0)
    for chi2, _, distance, probability in validate.compare(sample, sample).values():
        assert chi2 == 0
        assert np.isnan(distance) or (distance, probability) == (0, 1)


def test_merit_of_a_shower_moved_by_one_cell():
    ours, theirs = np.zeros((2, 1, 4, 4, 4))
    ours[0, 1, 2, 2], ours[0, 2, 2, 2] = 3.0, 1.0
    theirs[0, 2, 2, 2], theirs[0, 3, 2, 2] = 3.0, 1.0
    merit = metrics.figure_of_merit(ours, theirs, orders=1)
    # Means along x 1.25 and 2.25, others equal. Of x' profile (0, 3, 1, 0) against (0, 0, 3, 1): cells 1 and 2 count.
    assert merit.p == pytest.approx((1 / 1.25) / 3)
    assert merit.q == pytest.approx(((3 / 3 + 2 / 1) / 2) / 3)
    assert merit.d_w == pytest.approx(((3 + 2 + 1) / 4) / 3)
    assert merit.total == pytest.approx(merit.p + merit.q)


def test_merit_of_shifted_gaussians_is_known():
    size, width, shift = 41, 3.0, 0.5
    i = np.arange(size)
    a, b = (np.exp(-0.5 * ((i - 20 - d) / width) ** 2) for d in (0, shift))
    images = [(p[:, None, None] * a[None, :, None] * a)[None] for p in (a, b)]
    images = [image / image.sum() for image in images]
    merit = metrics.figure_of_merit(*images)
    # Six moments: means 20 and variances 9; one mean differs by 0.5.
    assert merit.p == pytest.approx(shift / 20 / 6, rel=1e-5)
    # The area between a Gaussian and itself shifted by d is 2 (2 Phi(d / 2 sigma) - 1); d / (2 sigma) = 1/12.
    assert merit.d_w == pytest.approx(2 * 0.0664135 / 3, rel=2e-3)
    # A Gaussian over one that is shifted is exp(t x - t^2 sigma^2 / 2) with t = d / sigma^2.
    t = shift / width**2
    assert merit.q == pytest.approx(np.mean(np.abs(np.exp(t * (i - 20) - t * shift / 2) - 1)) / 3, rel=1e-4)


def test_half_the_energy_is_a_merit_of_one_half():
    sample = gaussian()
    merit = metrics.figure_of_merit(sample.images, sample.images / 2)
    assert merit.p == pytest.approx(0, abs=1e-12)
    assert merit.q == pytest.approx(0.5)
    assert merit.d_w == pytest.approx(0.5)


def test_cells_without_energy_in_the_reference_do_not_divide():
    reference, generated = np.zeros((1, 3, 3, 3)), np.full((1, 3, 3, 3), 0.1)
    reference[0, 1, 1, 1] = 0.9
    merit = metrics.figure_of_merit(reference, generated)
    assert np.isfinite([merit.p, merit.q, merit.d_w]).all()
    assert merit.q == pytest.approx(0)  # nine cells of 0.1 in the one row that counts
    # Empty showers have no shape, but energies.
    assert metrics.figure_of_merit(reference, np.zeros_like(reference)).d_w == pytest.approx(1)


def test_hits_maximum_and_spectrum():
    images = np.zeros((2, 3, 3, 3))
    images[0, 1, 1, :] = [1e-3, 2e-3, 5e-5]
    images[1, 0, :2, 2] = 1e-3
    assert metrics.hits(images).tolist() == [2, 2]
    assert metrics.hits(images, threshold=1e-5).tolist() == [3, 2]
    assert metrics.maximum_layer(images).tolist() == [1, 2]
    edges, cells = metrics.spectrum(images, np.array([1e-5, 1e-4, 1.5e-3, 1.0]))
    assert cells.tolist() == [0.5, 1.5, 0.5]
    assert metrics.spectrum(images)[1].sum() == 2.5
    assert len(edges) == 4


def test_response_is_the_sum_over_the_energy():
    sample = gaussian(400)
    mean, spread, error = metrics.response(sample.images, sample.energies, np.array([10.0, 50.0, 100.0, 200.0]))
    np.testing.assert_allclose(mean[:2], 0.02)
    np.testing.assert_allclose(spread[:2], 0, atol=1e-12)
    assert np.isnan([mean[2], spread[2], error[2]]).all()


def test_chi2_by_hand():
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    a, b = np.repeat([0.5, 1.5], [8, 2]), np.repeat([0.5, 1.5], [5, 5])
    assert metrics.chi2(a, b, edges) == (pytest.approx(9 / 13 + 9 / 7), 1)  # the third bin is empty
    # Twice the sample, the same distribution.
    assert metrics.chi2(a, np.repeat(a, 2), edges) == (pytest.approx(0, abs=1e-12), 1)
    assert metrics.chi2(a, a + 1, edges) == (pytest.approx(8 + 36 / 10 + 2), 2)
    assert metrics.chi2(np.full(4, 0.5), np.full(4, 0.5), edges) == (0, 0)
    assert metrics.chi2(np.full(4, 9.0), np.full(4, 0.5), edges)[0] == np.inf  # none of the first inside


def test_chi2_of_one_distribution_is_its_ndf():
    rng = np.random.default_rng(5)
    edges = np.linspace(-3, 3, 21)
    values = [metrics.chi2(rng.normal(size=2000), rng.normal(size=3000), edges) for _ in range(200)]
    assert np.mean([chi2 / ndf for chi2, ndf in values]) == pytest.approx(1, abs=0.08)
    profiles = [metrics.chi2_of_profiles(rng.normal(size=(100, 10)), rng.normal(size=(150, 10))) for _ in range(200)]
    assert {ndf for _, ndf in profiles} == {10}
    assert np.mean([chi2 / ndf for chi2, ndf in profiles]) == pytest.approx(1, abs=0.15)


def test_kolmogorov_smirnov_by_hand():
    distance, _ = metrics.kolmogorov_smirnov([1.0, 2.0, 3.0, 4.0], [3.5, 4.5])
    assert distance == pytest.approx(0.75)
    assert metrics.kolmogorov_smirnov([1.0, 2.0], [1.0, 2.0]) == (0, 1)
    # Kolmogorov's function is 0.05 at 1.3581: a distance of 1.3581 / (sqrt(n) + 0.12 + 0.11 / sqrt(n)), n = 500.
    n = 1000
    a = np.arange(n) / n
    moved = a + (1.3581 / (np.sqrt(500) + 0.12 + 0.11 / np.sqrt(500)))
    distance, probability = metrics.kolmogorov_smirnov(a, moved)
    assert probability == pytest.approx(0.05, abs=0.004)
    assert metrics.kolmogorov_smirnov(a, a + 5) == (1, pytest.approx(0, abs=1e-9))


def test_correlations():
    x = np.random.default_rng(2).normal(size=5000)
    noise = np.random.default_rng(3).normal(size=5000)
    matrix = metrics.correlations({"x": x, "-x": -x, "half": x + np.sqrt(3) * noise, "constant": np.full(5000, 0.1)})
    np.testing.assert_allclose(matrix[:2, :2], [[1, -1], [-1, 1]])
    assert matrix[0, 2] == pytest.approx(0.5, abs=0.03)
    assert not matrix[3].any()


def test_energy_bins_hold_what_is_near_their_centers():
    energies = np.linspace(10, 100, 500)
    bins = validate.energy_bins(energies)
    assert list(bins) == ["all energies", "20 GeV", "40 GeV", "60 GeV", "80 GeV"]
    assert len(bins["all energies"]) == 500
    assert np.abs(energies[bins["40 GeV"]] - 40).max() <= 5
    assert list(validate.energy_bins(energies, centers=[50, 300])) == ["all energies", "50 GeV"]
    assert "500 GeV" in validate.energy_bins(np.linspace(10, 500, 5000))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    reference = gaussian(120, seed=4)
    other = gaussian(120, mean=(3.0, 3.0, 3.4), width=1.2, seed=4)
    losses = [{"epoch": str(i // 2), "step": str(i % 2), "d_loss": "1.5", "g_loss": "2"} for i in range(4)]
    judged = [{"real": np.linspace(0, 1, 120), "energy ratio": np.linspace(0.5, 1.5, 120) + d} for d in (0, 0.1)]
    merits = validate.validate(
        reference, other, out, centers=[30, 70], half_width=15, judged=judged, losses=losses, title="A < B"
    )
    return out, reference, other, merits


@pytest.mark.soak
def test_report_shows_every_figure_with_its_numbers(report):
    out, *_ = report
    page = (out / "report.html").read_text()
    figures_found = {path.name for path in out.glob("*.png")}
    for name in ("profiles", "moments", "calorimeter", "spectrum"):
        for energy_bin in ("all_energies", "30_GeV", "70_GeV"):
            assert f"{name}_{energy_bin}.png" in figures_found
    whole = ("displays", "response", "correlations", "figure_of_merit", "discriminator", "losses")
    assert {f"{name}.png" for name in whole} < figures_found
    for name in figures_found:
        assert f"src='{name}'" in page
        with (out / name).with_suffix(".csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows, name
    assert "A &lt; B" in page
    assert "P + Q" in page


@pytest.mark.soak
def test_tables_hold_what_the_measures_return(report):
    out, reference, other, merits = report
    with (out / "figure_of_merit.csv").open(newline="") as file:
        rows = {row["bin"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["all energies", "30 GeV", "70 GeV", "mean of energy bins"]
    expected = metrics.figure_of_merit(reference.images, other.images)
    assert merits["all energies"] == expected
    assert float(rows["all energies"]["total"]) == pytest.approx(expected.total, rel=1e-6)
    means = (merits["30 GeV"].d_w + merits["70 GeV"].d_w) / 2
    assert float(rows["mean of energy bins"]["d_w"]) == pytest.approx(means, rel=1e-6)
    with (out / "profiles_all_energies.csv").open(newline="") as file:
        layers = [row for row in csv.DictReader(file) if row["axis"] == "z"]
    np.testing.assert_allclose(
        [float(row["mc_gev"]) for row in layers], metrics.profiles(reference.images)[2].mean(axis=0), rtol=1e-6
    )
    with (out / "comparison.csv").open(newline="") as file:
        compared = {(row["bin"], row["quantity"]): row for row in csv.DictReader(file)}
    assert float(compared["all energies", "z, moment 1"]["ks_distance"]) == 1
    assert float(compared["30 GeV", "x, moment 1"]["chi2"]) >= 0


def test_samples_that_do_not_fit_are_refused(tmp_path):
    a = gaussian(30)
    with pytest.raises(ValueError, match="as many generated showers"):
        validate.validate(a, a.select(slice(0, 20)), tmp_path)
    with pytest.raises(ValueError, match="two showers or more"):
        validate.validate(a.select([0]), a.select([0]), tmp_path)
