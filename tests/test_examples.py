"""The examples at full size: what their READMEs promise."""

import csv

import pytest
from launch import ROOT, child_environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("options", "accuracy"),
    [(["--epochs", 3, "--samples", 1500], 0.7), pytest.param([], 0.97, marks=pytest.mark.soak)],
    ids=["short", "whole"],
)
def test_demo_learns_the_digits_and_draws_charts(options, accuracy, run_ranks, tmp_path):
    done = run_ranks(1, ["-m", "examples.cnn.demo", "--results", tmp_path, *options], timeout=480, mpi=False)
    (row,) = csv.DictReader((tmp_path / "throughput.csv").open())
    assert float(row["test_accuracy_1_rank"]) >= accuracy
    assert float(row["test_accuracy_2_ranks"]) >= accuracy
    report = done.output.partition("=== keras_hpc demo")[2]
    for text in ("1 and 2", "tensorflow", "MPICH", "samples/s", "ratio", "identical", "test accuracy"):
        assert text in report, report
    assert {path.name for path in tmp_path.glob("*.png")} == {"loss.png", "throughput.png"}
    curves = list(csv.DictReader((tmp_path / "loss.csv").open()))
    assert {row["ranks"] for row in curves} == {"1", "2"}
    assert all(float(row["loss"]) > 0 for row in curves)


@pytest.mark.soak
def test_study_of_the_gan_compares_like_with_like(run_ranks, tmp_path):
    small = ["--events", 400, "--seeds", 1, "--epochs", 2, "--steps", 2]
    run_ranks(1, ["-m", "examples.gan3d.study", *small, "--out", tmp_path], timeout=300, mpi=False)
    kinds = ["1 rank, synchronous", "2 ranks, synchronous", "2 ranks, pipelined"]
    summary = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert [row["kind"] for row in summary] == kinds
    assert all(0 < float(row[name]) < 1e4 for row in summary for name in ("figure of merit", "D_w", "samples/s"))
    curves = list(csv.DictReader((tmp_path / "curves.csv").open()))
    assert [(row["kind"], row["samples"]) for row in curves] == [(kind, n) for kind in kinds for n in ("32", "64")]
    losses = [list(csv.DictReader(path.open())) for path in sorted(tmp_path.glob("[12]-*/losses.csv"))]
    assert [len(rows) for rows in losses] == [4, 4, 4]
    pages = ("study.html", "quality.png", "speed.png", "validation/report.html", "validation/discriminator.png")
    assert all((tmp_path / name).exists() for name in pages)


@pytest.mark.soak
def test_notebook_of_the_gan(monkeypatch, tmp_path):
    import nbclient
    import nbformat

    source = (ROOT / "docs/notebooks/gan3d.ipynb").read_text()
    for name, value in {"OUT": tmp_path, "EVENTS": 1200, "EPOCHS": 1, "STEPS": 2}.items():
        monkeypatch.setenv(f"GAN3D_{name}", str(value))
    for name, value in child_environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.reads(source, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(ROOT)}}).execute()
    pictures = [o for cell in notebook.cells for o in cell.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 4
    assert "sum of all cells" in str(notebook.cells[-2].outputs)
