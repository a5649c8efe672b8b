"""The examples at full size: what their READMEs promise."""

import csv

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def test_demo_learns_the_digits_and_draws_charts(run_ranks, tmp_path):
    done = run_ranks(1, ["-m", "examples.cnn.demo", "--results", tmp_path], timeout=480, mpi=False)
    (row,) = csv.DictReader((tmp_path / "throughput.csv").open())
    assert float(row["test_accuracy_1_rank"]) >= 0.97
    assert float(row["test_accuracy_2_ranks"]) >= 0.97
    report = done.output.partition("=== keras_hpc demo")[2]
    for text in ("1 and 2", "tensorflow", "MPICH", "samples/s", "ratio", "identical", "test accuracy"):
        assert text in report, report
    assert {path.name for path in tmp_path.glob("*.png")} == {"loss.png", "throughput.png"}
    curves = list(csv.DictReader((tmp_path / "loss.csv").open()))
    assert {row["ranks"] for row in curves} == {"1", "2"}
    assert all(float(row["loss"]) > 0 for row in curves)
