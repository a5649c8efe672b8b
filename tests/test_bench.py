"""`python -m keras_hpc bench`: what it writes. How fast anything is, no test says."""

import json

import pytest

pytestmark = pytest.mark.mpi


def test_allreduce_starts_its_ranks_and_writes_reports(run_ranks, tmp_path):
    report, chart = tmp_path / "report.json", tmp_path / "chart.png"
    args = ["-m", "keras_hpc", "bench", "allreduce", "--ranks", "2", "--bytes", "4,2Ki,64Ki,1Mi", "--seconds", "0.1"]
    text = run_ranks(1, [*args, "--json", report, "--plot", chart], mpi=False).output
    content = json.loads(report.read_text())
    assert (content["ranks"], content["nodes"]) == (2, 1)
    assert "MPICH" in content["mpi"]
    assert [(row["bytes"], row["path"]) for row in content["rows"]] == [
        (nbytes, path) for nbytes in (4, 2048, 65536, 2**20) for path in ("private", "segment", "fusion")
    ]
    for row in content["rows"]:
        assert 0 < row["keras_hpc_us"] <= row["keras_hpc_median_us"]
        assert 0 < row["mpi_us"] <= row["mpi_median_us"]
        assert row["floor_us"] >= 0
        assert row["speedup"] == pytest.approx(row["mpi_us"] / row["keras_hpc_us"], abs=0.1, rel=0.1)
        assert row["algorithm"] in ("slot", "push", "staged", "library", "plan")
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert text.count("speed-up") == 1, "only rank 0 prints"

    page = tmp_path / "page.md"
    run_ranks(1, ["-m", "keras_hpc", "bench", "page", report, "--out", page], mpi=False)
    assert page.read_text().count("\n| ") == 13  # with the header


def test_allreduce_uses_the_ranks_it_is_started_with(run_ranks, tmp_path):
    report = tmp_path / "report.json"
    args = ["-m", "keras_hpc", "bench", "allreduce", "--bytes", "256,128Ki", "--seconds", "0.1", "--json", report]
    run_ranks(3, args, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    content = json.loads(report.read_text())
    assert (content["ranks"], content["nodes"]) == (3, 2)
    assert len(content["rows"]) == 6


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        (["allreduce", "--bytes", "5"], 1, "Received: '5'"),
        (["allreduce", "--bytes", "4,x"], 1, "Received: 'x'"),
        (["allreduce", "--ranks", "2"], 2, "there is a launcher already"),
        (["allreduce", "--ranks", "1"], 1, "Expected two or more"),
        (["page", "missing.json", "--out", "x.md"], 1, "No such report: missing.json"),
        ([], 1, "usage"),
    ],
)
def test_wrong_use_is_explained(words, ranks, said, run_ranks):
    output = run_ranks(ranks, ["-m", "keras_hpc", "bench", *words], mpi=ranks > 1, expect_failure=True).output
    assert said in output
