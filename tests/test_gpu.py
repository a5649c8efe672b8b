"""Keras with gradients that the engine takes from a GPU: one that is not there, see ranks/fake_gpu.py."""

import re

import fake_cuda
import pytest
from checks import settings_of
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
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_what_holds_on_the_host_holds_on_a_gpu(backend, names, run_ranks, tmp_path):
    library = fake_cuda.build(tmp_path)
    ranks = ROOT / "tests" / "ranks"
    checks = [ranks / f"check_{name}.py" for name in names]
    checks = [path for path in checks if backend in settings_of(path)["RANKS"]]
    args = [ranks / "run_check.py", 60, tmp_path, *checks]
    env = {"TESTS_FAKE_GPU": str(library), "PYTHONPATH": str(ranks)}
    try:
        run_ranks(2, args, timeout=200, backend=backend, env=env)
    except pytest.fail.Exception as failure:
        logs = [log.read_text(errors="replace")[-8000:] for log in sorted(tmp_path.glob("rank*.txt"))]
        pytest.fail("\n".join([str(failure), *logs]), pytrace=False)
    for log in sorted(tmp_path.glob("rank*.txt")):
        assert " FAILED" not in log.read_text()
        assert checks[-1].name in log.read_text()


def test_what_xla_is_told_of_a_gpu(run_ranks):
    done = run_ranks(1, [ROOT / "tests" / "ranks" / "lower_for_cuda.py"], backend="jax", mpi=False)
    calls = {}
    for line in done.output.splitlines():
        if found := re.search(r'custom_call_target="khpc_jax_(\w+)"', line):
            calls.setdefault(found[1], []).append(line)
    assert {name: len(lines) for name, lines in calls.items()} == {
        "start_on": 4,
        "wait_on": 1,
        "turn_on": 1,
        "second_on": 1,
        "allreduce_on": 1,
    }
    for name, lines in calls.items():
        for line in lines:
            # In place, never left out, and with the numbers that the handler reads on the host.
            assert "output_to_operand_aliasing" in line
            assert "custom_call_has_side_effect=true" in line
            assert "api_version=API_VERSION_TYPED_FFI" in line
            assert ("device = 0 : i32" if name == "allreduce_on" else "plan = ") in line
            when = {"start_on": "schedule=SCHEDULE_EARLIEST", "allreduce_on": ""}.get(name, "schedule=SCHEDULE_LATEST")
            assert when in line
    # With accumulation a step that does not reduce branches around it: no handler reads the condition.
    assert "conditional(" in done.output
