"""Runs every tests/ranks/check_*.py on several ranks and both backends.

A check file may say by module constants what it is run with, `RANKS = {"tensorflow": (1, 2), "jax": (3,)}`,
`TIMEOUT = 300`, and may set `ENV = {"NAME": "value"}` for its ranks. `pytest --all-ranks` runs each on 1 to 4 ranks.
"""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKS = sorted((Path(__file__).parent / "ranks").glob("check_*.py"))
# Every rank starts a framework, on what may be 2 cores: more ranks where they can find something more.
DEFAULTS: dict[str, Any] = {"RANKS": {"tensorflow": (2,), "jax": (2,)}, "TIMEOUT": 300, "ENV": {}}


def _settings(path: Path) -> dict[str, Any]:
    """Module constants of a check file, read without importing it: it may start MPI."""
    found = dict(DEFAULTS)
    for statement in ast.parse(path.read_text()).body:
        if (
            isinstance(statement, ast.Assign)
            and isinstance(name := statement.targets[0], ast.Name)
            and name.id in found
        ):
            found[name.id] = ast.literal_eval(statement.value)
    return found


def pytest_generate_tests(metafunc):
    cases = []
    for path in CHECKS:
        settings = _settings(path)
        for backend, counts in settings["RANKS"].items():
            for n in (1, 2, 3, 4) if metafunc.config.getoption("all_ranks") else counts:
                cases.append(
                    pytest.param(path, settings, n, backend, id=f"{path.stem.removeprefix('check_')}-{backend}-{n}")
                )
    metafunc.parametrize(("path", "settings", "n", "backend"), cases)


@pytest.mark.mpi
def test_check(path, settings, n, backend, run_ranks, tmp_path):
    limit = settings["TIMEOUT"]
    args = [path.parent / "run_check.py", path, limit - 10, tmp_path]
    try:
        run_ranks(n, args, timeout=limit, backend=backend, env=settings["ENV"])
    except pytest.fail.Exception:
        for log in sorted(tmp_path.glob("rank*.txt")):
            sys.stdout.write(f"---- {log.name}\n{log.read_text(errors='replace')[-6000:]}\n")
        raise
    for log in tmp_path.glob("rank*.txt"):
        assert " passed" in log.read_text(errors="replace"), f"{log.name} ran no test"
