"""examples.mesh: its meshes by hand, and trainings on one rank and on two that end alike."""

import json
import re
import sys

import forks
import numpy as np
import pytest
from launch import ROOT, child_environment, launch

from benchmarks.hosts import Hosts, HostsError
from examples.mesh import meshes, study

SMALL = ["--size", "32", "--count", "8", "--epochs", "2", "--seed", "3"]


def test_corners_of_cells_by_hand():
    square = np.stack(np.meshgrid(np.arange(2.0), np.arange(2.0), indexing="ij"))
    np.testing.assert_array_equal(meshes.corners(square), np.ones((4, 1, 1)))
    folded = square.copy()
    folded[:, 1, 1] = -0.5, -0.5  # behind the diagonal
    assert meshes.corners(folded)[2] < 0
    assert meshes.corners(folded)[0] > 0
    assert meshes.corners(square[:, ::-1]).max() < 0, "all of it is turned over"


def test_a_flow_that_turns_or_shears_the_mesh_alike_everywhere_tangles_nothing():
    velocity = np.zeros((2, 17, 17))
    velocity[0] = 0.3
    start = np.stack(np.meshgrid(np.arange(17.0), np.arange(17.0), indexing="ij"))
    places, speed = meshes.carried(start, velocity, 2.0)
    np.testing.assert_allclose(places[0], start[0] + 0.6)
    np.testing.assert_array_equal(places[1], start[1])
    np.testing.assert_allclose(speed[0], 0.3)
    np.testing.assert_allclose(meshes.corners(places), 1)


def test_images_and_targets():
    image, target, guess = meshes.sample(48, 0)
    assert image.shape == (48, 48, meshes.CHANNELS)
    assert image.dtype == np.float32
    assert np.isfinite(image).all()
    assert 0.01 < target.mean() < 0.5
    assert 0.2 < meshes.iou(guess, target) < 0.9, "velocities tell something, and not all"
    np.testing.assert_array_equal(meshes.sample(48, 0)[0], image)
    cells = np.zeros((1, 4, 4, 1), bool)
    cells[0, 1, 2] = True
    np.testing.assert_array_equal(meshes.patches(cells, 2)[0, ..., 0], [[False, True], [False, False]])


@pytest.mark.mpi
@pytest.mark.parametrize("network", ["stack", pytest.param("unet", marks=pytest.mark.soak)])
def test_two_ranks_learn_what_one_learns(network, tmp_path):
    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        words = [*SMALL, "--network", network, "--parts", str(ranks), "--data", tmp_path / "data", "--out", out]
        command = [*forks.python("torch"), "-m", "examples.mesh.train", *map(str, words)]
        done = launch(ranks, command, timeout=240, env=child_environment("torch", lean=True), mpi=ranks > 1, cwd=ROOT)
        assert done.returncode == 0, done.output
        found.append((json.loads((out / "summary.json").read_text()), np.load(out / "answers.npz")["answers"]))
    (one, answers), (two, same) = found
    assert (one["ranks"], two["ranks"]) == (1, 2)
    np.testing.assert_allclose(same, answers, rtol=0, atol=2e-3)
    for name in ("loss", "accuracy", "iou"):
        assert two[name] == pytest.approx(one[name], abs=5e-3)


def test_summary_by_hand():
    runs = [
        {"network": "stack", "parts": [2], "ranks": 2, "iou": iou, "accuracy": 0.9, "seconds of a step": s, "MiB": 7}
        for iou, s in ((0.5, 1), (0.7, 3), (0.6, 2))
    ]
    (line,) = study.summarize(runs)
    assert (line["ranks"], line["seeds"]) == (2, 3)
    assert line["iou"] == pytest.approx(0.6)
    assert line["iou spread"] == pytest.approx(0.1)
    assert line["seconds of a step"] == 2


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_study(tmp_path):
    words = ["--seeds", "1", "--epochs", "1", "--size", "48", "--count", "8", "--parts", "1", "2", "--out", tmp_path]
    command = [sys.executable, "-m", "examples.mesh.study", *map(str, words)]
    done = launch(1, command, timeout=600, env=child_environment("torch"), mpi=False, cwd=ROOT)
    assert done.returncode == 0, done.output
    assert [line.split(",")[:2] for line in (tmp_path / "summary.csv").read_text().splitlines()[1:]] == [
        ["stack", "1"], ["stack", "2"], ["unet", "1"], ["unet", "2"]
    ]  # fmt: skip
    assert (tmp_path / "answers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
@pytest.mark.mpi
def test_what_does_not_fit_one_rank_fits_two():
    """A step on an image of 2048 x 2048 needs about 2.7 GiB; no rank may take more than 2 GiB."""
    for ranks in (1, 2):
        words = ["--size", "2048", "--steps", "1", "--limit-mib", "2048", "--parts", str(ranks)]
        command = [sys.executable, "-m", "benchmarks.parts", *words]
        done = launch(ranks, command, timeout=600, env=child_environment("torch"), mpi=ranks > 1, cwd=ROOT)
        if ranks == 1:
            assert done.returncode != 0
            assert re.search(r"not enough memory|MemoryError|allocate", done.output), done.output
        else:
            assert done.returncode == 0, done.output
            assert done.output.count("s a step") == 2


@pytest.mark.soak
@pytest.mark.mpi
def test_a_step_on_four_hosts(tmp_path):
    try:
        with Hosts(1):
            pass
    except HostsError as error:
        pytest.skip(str(error))
    words = "--size 128 --steps 1 --parts 2 2 --hosts 4 --mbit 1000".split()
    command = [sys.executable, "-m", "benchmarks.parts", *words]
    done = launch(1, command, timeout=280, env=child_environment("torch"), mpi=False, cwd=ROOT)
    assert done.returncode == 0, done.output
    assert "4 ranks on 4 nodes" in done.output
    assert len(re.findall(r"parts \[2, 2\], rank [0-3]: .* s a step", done.output)) == 4, done.output
