"""`python -m keras_hpc`: what it shows, alone and as a job."""

import json
import re

import fake_cuda
import pytest
from launch import ROOT

pytestmark = pytest.mark.mpi


def test_help(run_ranks):
    text = run_ranks(1, ["-m", "keras_hpc", "--help"], backend="jax", mpi=False).output
    assert "doctor" in text
    assert "--parameters" in run_ranks(1, ["-m", "keras_hpc", "doctor", "--help"], backend="jax", mpi=False).output


@pytest.mark.parametrize(("ranks", "backend"), [(1, "tensorflow"), (3, "jax")])
def test_doctor(ranks, backend, run_ranks, tmp_path):
    args = [
        "-m",
        "keras_hpc",
        "doctor",
        "--parameters",
        "1000000",
        "--data",
        ROOT / "docs",
        "--json",
        tmp_path / "doctor.json",
    ]
    text = run_ranks(ranks, args, backend=backend, mpi=ranks > 1).output
    for word in ("Python", "Keras", backend, "mpi4py", "MPICH", "MPI_THREAD_MULTIPLE", "libkeras_hpc.so", "correct"):
        assert word in text, text
    assert re.search(r"^  MPI network +ucx, the first of what this MPICH has: ucx, ofi$", text, re.M), text
    assert text.count("installation\n") == 1, "only rank 0 reports"
    assert len(re.findall(r"^  \d +\d +\d +\S+ +[\d,-]+$", text, re.M)) == ranks, text
    copies = float(re.search(r"\(([\d.]+) copies of the gradients", text)[1])
    assert copies <= 1
    assert copies == pytest.approx((ranks - 1) / ranks, abs=0.05)
    assert bool(re.search(r"inside nodes +latency [\d.]+ us, [\d.]+ GB/s", text)) == (ranks > 1), text
    measured = json.loads((tmp_path / "doctor.json").read_text())
    assert len(measured["links"]) == ranks * (ranks - 1) / 2
    assert len(measured["compute_ms"]) == measured["ranks"] == ranks
    assert measured["gradients"]["bytes"] == 4_000_000
    assert re.search(r"^  data +one rank alone [\d,]+ MB/s; all at once: a rank ", text, re.M), text
    assert sum(measured["data"]["nodes"]) >= ranks * measured["data"]["slowest"] * 0.999 > 0


def test_doctor_on_gpus(run_ranks, tmp_path):
    env = {"TESTS_FAKE_GPU": str(fake_cuda.build(tmp_path))}
    text = run_ranks(2, [ROOT / "tests" / "ranks" / "doctor_on_gpu.py"], backend="jax", env=env).output
    assert re.search(r"computes on +GPU 0: Fake GPU, GPU-0, bus 0000:00:00.0.*; driver for CUDA 13.0", text), text
    assert len(re.findall(r"to the host [\d.]+ GB/s, back [\d.]+ GB/s \(64 MiB, pinned\)", text)) in (1, 2), text
    assert re.search(r"MPI and GPUs +(rank \d: )?the MPI library does not say that it takes memory of GPUs", text), text
    assert re.search(r"GPU to GPU +(rank \d: )?from the next rank's [\d.]+ GB/s \(64 MiB\)", text), text
    assert "pinned memory         4.0 MiB per rank and team for the gradients of 1,048,576 parameters" in text, text


def test_what_will_be_slow_is_hinted_at(run_ranks):
    args = ["-m", "keras_hpc", "doctor", "--parameters", "1000"]
    text = run_ranks(3, args, backend="jax", env={"OMP_NUM_THREADS": "64", "MPIR_CVAR_NUM_CLIQUES": "2"}).output
    assert re.search(r"nodes +2, ranks per node 2, 1", text), text
    assert "hint: 128 compute threads share" in text
    assert "hint: 64 compute threads share" in text
    assert "hint: nodes have different numbers of ranks" in text
    assert "between nodes" in text


def test_wrong_use_is_explained(run_ranks):
    args = ["-m", "keras_hpc", "doctor", "--parameters", "0"]
    assert "Received: 0" in run_ranks(1, args, backend="jax", mpi=False, expect_failure=True).output
    args = ["-m", "keras_hpc", "doctor", "--parameters", "1000", "--json", "/nowhere/doctor.json"]
    said = run_ranks(2, args, backend="torch", expect_failure=True).output
    assert said.count("the report cannot be written. Received: [Errno 2] No such file or directory") == 1, said
    assert "Traceback" not in said
    assert "usage" in run_ranks(1, ["-m", "keras_hpc"], backend="jax", mpi=False, expect_failure=True).output
