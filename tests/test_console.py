"""The command `keras-hpc`, which is `python -m keras_hpc`, and what it trains by itself."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, child_environment

COMMANDS = ("demo", "doctor", "run", "plan", "bench", "template", "migrate", "trace")
CONSOLE = Path(sys.executable).parent / "keras-hpc"
WITHOUT_LIMITS = {name: value for name, value in child_environment().items() if not name.endswith("_THREADS")}


def _console(*words, env=None, cwd=ROOT, timeout=120):
    return subprocess.run(
        [CONSOLE, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
        env=WITHOUT_LIMITS | (env or {}),
    )


def test_help_names_every_command(tmp_path):
    done = _console("--help", cwd=tmp_path)
    assert done.stdout.startswith("usage: keras-hpc ")
    assert re.findall(r"^    (\w+) ", done.stdout, re.M) == list(COMMANDS)
    as_module = subprocess.run(
        [sys.executable, "-m", "keras_hpc", "--help"], capture_output=True, text=True, check=True
    )
    assert as_module.stdout == done.stdout.replace("usage: keras-hpc ", "usage: python -m keras_hpc ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = _console(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: keras-hpc {command} ")
    assert "--help" in done.stdout


@pytest.mark.parametrize(
    "words", [("template", "slurm"), ("migrate", ROOT / "tests" / "migrate" / "fit_tensorflow.py")]
)
def test_output_that_nobody_reads_to_its_end_is_no_error(words):
    """As with `| head`: the pipe is closed already when the command writes."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [CONSOLE, *map(str, words)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_version():
    said = _console("--version").stdout.split()
    assert said == ["keras_hpc", importlib.metadata.version("keras_hpc")]


@pytest.mark.mpi
def test_bench_starts_its_ranks(tmp_path):
    done = _console(
        "bench", "--bytes", "256,4Ki", "--seconds", "0.05", "--json", tmp_path / "report.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on 1 node(s), MPICH")
    rows = [line.split()[:2] for line in done.stdout.splitlines()[2:]]
    assert ["256", "private"] in rows
    assert ["4096", "segment"] in rows
    assert (tmp_path / "report.json").exists()
    assert "Received: --ranks 1" in _console("bench", "--ranks", "1").stderr


def _demo(text):
    """Lines of ranks: number of ranks, samples/s, loss, percent."""
    lines = re.findall(r"^(\d) ranks? +([\d,]+) samples/s +loss ([\d.]+) +([\d.]+)% of the test digits", text, re.M)
    return [
        (int(ranks), int(rate.replace(",", "")), float(loss), float(percent)) for ranks, rate, loss, percent in lines
    ]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "percent"),
    [
        (["--epochs", "3", "--backend", "torch"], 85),
        *(pytest.param(["--backend", name], 97, marks=pytest.mark.soak) for name in ("tensorflow", "jax", "torch")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_demo_trains_alike_on_one_rank_and_on_two(options, percent, tmp_path):
    package = tmp_path / "keras_hpc"  # as in a clone, where it was not built
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not what was installed')")
    lean = {"PYTHONPATH": str(ROOT / "tests" / "lean")} if "--epochs" in options else {}  # where it is to be short
    done = _console("demo", *options, env=lean, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = _demo(done.stdout)
    assert (one[0], two[0]) == (1, 2)
    assert min(one[1], two[1]) > 0
    assert one[2] == pytest.approx(two[2], rel=0.02, abs=1e-3), "the same global batches"
    assert min(one[3], two[3]) >= percent
    assert re.search(r"^ratio +\d\.\d\d times as many samples/s; .* the same bits, [0-9a-f]{16}$", done.stdout, re.M)
    assert list(tmp_path.iterdir()) == [package], "it leaves nothing"


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["--epochs", "2"], {}, "Received: 2"),
        ([], {"KERAS_BACKEND": "numpy"}, "Received: numpy"),
        ([], {"PMI_SIZE": "2"}, "PMI_SIZE=2"),
    ],
)
def test_wrong_use_of_demo_is_explained(words, env, said):
    done = _console("demo", *words, env=env)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
