"""Showers of examples/gan3d: their physics, the file that holds them, and the reader."""

import importlib.util
import json
import threading

import numpy as np
import pytest
from launch import ROOT

pytest.importorskip("scipy")
h5py = pytest.importorskip("h5py")

from examples.gan3d import data, geant4_tables, gflash, showers  # noqa: E402

# Visible share of the energy in percent, as 3DGAN fitted it to its full simulation: highest power of E / 100 GeV first.
PUBLISHED_RATIO = [0.0018, -0.023, 0.11, -0.28, 2.21]


HAS_GEANT4 = importlib.util.find_spec("geant4_pybind") is not None
GEANT4 = pytest.mark.skipif(not HAS_GEANT4, reason="Geant4 is not installed: pip install geant4-pybind xraylib")


@pytest.fixture(scope="module")
def images():
    """Showers of one energy each, drawn once: energy -> (n, 25, 25, 25)."""
    rng = np.random.default_rng(3)
    return {e: gflash.generate(rng, np.full(n, float(e))) for e, n in ((10, 600), (50, 300), (100, 200))}


def write(path, *options, events=230, size=13):
    arguments = ["--events", events, "--size", size, "--out", path, "--block", 50, *options]
    showers.write_file(showers.arguments([str(a) for a in arguments]))
    return path


def profiles(name):
    return json.loads((ROOT / f"examples/gan3d/reference/{name}.json").read_text())["profiles"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("showers") / "showers.h5")


# The parametrisation


def test_effective_media():
    front, rear = gflash.FRONT, gflash.medium(4.8)
    assert [front.X0_mm, front.critical_energy, front.moliere_mm] == pytest.approx([8.10, 8.22, 20.9], rel=2e-3)
    assert [front.sampling, front.depth, front.visible] == pytest.approx([1.448, 0.6905, 0.02482], rel=1e-3)
    assert [rear.X0_mm, rear.moliere_mm, rear.depth, rear.visible] == pytest.approx(
        [5.81, 15.2, 1.3758, 0.01263], rel=2e-3
    )
    assert gflash.EDGES[-1] == pytest.approx(22.74, abs=0.01)


def test_depth_of_the_maximum():
    assert gflash.homogeneous_maximum([1, 10, 100]) == pytest.approx([3.97, 6.28, 8.58], abs=0.01)
    # Review of Particle Physics: t_max = ln y - 0.5 for electrons. The two formulas differ by a known third of an X0.
    log_y = np.log(1e3 * np.array([1, 10, 100]) / gflash.TUNGSTEN.critical_energy)
    assert gflash.homogeneous_maximum([1, 10, 100]) == pytest.approx(log_y - 0.5, abs=0.4)
    typical, _ = gflash.shapes(np.array([10.0, 100.0]), np.zeros((2, 2)))
    assert typical[1] - typical[0] == pytest.approx(np.log(10), rel=1e-6)


def test_maximum_and_shape_fluctuate_together():
    rng = np.random.default_rng(0)
    energies = np.full(40_000, 50.0)
    T, alpha = gflash.shapes(energies, rng.standard_normal((2, len(energies))))
    mean_T, mean_alpha, sigma_T, sigma_alpha, correlation = (v[0] for v in gflash.shape_means(energies))
    assert np.log(T).mean() == pytest.approx(mean_T, abs=0.005)
    assert np.log(alpha).mean() == pytest.approx(mean_alpha, abs=0.005)
    assert np.log(T).std() == pytest.approx(sigma_T, rel=0.02)
    assert np.log(alpha).std() == pytest.approx(sigma_alpha, rel=0.02)
    assert np.corrcoef(np.log(T), np.log(alpha))[0, 1] == pytest.approx(correlation, abs=0.015)


def test_sampling_fluctuation_falls_with_the_root_of_the_energy():
    rng = np.random.default_rng(0)
    for energy in (1.0, 10.0, 100.0):
        deposits = np.zeros((20_000, gflash.LAYERS))
        deposits[:, 2:7] = energy / 5  # front layers only
        seen = gflash.visible_energies(rng, deposits).sum(1)
        assert seen.mean() == pytest.approx(0.02482 * energy, rel=6e-3)
        assert seen.std() / seen.mean() == pytest.approx(0.165 / np.sqrt(energy), rel=0.03)


