"""Runs what the guides and examples of Keras do, on one rank and on two: tests/idioms/*.py.

Each is a short script with `BACKENDS`, and a `main()` that returns numbers and models. Numbers are the same on all
ranks and those of one rank, models too, unless their name begins with "_": then models must still be the same on all
ranks. All idioms of a backend share a job, as starting a framework takes longer than any of them. A script may say
`INIT`, the arguments of `keras_hpc.init()`; `NEEDS`, modules that it cannot do without; `TOLERANCE`; and `XFAIL`, by
backend, what does not work on two ranks.
"""

import ast
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parent / "idioms"
IDIOMS = [path for path in sorted(FOLDER.glob("*.py")) if path.stem not in ("run_idioms", "tiny")]
RANKS = (1, 2)
ATTEMPTS = 3  # a job whose ranks have lost each other ends; what is left is run in another one


@functools.cache
def _settings(path: Path) -> dict[str, Any]:
    """Module constants of a script, read without importing it."""
    found: dict[str, Any] = {"BACKENDS": (), "NEEDS": (), "TOLERANCE": 1e-4, "XFAIL": {}}
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) in found:
            found[statement.targets[0].id] = ast.literal_eval(statement.value)
    return found


def pytest_generate_tests(metafunc):
    cases = []
    for path in IDIOMS:
        settings = _settings(path)
        missing = [name for name in settings["NEEDS"] if importlib.util.find_spec(name) is None]
        skip = [pytest.mark.skip(reason=f"needs {', '.join(missing)}")] if missing else []
        for backend in settings["BACKENDS"]:
            for n in RANKS:
                reason = settings["XFAIL"].get(backend) if n > 1 else None
                fail = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
                cases.append(pytest.param(path, backend, n, id=f"{path.stem}-{backend}-{n}", marks=skip + fail))
    metafunc.parametrize(("path", "backend", "n"), cases)


def _selected(request, backend):
    """The scripts that this run of pytest needs on a backend."""
    items = [
        item for item in request.session.items if item.path == request.path and not item.get_closest_marker("skip")
    ]
    return sorted({item.callspec.params["path"] for item in items if item.callspec.params["backend"] == backend})


def _run(paths, backend, n, folder, run_ranks):
    """Runs scripts. Returns for each what its ranks have written, and what was amiss with the job."""
    amiss = {}
    for attempt in range(ATTEMPTS):
        left = [path for path in paths if not list(folder.glob(f"{path.stem}.*.json"))]
        if not left:
            break
        try:
            run_ranks(n, [FOLDER / "run_idioms.py", folder, *left], timeout=500, backend=backend, lean=False)
        except pytest.fail.Exception as failure:
            amiss |= dict.fromkeys(left, f"job {attempt + 1}: {failure}")
    found = {}
    for path in paths:
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{path.stem}.*.json"))]
        found[path] = ranks, amiss.get(path, "")
    return found


@pytest.fixture(scope="module")
def jobs():
    """What the jobs have given so far."""
    return {}


@pytest.fixture
def results_of(jobs, run_ranks, request, tmp_path_factory):
    """A function that returns what each rank has written for a script, and fails if it has not ended well."""

    def results(path, backend, n):
        if (backend, n) not in jobs:
            folder = tmp_path_factory.mktemp(f"{backend}-{n}")
            jobs[backend, n] = _run(_selected(request, backend), backend, n, folder, run_ranks)
        ranks, amiss = jobs[backend, n][path]
        errors = [f"{path.stem}, rank {r} of {n}:\n{one['error']}" for r, one in enumerate(ranks) if "error" in one]
        if errors or len(ranks) < n:
            pytest.fail("\n".join(errors) or f"{path.stem} was not run: {amiss}", pytrace=False)
        return [one["results"] for one in ranks]

    return results


def _assert_close(received, expected, tolerance, what):
    if isinstance(expected, dict):
        assert received.keys() == expected.keys(), what
        for name in expected:
            if not name.startswith("_"):
                _assert_close(received[name], expected[name], tolerance, f"{what}, {name}")
    elif isinstance(expected, list):
        assert len(received) == len(expected), what
        for index, (ours, theirs) in enumerate(zip(received, expected, strict=True)):
            _assert_close(ours, theirs, tolerance, f"{what}[{index}]")
    else:
        np.testing.assert_allclose(received, expected, rtol=tolerance, atol=tolerance, err_msg=what)


@pytest.mark.mpi
@pytest.mark.soak  # several minutes; tests/ranks/check_idioms.py has what is most often met
def test_idiom(path, backend, n, results_of):
    ranks = results_of(path, backend, n)
    tolerance = _settings(path)["TOLERANCE"]
    for rank, results in enumerate(ranks[1:], 1):
        _assert_close(results, ranks[0], tolerance, f"rank {rank} against rank 0")
    if n > 1:
        (expected,) = results_of(path, backend, 1)
        _assert_close(ranks[0], expected, tolerance, f"{n} ranks against one")
