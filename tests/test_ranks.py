"""Runs every tests/ranks/check_*.py on several ranks and all backends.

A check file may say by module constants what it is run with, `RANKS = {"tensorflow": (1, 2), "jax": (3,)}`,
`TIMEOUT = 300`, and may set `ENV = {"NAME": "value"}` for its ranks. `SOAK` is as `RANKS`, for `make soak`: backends on
which a file, or its tests with `enough_on`, find little more. Files that are run alike share a job, because half of a
short one is starting frameworks, unless they say `ALONE = True`; there they come by `ORDER`, then by name.
`pytest --all-ranks` runs each on 1 to 4 ranks.
"""

import re
import sys
from dataclasses import dataclass

import pytest
from checks import CHECKS, FOLDER, settings_of


@dataclass(frozen=True)
class Kind:
    """How a job is run. Check files of one kind share a job.

    Attributes:
        backend: of Keras.
        n: ranks.
        env: what is set for them, names and values.
        alone: the file that shares with none.
    """

    backend: str
    n: int
    env: tuple[tuple[str, str], ...]
    alone: str


def pytest_generate_tests(metafunc):
    cases = []
    everything = metafunc.config.getoption("all_ranks")
    for path in sorted(CHECKS, key=lambda path: (settings_of(path)["ORDER"], path)):
        settings = settings_of(path)
        for soak in (False, True):
            for backend, counts in settings["SOAK" if soak else "RANKS"].items():
                if everything and soak and backend in settings["RANKS"]:
                    continue
                env = settings["ENV"] | ({"TESTS_SOAK": "1"} if soak or everything else {})
                for n in (1, 2, 3, 4) if everything else counts:
                    kind = Kind(backend, n, tuple(env.items()), path.stem if settings["ALONE"] else "")
                    label = f"{path.stem.removeprefix('check_')}{'-soak' * soak}-{backend}-{n}"
                    marks = [pytest.mark.soak] if soak and not everything else []
                    cases.append(pytest.param(path, kind, id=label, marks=marks))
    metafunc.parametrize(("path", "kind"), cases)


@pytest.fixture(scope="module")
def jobs() -> dict[Kind, tuple[list[str], str]]:
    """What the jobs so far have said: of each kind the ranks' logs, and what was amiss with the job, or nothing."""
    return {}


def _run(kind, paths, run_ranks, folder):
    """Runs check files in one job. Returns the ranks' logs, and what was amiss."""
    limit = sum(settings_of(path)["TIMEOUT"] for path in paths)
    args = [FOLDER / "run_check.py", max(settings_of(path)["TIMEOUT"] for path in paths) - 10, folder, *paths]
    env = dict(kind.env)
    if any('importorskip("tensorflow")' in path.read_text() for path in paths):
        env["TESTS_TENSORFLOW"] = "1"
    amiss = ""
    try:
        run_ranks(kind.n, args, timeout=limit, backend=kind.backend, env=env)
    except pytest.fail.Exception as failure:
        amiss = str(failure)
    return [log.read_text(errors="replace") for log in sorted(folder.glob("rank*.txt"))], amiss


@pytest.mark.mpi
def test_check(path, kind, jobs, run_ranks, tmp_path, request):
    if kind not in jobs:
        others = (item.callspec.params for item in request.session.items if item.path == request.path)
        paths = [params["path"] for params in others if params["kind"] == kind]
        jobs[kind] = _run(kind, paths, run_ranks, tmp_path)
    logs, amiss = jobs[kind]
    results = [re.findall(rf"{path.name}::.* (PASSED|FAILED|ERROR)", log) for log in logs]
    failed = any({"FAILED", "ERROR"} & set(found) for found in results)
    whole = len(logs) == kind.n and all("PASSED" in found for found in results)
    if amiss and (failed or not whole or not any(" FAILED" in log or " ERROR" in log for log in logs)):
        for rank, log in enumerate(logs):
            sys.stdout.write(f"---- rank {rank}\n{log[-6000:]}\n")
        pytest.fail(amiss, pytrace=False)
    assert whole, "a rank ran no test"
