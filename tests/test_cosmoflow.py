"""examples.cosmoflow: its physics against other formulas, and what migrate makes of Horovod's script."""

import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT, child_environment, launch

from examples import studies
from examples.cosmoflow import boxes, study, train
from keras_hpc.tools.migrate.rules import migrate

MIDDLE = [sum(both) / 2 for both in boxes.RANGES.values()]


def test_spectrum_has_its_sigma_and_its_slope():
    k = np.geomspace(1e-4, 50, 20001)
    for omega_m, sigma_8, n_s, h_0 in ((0.2, 0.6, 0.8, 55), (0.4, 1.0, 1.1, 85)):
        power = boxes.spectrum(k, omega_m, sigma_8, n_s, h_0)
        x = 8 * k
        inside = power * k**2 * (3 * (np.sin(x) - x * np.cos(x)) / x**3) ** 2 / (2 * np.pi**2)
        assert np.sqrt(np.trapezoid(inside, k)) == pytest.approx(sigma_8, rel=2e-3)
        assert np.log(power[1] / power[0]) / np.log(k[1] / k[0]) == pytest.approx(n_s, abs=0.02)
    assert boxes.spectrum(np.zeros(1), *MIDDLE) == 0


def test_growth_solves_its_equation():
    """D'' + (3/a + H'/H) D' = 3/2 omega_m D / (a^5 H^2), whose growing solution is H times the integral of 1/(aH)^3."""
    for omega_m in (0.2, 0.3, 0.4):
        a = np.linspace(1e-4, 1, 200001)
        hubble = np.sqrt(omega_m / a**3 + 1 - omega_m)
        inside = (a * hubble) ** -3.0
        solution = hubble * np.concatenate([[0], np.cumsum((inside[1:] + inside[:-1]) / 2 * np.diff(a))])
        for z in boxes.REDSHIFTS:
            exact = np.interp(1 / (1 + z), a, solution) / solution[-1]
            assert boxes.growth(z, omega_m) == pytest.approx(exact, rel=0.01)


def test_fields_have_the_spectrum_that_was_asked_for():
    def power(k):
        return boxes.spectrum(k, *MIDDLE)

    rng = np.random.default_rng(0)
    fields = np.stack([boxes.gaussian(power, rng) for _ in range(20)])
    volume = (boxes.SIZE * boxes.CELL) ** 3
    found = (np.abs(np.fft.fftn(fields, axes=(1, 2, 3)) * boxes.CELL**3) ** 2 / volume).mean(axis=0)
    axis = 2 * np.pi * np.fft.fftfreq(boxes.SIZE, boxes.CELL)
    k = np.sqrt(sum(part**2 for part in np.meshgrid(axis, axis, axis)))
    for low, high in ((0.1, 0.2), (0.3, 0.5), (0.6, 0.78)):
        ring = (k > low) & (k < high)
        # Half of the modes are free, each of an exponential distribution.
        expected = 1 + 4 / np.sqrt(20 * ring.sum() / 2) * np.array([-1, 1])
        assert expected[0] < (found[ring] / power(k[ring])).mean() < expected[1]
    box = boxes.simulate(MIDDLE, rng)
    assert (box.shape, box.dtype) == ((32, 32, 32, 4), np.int16)
    assert box.mean() == pytest.approx(boxes.PARTICLES, rel=0.05)
    assert np.all(np.diff(box.std(axis=(0, 1, 2))) > 1), "matter clumps more and more"


def test_power_spectra_of_waves():
    x = np.arange(32) / 32
    wave = np.cos(2 * np.pi * 7 * x)[:, None, None, None] + np.zeros((2, 32, 32, 32, 4))
    found = study.spectra(wave * [1, 2, 4, 8] + np.random.default_rng(0).normal(0, 1e-3, (2, 32, 32, 32, 4)))
    assert found.shape == (2, 44)
    shells = found.reshape(2, 11, 4)
    assert np.all(shells.argmax(axis=1) == 4)  # from 6.5 to 8
    np.testing.assert_allclose(np.diff(shells[:, 4]), np.log(4), atol=1e-3)


def test_rates_and_quality_by_hand():
    assert [train.rate(epoch, 8.0, 16) for epoch in (0, 1, 7, 8, 11, 12)] == [4, 8, 8, 2, 2, 1]
    low, high = zip(*boxes.RANGES.values(), strict=True)
    np.testing.assert_allclose(boxes.scaled([low, high, MIDDLE]), [[-1] * 4, [1] * 4, [0] * 4], atol=1e-6)
    found = train.quality(np.zeros((3, 4)), np.array([[0.1, 0, 0, 0.4]] * 3) * [[1], [-1], [1]])
    assert (found["Omega_m"], found["sigma_8"], found["mae"]) == (pytest.approx(0.1), 0, pytest.approx(0.125))


