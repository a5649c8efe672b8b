"""benchmarks/gpu/one_gpu.sh: every probe of it runs, on a GPU that is not there. Its numbers mean nothing there."""

import json

import fake_cuda
import forks
import pytest
from launch import MPIEXEC, ROOT, child_environment, launch

from benchmarks.gpu import EXPECTED, order, report


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("backends", ["jax", "torch jax"])
def test_every_probe_runs(backends, tmp_path):
    library = fake_cuda.build(tmp_path)
    env = child_environment("jax", lean=True) | {
        "INTERPRETER": " ".join([*forks.python("jax"), f"{ROOT}/tests/ranks/on_fake_gpu.py"]),
        "MPIEXEC": str(MPIEXEC),
        "BACKENDS": backends,
        "TINY": "1",
        "TESTS_FAKE_GPU": str(library),
        "TESTS_FAKE_NVRTC": str(fake_cuda.build_nvrtc(tmp_path)),
        "CXX": f"g++ -Wl,-rpath,{tmp_path}",  # where the probe finds it; Python loads it first
    }
    done = launch(1, ["benchmarks/gpu/one_gpu.sh", str(tmp_path / "out")], timeout=300, env=env, mpi=False)
    assert done.returncode == 0, done.output
    assert not done.leaked_processes
    assert "failed" not in done.output, done.output + "".join(log.read_text() for log in tmp_path.glob("out/*.log"))
    rows = [json.loads(line) for file in tmp_path.glob("out/*.jsonl") for line in file.read_text().splitlines()]
    found = {row["probe"] for row in rows}
    assert sorted(set(EXPECTED) - found) == ["J1"], done.output  # of XLA's compiler for GPUs: test_gpu.py
    assert [row for row in rows if row["value"] == -1] == []
    exact = [row for row in rows if row["probe"] in ("C1", "C2") or row["target"] == "0"]
    assert [row for row in exact if row["holds"] is not True] == []
    assert "| P1 | pinning shared memory, 2 processes |" in (tmp_path / "out" / "report.md").read_text()
    assert "pinned memory" in (tmp_path / "out" / "doctor-jax.txt").read_text()


SCHEDULED = """HloModule jit_step, is_scheduled=true

%other (p: f32[2]) -> f32[2] {{
  ROOT %p = f32[2]{{0}} parameter(0)
}}

ENTRY %main (x: f32[2], w: f32[]) -> f32[2] {{
  %x = f32[2]{{0}} parameter(0)
  %w = f32[] parameter(1)
  %one = f32[2]{{0}} fusion(%x), kind=kLoop
{first}
  %two = f32[2]{{0}} fusion(%x), kind=kLoop
  %shown = f32[2]{{0}} bitcast(%two)
{then}
  %last = f32[2]{{0}} custom-call(%shown, %w), custom_call_target="khpc_jax_start_on"
  ROOT %end = f32[2]{{0}} add(%start, %last)
}}
"""
START = '  %start = f32[2]{0} custom-call(%one, %w), custom_call_target="khpc_jax_start_on"'


def test_order_is_that_of_the_program():
    assert order.early(SCHEDULED.format(first=START, then="")) == (1, 1)
    assert order.early(SCHEDULED.format(first="", then=START)) == (0, 1)


def test_the_report_names_what_is_missing(tmp_path):
    rows = [
        {"probe": "S1", "what": "a", "value": 1.5, "unit": "GB/s", "target": "", "holds": None},
        {"probe": "P1", "what": "b", "value": -1, "unit": "s", "target": "<= 1", "holds": False},
    ]
    (tmp_path / "x.jsonl").write_text("a line of a launcher\n" + "".join(json.dumps(row) + "\n" for row in rows))
    text, missing = report.table(tmp_path)
    assert text.splitlines()[2:] == ["| P1 | b | nothing | <= 1 | **missed** |", "| S1 | a | 1.5 GB/s |  |  |"]
    assert missing == [probe for probe in EXPECTED if probe not in ("S1", "P1")]
