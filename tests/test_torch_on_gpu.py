"""Keras on PyTorch, with gradients that the engine takes from a GPU: one that is not there, see ranks/fake_gpu.py."""

import fake_cuda
import pytest
from launch import ROOT

CHECKS = ["gradients", "fit", "exact", "pipeline", "own_loops", "checkpoint"]
MORE = [
    "teams",
    "misuse",
    "losses",
    "keras",
    "loops",
    "idioms",
    "batch_norm",
    "backend",
    "random",
    "state",
    "optimizers",
]


@pytest.mark.mpi
@pytest.mark.parametrize("names", [CHECKS, pytest.param(MORE, marks=pytest.mark.soak)], ids=["checks", "more"])
def test_what_holds_on_the_host_holds_on_a_gpu(names, run_ranks, tmp_path):
    library = fake_cuda.build(tmp_path)
    ranks = ROOT / "tests" / "ranks"
    checks = [ranks / f"check_{name}.py" for name in names]
    args = [ranks / "run_check.py", 60, tmp_path, *checks]
    env = {"TESTS_FAKE_GPU": str(library), "PYTHONPATH": str(ranks)}
    try:
        run_ranks(2, args, timeout=200, backend="torch", env=env)
    except pytest.fail.Exception as failure:
        logs = [log.read_text(errors="replace")[-8000:] for log in sorted(tmp_path.glob("rank*.txt"))]
        pytest.fail("\n".join([str(failure), *logs]), pytrace=False)
    for log in sorted(tmp_path.glob("rank*.txt")):
        assert " FAILED" not in log.read_text()
        assert f"check_{names[-1]}.py" in log.read_text()
