"""examples.largebatch: its data, its arithmetic by hand, and one small study."""

import csv
import sys

import numpy as np
import pytest
from launch import child_environment, launch

from examples.largebatch import study, train


def test_digits_are_moved_and_nothing_else():
    image = np.zeros((1, 28, 28, 1), "float32")
    image[0, 14, 10, 0] = 1
    found = set()
    for seed in range(200):
        moved = train.moved(image, np.random.default_rng(seed))
        assert moved.shape == image.shape
        assert moved.sum() == 1
        _, y, x, _ = np.argwhere(moved)[0]
        found.add((y - 14, x - 10))
    assert found == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}
    at_the_edge = np.zeros((50, 28, 28, 1), "float32")
    at_the_edge[:, 0, 0] = 1
    assert 0 < train.moved(at_the_edge, np.random.default_rng(1)).sum() < 50, "some leave, none come back elsewhere"


def test_rates_follow_their_rules():
    assert train.rate_of("sgd", 64) == train.SGD_RATE
    assert train.rate_of("sgd", 4096) == pytest.approx(64 * train.SGD_RATE)
    assert train.rate_of("lars", 4096) == pytest.approx(8 * train.LARS_RATE)


def _history(losses, seconds=2.0):
    return [
        {"epoch": n, "seconds": seconds, "val_loss": loss, "val_accuracy": 1 - loss} for n, loss in enumerate(losses, 1)
    ]


def test_summary_by_hand():
    found = {
        study.Run("sgd", 1, 64, 1): _history([0.5, 0.15, 0.1], seconds=6),
        study.Run("sgd", 1, 64, 2): _history([0.5, 0.3, 0.1], seconds=6),
        study.Run("sgd", 2, 128, 1): _history([0.5, 0.1, 0.2], seconds=3),
        study.Run("sgd", 2, 128, 2): _history([0.5, 0.1, 0.4], seconds=3),
        study.Run("sgd", 4, 4096, 1): _history([0.5, 0.1, 0.1], seconds=1),
        study.Run("sgd", 4, 4096, 2): _history([0.5, 0.4, 0.3], seconds=1),
    }
    small, twice, large = study.summarize(found)
    assert (small["epochs to target"], small["learning speed-up"]) == (2.5, 1)
    # Epochs of half the time, 2 of them instead of 2.5.
    assert twice["learning speed-up"] == pytest.approx(6 * 2.5 / (3 * 2))
    assert (twice["accuracy"], twice["loss"]) == (pytest.approx(0.7), pytest.approx(0.3))
    assert twice["loss spread"] == pytest.approx(np.std([0.2, 0.4], ddof=1))
    assert (large["epochs to target"], large["learning speed-up"]) == (None, None), "one seed did not get there"


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_study(tmp_path):
    words = ["--seeds", "1", "--epochs", "1", "--samples", "500", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "examples.largebatch.study", *words]
    for again in (False, True):
        done = launch(1, command, timeout=900, env=child_environment("tensorflow"), mpi=False)
        assert done.returncode == 0, done.output
        assert ("seed 1" in done.output) != again, "the second time there is nothing left to train"
    with (tmp_path / "summary.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["optimizer"], line["batch"], line["ranks"]) for line in lines[:5]] == [
        ("sgd", "64", "1"),
        ("sgd", "128", "2"),
        ("sgd", "256", "4"),
        ("sgd", "1024", "4"),
        ("sgd", "4096", "4"),
    ]
    for name in ("accuracy.png", "loss.png", "speedup.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "does not show" in (tmp_path / "study.html").read_text()
