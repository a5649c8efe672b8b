"""examples.largebatch: its data, its arithmetic by hand, and one small study."""

import csv
import sys

import numpy as np
import pytest
from launch import child_environment, launch

from examples import studies
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
    assert [train.statistics_momentum(steps) for steps in (10, 20, 40, 100, 200, 1280)] == [0, 0, 0.5, 0.8, 0.9, 0.9]


def test_learning_speedup_by_hand():
    losses = [{"epoch": n, "val_loss": loss} for n, loss in enumerate([0.5, 0.15, 0.1], 1)]
    assert [studies.epochs_to(losses, target) for target in (0.5, 0.2, 0.15, 0.05)] == [1, 2, 2, None]
    # Epochs of half the time, 2 of them instead of 2.5.
    assert studies.learning_speedup([(6, 2), (6, 3)], [(3, 2), (3, 2)]) == pytest.approx(6 * 2.5 / (3 * 2))
    assert studies.learning_speedup([(6, 2)], [(3, None)]) is None, "one seed did not get there"


def _history(losses):
    return [{"epoch": n, "val_loss": loss, "val_accuracy": 1 - loss} for n, loss in enumerate(losses, 1)]


def test_summary_by_hand():
    found = {
        study.Run("sgd", 1, 64, 2, 1): _history([0.5, 0.1]),
        study.Run("sgd", 1, 64, 2, 2): _history([0.5, 0.2]),
        study.Run("sgd", 2, 4096, 2, 1): _history([0.5, 0.4]),
        study.Run("sgd", 2, 4096, 3, 1): _history([0.5, 0.4, 0.3]),
        study.Run("lars", 1, 64, 2, 1): _history([0.5, 0.2]),
        study.Run("lars", 2, 4096, 2, 1): _history([0.5, 0.3]),
        study.Run("lars", 2, 4096, 3, 1): _history([0.5, 0.3, 0.2]),
    }
    table = study.summarize(found)
    small, large, longer, *_ = table
    assert (small["accuracy"], small["loss"], small["steps"]) == (pytest.approx(0.85), pytest.approx(0.15), 256)
    assert small["accuracy spread"] == pytest.approx(np.std([0.8, 0.9], ddof=1))
    assert (large["steps"], longer["steps"], longer["accuracy"]) == (4, 6, pytest.approx(0.7))
    assert study.markdown(table).splitlines()[2:] == [
        "| 64 | 2 | 256 | 85.0 ± 7.1 % | 80.0 ± 0.0 % |",
        "| 4,096 | 2 | 4 | 60.0 ± 0.0 % | 70.0 ± 0.0 % |",
        "| 4,096 | 3 | 6 | 70.0 ± 0.0 % | 80.0 ± 0.0 % |",
    ]


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
    assert [(line["optimizer"], line["batch"], line["epochs"]) for line in lines] == [
        (optimizer, batch, epochs)
        for optimizer in ("sgd", "lars")
        for batch, epochs in (("64", "1"), ("1024", "1"), ("4096", "1"), ("4096", "5"))
    ]
    for name in ("accuracy.png", "loss.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "does not show" in (tmp_path / "study.html").read_text()
