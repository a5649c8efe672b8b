"""examples.localsgd: its arithmetic by hand, the table that goes into its README, and one small study."""

import sys

import pytest
from launch import ROOT, child_environment, launch

from examples.localsgd import study


def outcome(losses, seconds, waited):
    lines = [
        {
            "epoch": number, "seconds": seconds, "waited": waited, "megabytes": 2.0, "val_loss": loss,
        }
        for number, loss in enumerate(losses, 1)
    ]  # fmt: skip
    return lines, 1 - losses[-1]


def test_summary():
    found = {
        study.Run("digits", 1, 0, "none", 1): outcome([0.5, 0.3, 0.1], 4.0, 0.0),
        study.Run("digits", 2, 8, "none", 1): outcome([0.4, 0.1, 0.1], 2.0, 0.5),
        study.Run("digits", 2, "epoch", "nesterov", 1): outcome([0.4, 0.4, 0.3], 2.0, 0.1),
    }
    alone, eight, epoch = study.summarize(found)
    assert [row["way"] for row in (alone, eight, epoch)] == [
        "one rank",
        "weights, every 8 steps",
        "weights, every epoch, outer Nesterov",
    ]
    assert (alone["epochs to target"], alone["learning speed-up"]) == (3, 1)
    assert (eight["epochs to target"], eight["learning speed-up"]) == (2, 3.0), "4 s x 3 over 2 s x 2"
    assert (epoch["epochs to target"], epoch["learning speed-up"]) == (None, None)
    table = study.markdown([alone, eight, epoch]).splitlines()
    assert table[0].count("|") == table[1].count("|") == table[4].count("|")
    assert table[3].endswith("| 0.500 | 2.0 | 3.00 |")
    assert "not reached" in table[4]


def test_readme_has_a_place_for_the_table():
    text = (ROOT / "examples" / "localsgd" / "README.md").read_text()
    assert text.index(study.BEGIN) < text.index(study.END)


@pytest.mark.soak
@pytest.mark.mpi
def test_a_small_study(tmp_path):
    words = ["--seeds", "1", "--epochs", "1", "--samples", "500", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "examples.localsgd.study", *words]
    done = launch(1, command, timeout=900, env=child_environment("torch"), mpi=False)
    assert done.returncode == 0, done.output
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "table.md").read_text().splitlines()) == 1 + 2 * (2 + 2 + 1 + 1 + 2 * len(study.EVERY))
