"""The checks that ranks run, tests/ranks/check_*.py, and what each says of how it is run."""

import ast
import functools
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "ranks"
CHECKS = sorted(FOLDER.glob("check_*.py"))
# Every rank starts a framework, on what may be 2 cores: more ranks where they can find something more.
DEFAULTS: dict[str, Any] = {
    "RANKS": {"tensorflow": (2,), "jax": (2,), "torch": (2,)},
    "SOAK": {},
    "TIMEOUT": 300,
    "ENV": {},
    "ALONE": False,
    "ORDER": 0,
}


@functools.cache
def settings_of(path: Path) -> dict[str, Any]:
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
