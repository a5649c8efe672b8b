"""Runs every tests/ranks/check_*.py on several ranks and both backends.

A check file may narrow what it is run with by module constants, `RANKS = (2, 3)`, `BACKENDS = ("jax",)`,
`TIMEOUT = 300`, and may set `ENV = {"NAME": "value"}` for its ranks.
"""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKS = sorted((Path(__file__).parent / "ranks").glob("check_*.py"))
# 4 ranks start 4 frameworks on what may be 2 cores: a check that learns something from them asks for it.
DEFAULTS: dict[str, Any] = {"RANKS": (1, 2, 3), "BACKENDS": ("tensorflow", "jax"), "TIMEOUT": 240, "ENV": {}}


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


def _cases() -> list[Any]:
    return [
        pytest.param(path, settings, n, backend, id=f"{path.stem.removeprefix('check_')}-{backend}-{n}")
        for path in CHECKS
        for settings in [_settings(path)]
        for backend in settings["BACKENDS"]
        for n in settings["RANKS"]
    ]


@pytest.mark.mpi
@pytest.mark.parametrize(("path", "settings", "n", "backend"), _cases())
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
