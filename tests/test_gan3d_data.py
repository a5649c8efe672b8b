"""Showers of examples/gan3d on disk: the file that holds them, and the reader."""

import importlib.util
import threading

import numpy as np
import pytest

pytest.importorskip("scipy")
h5py = pytest.importorskip("h5py")

from examples.gan3d import data, gflash, showers  # noqa: E402

# Visible share of the energy in percent, as 3DGAN fitted it to its full simulation: highest power of E / 100 GeV first.
PUBLISHED_RATIO = [0.0018, -0.023, 0.11, -0.28, 2.21]


HAS_GEANT4 = importlib.util.find_spec("geant4_pybind") is not None
GEANT4 = pytest.mark.skipif(not HAS_GEANT4, reason="Geant4 is not installed: pip install geant4-pybind xraylib")


def write(path, *options, events=230, size=13):
    arguments = ["--events", events, "--size", size, "--out", path, "--block", 50, *options]
    showers.write_file(showers.arguments([str(a) for a in arguments]))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("showers") / "showers.h5")


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


def test_file_of_photons_says_so(tmp_path):
    photons = write(tmp_path / "photons.h5", "--particle", "photon", events=20)
    with h5py.File(photons) as file:
        assert set(file["target"][:, 0]) == {22}
        assert file.attrs["particle"] == "photon"
        assert "photon, normal to the layers" in file.attrs["parameters"]
    with pytest.raises(ValueError, match=r"other parameters.*'particle': 'electron'.*Received: .*'particle': 'photon'"):
        write(photons, events=20)


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

    def interrupted(rng, energies, *how):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(len(energies))
        return generate(rng, energies, *how)

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


@pytest.mark.parametrize("options", [["--energies", "0.1", "5"], ["--energies", "9", "5"], ["--block", "0"]])
def test_command_refuses(options, capsys):
    with pytest.raises(SystemExit):
        showers.arguments(["--events", "5", "--out", "x.h5", *options])
    assert "Received: " in capsys.readouterr().err


# The reader


def energies_of(batches):
    return np.concatenate([batch.energies[:, 0] for batch in batches])


def test_no_event_comes_twice_in_an_epoch_of_all_ranks(path):
    with h5py.File(path) as file:
        known = file["target"][:207, 1] / np.float32(100)  # 90% of 230
    readers = [data.Showers(path, 16, rank=r, size=3) for r in range(3)]
    assert {len(reader) for reader in readers} == {4}  # of 12 whole batches
    orders = []
    for epoch in range(3):
        parts = [list(reader.epoch(epoch)) for reader in readers]
        assert {len(part) for part in parts} == {4}
        assert {batch.images.shape for part in parts for batch in part} == {(16, 13, 13, 13, 1)}
        orders.append(np.concatenate([energies_of(part) for part in parts]))
        assert len(set(orders[-1])) == 192
        assert set(orders[-1]) <= set(known)
    assert len(set(np.concatenate(orders))) > 200, "what an epoch leaves out, another one has"
    again = data.Showers(path, 16, rank=1, size=3)  # goes straight to epoch 2, as after a restart
    np.testing.assert_array_equal(energies_of(again.epoch(2)), orders[2][64:128])
    assert list(energies_of(data.Showers(path, 16, size=3, seed=1).epoch(2))) != list(orders[2][:64])


def test_batches_are_scaled(path):
    with h5py.File(path) as file:
        ecal, energy = file["ECAL"][207:], file["target"][207:, 1]
    batch = data.read(path, part="test")
    assert batch.images.shape == (23, 13, 13, 13, 1)
    assert batch.images.dtype == batch.energies.dtype == batch.sums.dtype == np.float32
    np.testing.assert_allclose(batch.images[..., 0], np.where(ecal < 1e-6, 0, 100 * ecal), rtol=1e-6)
    np.testing.assert_allclose(batch.energies[:, 0], energy / 100, rtol=1e-6)
    np.testing.assert_allclose(batch.sums[:, 0], batch.images.sum((1, 2, 3, 4)), rtol=1e-5)
    for mixed in data.Showers(path, 32).epoch(0):  # images went with their energies
        assert mixed.sums / mixed.energies == pytest.approx(210 * np.ones_like(mixed.sums), rel=0.35)


def test_next_batch_is_read_behind_the_current_one(path, monkeypatch):
    reader = data.Showers(path, 32)
    read, threads, second = reader._batch, [], threading.Event()

    def watched(step):
        threads.append(threading.current_thread())
        if len(threads) == 2:
            second.set()
        return read(step)

    monkeypatch.setattr(reader, "_batch", watched)
    batches = reader.epoch(0)
    next(batches)
    assert second.wait(10)  # though nobody has asked for it yet
    assert threading.main_thread() not in threads
    batches.close()
    assert not threads[0].is_alive()


def test_an_error_while_reading_reaches_the_caller(path, monkeypatch):
    reader = data.Showers(path, 32)

    def broken(step):
        raise OSError("disk on fire")

    monkeypatch.setattr(reader, "_batch", broken)
    with pytest.raises(OSError, match="disk on fire"):
        list(reader.epoch(0))


def test_several_files_are_read_as_one(path, tmp_path):
    other = write(tmp_path / "other.h5", "--seed", 2, events=60)
    reader = data.Showers([path, other], 32, part="all")
    assert len(reader) == 9  # 290 events
    assert len(list(reader.epoch(0))) == 9
    batch = data.read([path, other])
    for file, part in ((path, slice(0, 230)), (other, slice(230, 290))):
        with h5py.File(file) as source:
            np.testing.assert_allclose(batch.energies[part, 0] * 100, source["target"][:, 1], rtol=1e-6)
            np.testing.assert_allclose(batch.sums[part, 0] / 100, source["visible"][:], rtol=1e-4)


def test_response_fits_the_training_showers(tmp_path):
    path = write(tmp_path / "many.h5", events=2000)
    response = data.fit_response(path)
    batch = data.read(path, part="train")
    y, sums = batch.energies[:, 0], batch.sums[:, 0]
    for low in (0.1, 0.3, 0.5, 0.7, 0.9):
        inside = (y >= low) & (y < low + 0.1)
        assert response.expected_sum(y[inside]).mean() == pytest.approx(sums[inside].mean(), rel=0.012)
    assert response.ratio(0.5) == pytest.approx(np.polyval(PUBLISHED_RATIO, 0.5), rel=0.05)
    assert (response.lowest, response.highest) == pytest.approx((y.min(), y.max()))
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
        {"batch_size": 300},
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
    with h5py.File(tmp_path / "empty.h5", "w") as file:
        file["ECAL"], file["target"] = np.zeros((4, 13, 13, 13)), np.ones((4, 2))
    with pytest.raises(ValueError, match=r"showers with energy in them. Received: .*empty.h5"):
        next(data.Showers(tmp_path / "empty.h5", 2).epoch(0))
    large = write(tmp_path / "large.h5", events=3, size=25)
    with pytest.raises(ValueError, match=r"one shape. Received: "):
        data.Showers([path, large], 16)
    with pytest.raises(ValueError, match=r"five different energies. Received: 3"):
        data.fit_response(large, part="all")