def test_boxes_are_moved_turned_and_mirrored_and_nothing_else():
    x = np.arange(2 * 32**3 * 4, dtype="float32").reshape(2, 32, 32, 32, 4)
    seen = set()
    for number in range(60):
        y = np.full((2, 4), number, "float32")
        moved, same = boxes.turned(x, y)
        assert same is y
        np.testing.assert_array_equal(np.sort(moved.ravel()), x.ravel())
        first = moved.reshape(2, -1, 4)
        np.testing.assert_array_equal(first[1] - first[0], 4 * 32**3)  # all of a batch alike
        np.testing.assert_array_equal(first - first[..., :1], np.broadcast_to(np.arange(4), first.shape))
        steps = [round(float(np.median(np.diff(moved[0, ..., 0], axis=axis)))) for axis in range(3)]
        assert sorted(map(abs, steps)) == [4, 4 * 32, 4 * 32**2], "neighbours stay neighbours"
        seen.add(tuple(steps))
        np.testing.assert_array_equal(boxes.turned(x, y)[0], moved)
    assert len(seen) > 25, "of 48"


def test_summary_and_page_by_hand(tmp_path, monkeypatch):
    found = {studies.Run(1, 1): {"mae": 1.0}, studies.Run(1, 2): {"mae": 2.0}, studies.Run(2, 1): {"mae": 3.0}}
    table = studies.summarize(found)
    assert table[0] == {"ranks": 1, "mae": 1.5, "mae spread": pytest.approx(0.5**0.5)}
    assert (table[1]["mae"], table[1]["mae spread"]) == (3, 0)
    text = studies.markdown(table, {"mae": "error"})
    assert text == "| ranks | error |\n|---:|---:|\n| 1 | 1.500 ± 0.707 |\n| 2 | 3.000 ± 0.000 |\n"
    for folder in ("examples/x", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    page = tmp_path / "examples" / "x" / "README.md"
    page.write_text(f"before\n{studies.BEGIN}old\n{studies.END}\nafter\n")
    (tmp_path / "a.png").write_text("picture")
    monkeypatch.setattr(studies, "__file__", str(tmp_path / "examples" / "studies.py"))
    studies.publish("x", tmp_path, text, ["a.png"])
    assert page.read_text() == f"before\n{studies.BEGIN}{text}{studies.END}\nafter\n"
    assert (tmp_path / "docs" / "x" / "a.png").read_text() == "picture"


def test_what_migrate_makes_of_horovods_script():
    script = "examples/cosmoflow/horovod.txt"
    command = [sys.executable, "-m", "keras_hpc", "migrate", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    page = (ROOT / "examples" / "cosmoflow" / "README.md").read_text()
    assert f"```diff\n{done.stdout}```" in page, f"the page shows what the command prints: {' '.join(command[1:])}"
    after, marks = migrate((ROOT / script).read_bytes(), script)
    assert marks == [], "nothing is left to look at"
    assert b"hvd" not in after
    gone = [line for line in done.stdout.splitlines() if line.startswith("-") and not line.startswith("---")]
    new = [line for line in done.stdout.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert len(gone) > len(new)


@pytest.mark.soak
@pytest.mark.mpi
def test_the_migrated_script_and_a_small_study(tmp_path):
    words = f"--out {tmp_path} --seeds 1 --epochs 2 --boxes 64".split()
    command = [sys.executable, "-m", "examples.cosmoflow.study", *words]
    done = launch(1, command, timeout=280, env=child_environment("tensorflow"), mpi=False)
    assert done.returncode == 0, done.output
    for name in ("summary.csv", "table.md", "answers.png", "answers.csv"):
        assert (tmp_path / name).stat().st_size > 100
    assert "| ranks | mean absolute error | Omega_m |" in done.output
    assert "linear regression on power spectra: mae 0." in done.output
    after, _ = migrate((ROOT / "examples" / "cosmoflow" / "horovod.txt").read_bytes(), "train.py")
    script = tmp_path / "train.py"
    check = "import keras_hpc\nkeras_hpc.check_replicas(model)\nprint('rank', keras_hpc.rank(), 'agrees')\n"
    script.write_bytes(after + check.encode())
    env = child_environment("tensorflow", {"EPOCHS": "2", "PYTHONPATH": str(ROOT)})
    done = launch(2, [sys.executable, script, tmp_path / "boxes"], timeout=280, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert "rank 0 agrees" in done.output
    assert "rank 1 agrees" in done.output
    assert (tmp_path / "cosmoflow-002.keras").exists()
    assert len((tmp_path / "history.csv").read_text().splitlines()) == 3, "a head and two epochs, of one rank"
