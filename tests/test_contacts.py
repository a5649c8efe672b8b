"""examples.contacts: its dynamics, its arithmetic by hand, and one small study."""

import sys

import numpy as np
import pytest
from launch import child_environment, launch

from examples.contacts import dynamics, study, train


def test_chains_fold_into_their_states():
    maps, states = dynamics.simulate(20, 12, seed=3)
    assert maps.shape == (20, 12, 28, 28)
    np.testing.assert_array_equal(maps, maps.swapaxes(2, 3))
    assert set(np.unique(states)) <= {-1, *range(len(dynamics.STATES))}
    for number, state in enumerate(dynamics.STATES[1:], 1):
        pairs = dynamics.pairs_of(state)
        np.testing.assert_array_equal(pairs, pairs.T)
        own = maps[states == number][:, pairs]
        others = maps[(states >= 0) & (states != number)][:, pairs & ~dynamics.pairs_of("helix")]
        assert own.size == 0 or own.mean() > 0.9
        assert state == "helix" or others.mean() < 0.5


def test_quality_by_hand():
    random = np.random.default_rng(0)
    states = np.repeat(np.arange(5), 20)
    latent = np.eye(5, 3)[states] * 10 + states[:, None] * 5 + random.normal(size=(100, 3)) * 0.01
    maps = random.integers(0, 2, (100, 28, 28, 1))
    found = train.quality(maps, states, maps * 2.0 - 1, latent, seed=0)
    assert found["f1"] == found["rand"] == 1
    assert found["silhouette"] > 0.99
    half = np.where(random.random(maps.shape) < 0.5, maps * 2.0 - 1, -1)  # half of the contacts are missed
    found = train.quality(maps, random.permutation(states), half, latent, seed=0)
    assert found["f1"] == pytest.approx(2 / 3, abs=0.02)
    assert abs(found["rand"]) < 0.1


def test_summary_by_hand():
    def history(losses, seconds):
        return [{"epoch": n, "seconds": seconds, "val_loss": loss} for n, loss in enumerate(losses, 1)]

    quality = {"f1": 0.5, "rand": 0.75, "silhouette": 0.25}
    found = {
        study.Run(1, 1): (history([9, 5, 3, 2], 4), quality),
        study.Run(2, 1): (history([9, 3, 3, 3], 2), quality | {"rand": 0.5}),
        study.Run(2, 2): (history([9, 9, 3, 1], 2), quality),
    }
    alone, two = study.summarize(found)
    assert (alone["S_p"], alone["S_L"], alone["rand"]) == (1, 1, 0.75)
    assert (two["S_p"], two["rand"]) == (2, 0.625)
    assert two["S_L"] == pytest.approx(4 * 3 / (2 * 2.5))  # the loss of 3 after 3 epochs, and after 2 and 3


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_study_draws_and_says_what_it_found(tmp_path):
    options = f"--out {tmp_path} --seeds 1 --epochs 2 --chains 6 --frames 10".split()
    command = [sys.executable, "-m", "examples.contacts.study", *options]
    done = launch(1, command, timeout=280, env=child_environment("tensorflow", {}, False), mpi=False)
    assert done.returncode == 0, done.output
    for name in ("summary.csv", "latent.png", "maps.png", "latent.csv"):
        assert (tmp_path / name).stat().st_size > 100
    assert "| ranks | F1 of contacts |" in done.output
    assert "2 ranks, seed 1: f1" in done.output
