"""Runs every block of code that the READMEs and the API page show."""

import functools
import os
import re
import sys
from pathlib import Path

import forks
import pytest
from launch import ROOT, child_environment, launch

pytestmark = pytest.mark.mpi

PAGES = [
    "README.md",
    "docs/api.md",
    "docs/clusters.md",
    "docs/spatial.md",
    "examples/cnn/README.md",
    "examples/gan3d/README.md",
    "examples/c/README.md",
]
# Pages whose snippets share one job: each takes milliseconds, frameworks seconds to start.
SITE = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*/*.md"))]
# Commands of other pages than READMEs of which another test runs what they start: tests/test_elastic.py, test_run.py.
ELSEWHERE = ["python -m keras_hpc run --elastic -n 4 train.py", "python -m keras_hpc run -n 2 train.py"]
# A snippet that shows only what to add to a script gets the script from here.
PREAMBLE = """
import keras
import numpy as np
import keras_hpc
keras_hpc.init()
x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""


def _blocks():
    for page in PAGES + SITE:
        text = (ROOT / page).read_text()
        for number, (language, code) in enumerate(re.findall(r"^```(python|bash)\n(.*?)^```", text, re.M | re.S), 1):
            if language == "bash":
                # A line after the other, unless they need each other.
                for line in [code] if "=$(" in code else code.strip().replace("\\\n", "").splitlines():
                    marks = [pytest.mark.soak] if line in ELSEWHERE and page.startswith("docs/") else []
                    yield pytest.param(page, language, line, id=f"{page}: {line[:100]}", marks=marks)
            else:
                yield pytest.param(page, language, code, id=f"{page}: block {number}")


def _snippets(*pages):
    return [block.values[2] for block in _blocks() if block.values[0] in pages and block.values[1] == "python"]


def _snippets_of(page):
    """Those of a page, or of all that share a job with it."""
    return _snippets(*(SITE if page in SITE else [page]))


def _job_of(page):
    """A script that runs all snippets of a page, each as if in a script of its own: frameworks start once for them."""
    return f"""
import keras_hpc
for number, code in enumerate({[PREAMBLE * ("keras_hpc.init(" not in code) + code for code in _snippets_of(page)]!r}):
    exec(code, {{"__name__": "__main__"}})
    rank = keras_hpc.rank()
    keras_hpc.finalize()
    open(f"ran-{{number}}-{{rank}}", "w").close()
"""


@pytest.fixture(scope="module")
def snippets(tmp_path_factory):
    """A function that returns how the job of a page's snippets ended, and its folder."""

    @functools.cache
    def run(page):
        folder = tmp_path_factory.mktemp("snippets")
        (folder / "train.py").write_text(_job_of(page))
        backend = "torch" if page == "docs/spatial.md" else "jax"
        return _run("mpiexec -n 2 python train.py", folder, backend, lean=True), folder

    return lambda page: run(SITE[0] if page in SITE else page)


def _run(command, folder, backend, lean):
    folders = [*([forks.folder_with_python(backend)] * lean), str(Path(sys.executable).parent), os.environ["PATH"]]
    path = {"PATH": os.pathsep.join(folders)}
    env = child_environment(backend, path, lean) | {"TESTS_EXAMPLES": "1"}
    return launch(1, ["bash", "-c", command], timeout=240, env=env, cwd=folder, mpi=False)


@pytest.mark.parametrize(("page", "language", "code"), _blocks())
def test_block(page, language, code, tmp_path, snippets):
    folder = tmp_path
    if language == "python" and page != "README.md":
        done, folder = snippets(page)
        number = _snippets_of(page).index(code)
        assert [rank for rank in range(2) if not (folder / f"ran-{number}-{rank}").exists()] == [], done.output
        assert done.returncode == 0, done.output
        return
    if language == "python":
        (tmp_path / "train.py").write_text(code)
        command = "python train.py"
    elif code.startswith("make "):
        # What `make test` is running right now cannot be run by it: see that the target exists.
        folder, command = ROOT, code.replace("make ", "make --dry-run ")
    elif code == "keras-hpc demo":  # tests/test_console.py runs it
        command = "keras-hpc demo --help"
    elif code.startswith("pip install "):
        folder, command = ROOT, code.replace("pip install ", "pip install --dry-run --no-deps --no-build-isolation ")
    else:
        first = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
        (tmp_path / "train.py").write_text(first)
        for name in ("examples", "benchmarks"):
            (tmp_path / name).symlink_to(ROOT / name)
        command = code
    # What does not say on which backend it runs, does so where it takes least.
    # The script of the first page once with all that is installed.
    lean = language == "bash"
    backend = {"docs": "jax", "examples/cnn": "torch"}.get(str(Path(page).parent), "tensorflow")
    if said := re.search(r"--backend (\w+)", command):
        backend = said[1]
    done = _run(command, folder, backend, lean)
    assert done.returncode == 0, done.output
    assert done.leaked_processes == ()


@pytest.mark.soak
def test_the_first_job_does_on_two_ranks_what_it_does_on_one(tmp_path):
    """As the tutorial says, whose script draws its first weights at random."""
    (tmp_path / "train.py").write_text(_snippets("docs/tutorial/first-job.md")[0])
    losses = []
    for ranks in (1, 2):
        done = _run(f"keras-hpc run --no-label -n {ranks} train.py", tmp_path, "tensorflow", lean=False)
        losses.append(float(re.search(rf"^loss ([\d.]+) on {ranks} rank", done.output, re.M)[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_shape_of_the_readme():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 140
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("```")) < 30


def test_public_names_are_documented():
    # Read, not imported: the process of the tests starts no framework.
    names = re.findall(r'^    "(\w+)",$', (ROOT / "keras_hpc" / "__init__.py").read_text(), re.M)
    assert "init" in names
    page = (ROOT / "docs" / "api.md").read_text()
    assert [name for name in names if not re.search(rf"`{name}\b", page)] == []
