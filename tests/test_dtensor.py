"""benchmarks.dtensor: what it says of DTensor is so, and it measures what both can run."""

import json
import sys

import pytest
from launch import ROOT, child_environment, launch


def _run(*words):
    command = [sys.executable, "-m", "benchmarks.dtensor", *words]
    done = launch(2, command, timeout=300, env=child_environment("torch"), cwd=ROOT)
    assert done.returncode == 0, done.output
    return done.output.splitlines()


@pytest.mark.soak
@pytest.mark.mpi
def test_it_says_what_dtensor_can_run():
    said = dict(line.split(": ", 1) for line in _run("--rounds", "0") if ", Shard(" in line.partition(": ")[0])
    assert len(said) == 2 * 2 * 10
    # Of dilation PyTorch has its own words; a 1 x 1 convolution has no border that could be wrong.
    refusal = "RuntimeError: Dilation must be 1 for tensor parallel convolution."
    assert said["mended, Shard(3), convolution 3 x 3, dilation 2, padding 2"].endswith(refusal)
    assert said["mended, Shard(3), convolution 1 x 1"] == "right"
    assert said["mended, Shard(3), the same with BatchNorm2d"] == "right"
    assert said["mended, Shard(2), convolution 3 x 3, padding 1"] == "wrong: output"
    assert said["as it is, Shard(3), convolution 3 x 3, padding 1"] != "right"


@pytest.mark.soak
@pytest.mark.mpi
def test_networks_are_measured_or_refused():
    lines = _run("--size", "128", "--steps", "1", "--rounds", "1")
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [("dtensor" in row, "dtensor_ms" in row) for row in rows] == [(True, False)] * 2 + [(False, True)] * 2
    assert all(row["keras_hpc_ms"] > 0 and row["ranks"] == 2 for row in rows)
    assert rows[0]["dtensor"].startswith("RuntimeError: Stride must be 1")