def expected(energy, half_width_mm):
    """Mean visible energy per layer within a square, by quadrature: no random number, no spot, no cell.

    Integrates over the two normals that shape a shower (Gauss-Hermite) and over the angle (midpoints).
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    normals = np.stack(np.meshgrid(nodes, nodes)).reshape(2, -1)
    weight = np.outer(weights, weights).ravel() / weights.sum() ** 2
    energies = np.full(len(weight), float(energy))
    T, alpha = gflash.shapes(energies, normals)
    core, tail, share = gflash.radial(energies, T, alpha)
    angles = (np.arange(40) + 0.5) / 40 * np.pi / 4
    inside = 0
    for r in half_width_mm / gflash.FRONT.moliere_mm / np.cos(angles):
        inside = inside + (share * r**2 / (r**2 + core**2) + (1 - share) * r**2 / (r**2 + tail**2)) / len(angles)
    return energy * gflash.VISIBLE * (weight[:, None] * gflash.layer_shares(T, alpha) * inside).sum(0)


@pytest.mark.parametrize("energy", [10, 50, 100])
@pytest.mark.parametrize("cells", [1, 5, 13, 25])
def test_profile_in_depth_and_containment(images, energy, cells):
    middle = slice(12 - cells // 2, 13 + cells // 2)
    layers = images[energy][:, middle, middle].sum((1, 2))
    wanted = expected(energy, cells / 2 * 5.1)
    error = layers.std(0) / np.sqrt(len(layers))
    assert np.all(np.abs(layers.mean(0) - wanted) < 4.5 * error + 1e-3 * wanted)
    total, error = layers.sum(1), layers.sum(1).std() / np.sqrt(len(layers))
    assert total.mean() == pytest.approx(wanted.sum(), abs=4 * error)
    assert error < 0.005 * wanted.sum() * (3 if cells == 1 else 1)  # else this test could not fail


def test_cells_hold_what_the_layers_saw(monkeypatch):
    """Event by event: nothing is lost on the way into the cells but what leaves the window."""
    seen, draw = [], gflash.visible_energies

    def note(*args):
        seen.append(draw(*args))
        return seen[-1]

    monkeypatch.setattr(gflash, "visible_energies", note)
    energies = np.full(128, 50.0)
    images = gflash.generate(np.random.default_rng(0), energies)
    inside, seen = images.sum((1, 2), dtype=np.float64), np.concatenate(seen)
    assert np.all(inside < seen * (1 + 1e-5) + 1e-12)
    wanted = expected(50, 12.5 * 5.1).sum() / expected(50, 1e6).sum()
    assert inside.sum() / seen.sum() == pytest.approx(wanted, abs=1e-3)


def test_response_is_near_the_published_one(images):
    """Untuned: within 5%, and falling with the energy as it does."""
    ratio = {e: 100 * x.sum((1, 2, 3)).mean() / e for e, x in images.items()}
    for energy, value in ratio.items():
        assert value == pytest.approx(np.polyval(PUBLISHED_RATIO, energy / 100), rel=0.05)
    assert ratio[100] / ratio[10] == pytest.approx(2.02 / 2.18, abs=0.02)


def test_fluctuations(images):
    sums = {e: x.sum((1, 2, 3)) for e, x in images.items()}
    assert sums[10].std() / sums[10].mean() == pytest.approx(0.067, abs=0.008)
    assert sums[50].std() / sums[50].mean() == pytest.approx(0.05, abs=0.008)


@pytest.mark.parametrize("energy", [10, 50, 100])
def test_showers_are_as_in_geant4_but_for_what_is_known(images, energy):
    """Against the stored profiles of a full simulation: depth and hits agree, GFlash is narrower and 16% brighter."""
    reference = next(p for p in profiles("geant4_25") if p["energy_GeV"] == energy)
    visible = reference["visible_GeV"]
    sums = images[energy].sum(0, dtype=np.float64) / len(images[energy])
    depth, wanted = sums.sum((0, 1)) / sums.sum(), np.array(reference["z"]) / visible
    assert abs(depth.argmax() - wanted.argmax()) <= 1
    assert np.arange(25) @ depth == pytest.approx(np.arange(25) @ wanted, abs=0.6)
    assert np.abs(depth - wanted).sum() < 0.09
    hits = (images[energy] > 1e-4).sum((1, 2, 3)).mean()
    assert hits == pytest.approx(reference["hits"], rel=0.05)
    assert sums.sum() / visible == pytest.approx(1.16, abs=0.03)
    central_row = sums[12].sum() / sums.sum(), reference["x"][12] / visible
    assert central_row == pytest.approx([0.576, 0.505], abs=0.015)


def test_showers_are_centred_and_round(images):
    x, y = images[50].sum((2, 3)), images[50].sum((1, 3))
    index = np.arange(25)
    for profile in (x, y):
        mean = (profile * index).sum(1) / profile.sum(1)
        assert mean.mean() == pytest.approx(12, abs=4 * mean.std() / np.sqrt(len(mean)))
    assert x.mean(0) == pytest.approx(y.mean(0), rel=0.1, abs=1e-3)


def test_mini_showers_are_the_same_ones_on_a_coarser_grid():
    energies = np.linspace(10, 100, 64)
    fine = gflash.generate(np.random.default_rng(7), energies, 25).sum((1, 2))
    mini = gflash.generate(np.random.default_rng(7), energies, 13)
    assert mini.shape == (64, 13, 13, 13)
    pairs = np.concatenate([fine[:, 0:24:2] + fine[:, 1:24:2], fine[:, 24:]], axis=1)
    assert mini.sum((1, 2)) == pytest.approx(pairs, rel=0.05, abs=2e-3)  # the window is 5 mm wider


def test_a_seed_gives_the_same_showers():
    energies = np.array([10.0, 20.0, 30.0])
    one, two, other = (gflash.generate(np.random.default_rng(s), energies, 13) for s in (1, 1, 2))
    assert one.dtype == np.float32
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize(("energies", "size"), [([0.5], 25), ([[10.0]], 25), ([np.nan], 13), ([10.0], 14)])
def test_generate_refuses(energies, size):
    with pytest.raises(ValueError, match=r"Expected .* Received: "):
        gflash.generate(np.random.default_rng(0), energies, size)


# The file


def test_file_says_what_it_holds(path):
    with h5py.File(path) as file:
        assert file["ECAL"].shape == (230, 13, 13, 13)
        assert file["ECAL"].dtype == file["target"].dtype == np.float32
        particle, energy = file["target"][:].T
        assert set(particle) == {11}
        assert 10 <= energy.min() < 15
        assert 95 < energy.max() <= 100
        assert len(np.unique(energy)) == 230  # no block repeats another
        np.testing.assert_allclose(file["visible"][:], file["ECAL"][:].sum((1, 2, 3)), rtol=1e-5)
        assert file.attrs["source"] == "gflash"
        assert "not a full simulation" in file.attrs["label"]
        assert (file.attrs["seed"], file.attrs["size"], file.attrs["lowest_energy_GeV"]) == (1, 13, 10)
        assert "GeV" in file["ECAL"].attrs["description"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.mpi
def test_two_ranks_write_the_same_file_and_profiles(run_ranks, path, tmp_path):
    command = ["-m", "examples.gan3d.showers", "--size", 13, "--block", 50]
    done = run_ranks(2, [*command, "--events", 230, "--out", tmp_path / "two.h5"], timeout=60)
    assert "230/230 events" in done.output
    assert (tmp_path / "two.h5").read_bytes() == path.read_bytes()

    run_ranks(2, [*command, "--events", 120, "--at", 10, 30, "--profiles", tmp_path / "two.json"], timeout=60)
    options = ["--size", "13", "--block", "50", "--events", "120", "--at", "10", "30"]
    showers.write_profiles(showers.arguments([*options, "--profiles", str(tmp_path / "one.json")]))
    assert (tmp_path / "two.json").read_bytes() == (tmp_path / "one.json").read_bytes()


@pytest.mark.mpi
def test_an_error_on_one_rank_ends_the_job(run_ranks, path):
    command = ["-m", "examples.gan3d.showers", "--size", 13, "--block", 50, "--events", 231, "--out", path]
    done = run_ranks(2, command, timeout=60, expect_failure=True)
    assert "Received: {'events': 230}" in done.output


def test_ranks_that_do_not_see_each_other_are_refused(run_ranks, tmp_path):
    command = ["-m", "examples.gan3d.showers", "--size", 13, "--events", 5, "--out", tmp_path / "x.h5"]
    environment = {"OMPI_COMM_WORLD_SIZE": "2"}
    done = run_ranks(1, command, timeout=60, mpi=False, env=environment, expect_failure=True)
    assert "started 2 ranks, which do not see each other" in done.output
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_makes_only_what_is_missing(path, tmp_path, monkeypatch):
    out, made = tmp_path / "resumed.h5", []
    generate = gflash.generate

    def interrupted(rng, energies, size):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(len(energies))
        return generate(rng, energies, size)

    monkeypatch.setattr(gflash, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(out)
    assert not out.exists()
    with pytest.raises(ValueError, match=r"other parameters.*Expected \{'seed': 2\}.*Received: \{'seed': 1\}"):
        write(out, "--seed", 2)
    made.clear()
    write(out)
    assert made == [50, 30]  # of 50, 50, 50, 50, 30
    assert out.read_bytes() == path.read_bytes()
    made.clear()
    write(out)  # complete: nothing to do
    assert not made
    with pytest.raises(ValueError, match=r"other parameters.*Received: \{'highest_energy_GeV': 100.0\}"):
        write(out, "--energies", 10, 50)
    out.write_text("notes")
    with pytest.raises(ValueError, match=r"Expected a new file.* Received: no HDF5 file"):
        write(out)
    assert out.read_text() == "notes"


@pytest.mark.skipif(HAS_GEANT4, reason="Geant4 is installed")
def test_geant4_says_what_it_needs(tmp_path):
    with pytest.raises(ImportError, match=r"pip install geant4-pybind xraylib.*Received: no geant4_pybind"):
        write(tmp_path / "x.h5", "--source", "geant4")
    assert not list(tmp_path.iterdir())


@GEANT4
def test_geant4_showers_do_not_depend_on_the_order_of_blocks(run_ranks, tmp_path):
    """In a process of its own, because Geant4 starts once per process and says so on stdout."""
    code = (
        "import numpy as np\nfrom examples.gan3d import geant4\n"
        "def draw(seed): return geant4.generate(np.random.default_rng(seed), [5.0, 10.0])\n"
        "one, two, again = draw(1), draw(2), draw(1)\n"
        "assert np.array_equal(one, again) and not np.array_equal(one, two)\n"
        "share = np.concatenate([one, two]).sum((1, 2, 3)) / [5, 10, 5, 10]\n"
        "assert 0.015 < share.min() and share.max() < 0.025, share\n"
    )
    run_ranks(1, ["-c", code], timeout=60, mpi=False)
    command = ["-m", "examples.gan3d.showers", "--source", "geant4", "--events", 3, "--energies", 2, 4, "--size", 13]
    run_ranks(1, [*command, "--out", tmp_path / "g.h5"], timeout=60, mpi=False)
    with h5py.File(tmp_path / "g.h5") as file:
        assert "tables" in file.attrs["label"]
        assert "11.4" in file.attrs["parameters"]


def test_bremsstrahlung_table_radiates_as_the_radiation_length_says():
    """An electron at high energy loses its energy E within X0: the integral of k dsigma/dk over k is E / (n X0)."""
    fractions = (np.arange(2000) + 0.5) / 2000
    for Z, mass, X0 in ((74, 183.84, 6.76), (14, 28.0855, 21.82)):
        millibarn = geant4_tables.bremsstrahlung(Z, 900.0, fractions).mean() * Z**2
        per_gram = 6.02214e23 / mass * millibarn * 1e-27
        assert per_gram * X0 == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize("options", [["--energies", "0.1", "5"], ["--energies", "9", "5"], ["--block", "0"]])
def test_command_refuses(options, capsys):
    with pytest.raises(SystemExit):
        showers.arguments(["--events", "5", "--out", "x.h5", *options])
    assert "Received: " in capsys.readouterr().err


@pytest.mark.parametrize("size", [13, 25])
def test_reference_profiles_are_what_the_command_writes(size):
    for reference in profiles(f"profiles_{size}"):
        now = showers.mean_profiles(gflash, reference["energy_GeV"], 150, size, seed=5)
        assert now.keys() == reference.keys()
        for axis in "xyz":
            error = np.array(reference[f"{axis}_std"]) / np.sqrt(150)
            assert np.all(np.abs(np.array(now[axis]) - reference[axis]) <= 5 * error + 1e-6)


@pytest.mark.parametrize("name", ["profiles_13", "profiles_25", "geant4_13", "geant4_25"])
def test_reference_profiles_are_consistent(name):
    table = profiles(name)
    assert [p["energy_GeV"] for p in table] == [10, 50, 100]
    for reference in table:
        for axis in "xyz":
            assert len(reference[axis]) == int(name[-2:])
            assert sum(reference[axis]) == pytest.approx(reference["visible_GeV"], rel=1e-4)


# The reader


def energies_of(batches):
    return np.concatenate([batch.energies[:, 0] for batch in batches])


@pytest.mark.parametrize("cache", [True, False])
def test_every_event_comes_once_per_epoch_over_all_ranks(path, cache):
    with h5py.File(path) as file:
        wanted = file["target"][:207, 1] / np.float32(100)  # 90% of 230
    readers = [data.Showers(path, 16, rank=r, size=3, cache=cache) for r in range(3)]
    assert {len(reader) for reader in readers} == {5}  # 69 events each
    orders = []
    for epoch in range(3):
        parts = [list(reader.epoch(epoch)) for reader in readers]
        assert {len(part) for part in parts} == {5}
        assert {len(batch.images) for part in parts for batch in part[:-1]} == {16}
        orders.append(np.concatenate([energies_of(part) for part in parts]))
        np.testing.assert_array_equal(np.sort(orders[-1]), np.sort(wanted))
    assert not np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[1], orders[2])
    again = data.Showers(path, 16, rank=1, size=3, cache=cache)  # goes straight to epoch 2, as after a restart
    np.testing.assert_array_equal(energies_of(again.epoch(2)), orders[2][69:138])


def test_batches_are_scaled(path):
    with h5py.File(path) as file:
        ecal, energy = file["ECAL"][207:], file["target"][207:, 1]
    batch = data.Showers(path, 8, part="test", xscale=50).all()
    assert batch.images.shape == (23, 13, 13, 13, 1)
    assert batch.images.dtype == batch.energies.dtype == batch.sums.dtype == np.float32
    np.testing.assert_allclose(batch.images[..., 0], np.where(ecal < 1e-6, 0, 50 * ecal), rtol=1e-6)
    np.testing.assert_allclose(batch.energies[:, 0], energy / 100, rtol=1e-6)
    np.testing.assert_allclose(batch.sums[:, 0], batch.images.sum((1, 2, 3, 4)), rtol=1e-5)


def test_second_epoch_reads_no_file(path, monkeypatch):
    reader = data.Showers(path, 32)
    first = energies_of(reader.epoch(0))

    def no_file(*args, **kwargs):
        raise AssertionError("a file was opened")

    monkeypatch.setattr(h5py, "File", no_file)
    second = list(reader.epoch(1))
    np.testing.assert_array_equal(np.sort(energies_of(second)), np.sort(first))
    for batch in second:  # images went with their energies
        assert batch.sums / batch.energies == pytest.approx(210 * np.ones_like(batch.sums), rel=0.35)


def test_next_batch_is_read_behind_the_current_one(path, monkeypatch):
    reader = data.Showers(path, 32)
    read, threads, second = reader._batch, [], threading.Event()

    def watched(indices):
        threads.append(threading.current_thread())
        if len(threads) == 2:
            second.set()
        return read(indices)

    monkeypatch.setattr(reader, "_batch", watched)
    batches = reader.epoch(0)
    next(batches)
    assert second.wait(10)  # though nobody has asked for it yet
    assert threading.main_thread() not in threads
    batches.close()
    assert not threads[0].is_alive()


def test_an_epoch_that_was_broken_off_is_made_up_for(path):
    reader = data.Showers(path, 32)
    next(reader.epoch(0))
    whole = data.Showers(path, 32)
    np.testing.assert_array_equal(energies_of(reader.epoch(1)), energies_of(whole.epoch(1)))


def test_an_error_while_reading_reaches_the_caller(path, monkeypatch):
    reader = data.Showers(path, 32)

    def broken(start, stop):
        raise OSError("disk on fire")

    monkeypatch.setattr(reader, "_read", broken)
    with pytest.raises(OSError, match="disk on fire"):
        list(reader.epoch(0))


def test_several_files_are_read_as_one(path, tmp_path):
    other = write(tmp_path / "other.h5", "--seed", 2, events=60)
    reader = data.Showers([path, other], 32, part="all", drop_last=True)
    assert len(reader) == 9  # 290 events
    assert len(list(reader.epoch(0))) == 9
    batch = reader.all()
    for file, part in ((path, slice(0, 230)), (other, slice(230, 290))):
        with h5py.File(file) as source:
            np.testing.assert_allclose(batch.energies[part, 0] * 100, source["target"][:, 1], rtol=1e-6)
            np.testing.assert_allclose(batch.sums[part, 0] / 100, source["visible"][:], rtol=1e-4)


def test_response_fits_the_training_showers(tmp_path):
    path = write(tmp_path / "many.h5", events=2000)
    response = data.fit_response(path)
    batch = data.Showers(path, 100).all()
    y, sums = batch.energies[:, 0], batch.sums[:, 0]
    for low in (0.1, 0.3, 0.5, 0.7, 0.9):
        inside = (y >= low) & (y < low + 0.1)
        assert response.expected_sum(y[inside]).mean() == pytest.approx(sums[inside].mean(), rel=0.012)
    assert response.ratio(0.5) == pytest.approx(np.polyval(PUBLISHED_RATIO, 0.5), rel=0.05)
    with h5py.File(path, "a") as file:
        del file["visible"]  # as in files from elsewhere
    np.testing.assert_allclose(data.fit_response(path).ratio(y), response.ratio(y), rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2, "size": 2},
        {"batch_size": 0},
        {"part": "validation"},
        {"test_fraction": 1.5},
        {"size": 500},
        {"batch_size": 300, "drop_last": True},
    ],
)
def test_reader_refuses(path, options):
    with pytest.raises(ValueError, match=r"(?i)expected .*Received: "):
        data.Showers(path, **{"batch_size": 16} | options)


def test_reader_refuses_files(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"examples\.gan3d\.showers"):
        data.Showers(tmp_path / "missing.h5", 16)
    with pytest.raises(ValueError, match=r"Expected at least one .* Received: \[\]"):
        data.Showers([], 16)
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(ValueError, match=r"Expected an HDF5 file\. Received: "):
        data.Showers(tmp_path / "text.h5", 16)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = np.zeros((3, 13, 13))
    with pytest.raises(ValueError, match=r"Expected ECAL .* Received: \{\}"):
        data.Showers(tmp_path / "other.h5", 16)
    large = write(tmp_path / "large.h5", events=3, size=25)
    with pytest.raises(ValueError, match=r"one shape. Received: "):
        data.Showers([path, large], 16)
    with pytest.raises(ValueError, match=r"five different energies. Received: 3"):
        data.fit_response(large, part="all")
