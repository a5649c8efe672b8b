"""Wheels of `make wheels`: built, installed where nothing else is, and trained with."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from launch import ROOT, child_environment

VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "keras_hpc" / "__init__.py").read_text(), re.M)[1]
TRAIN = """
import keras
import numpy as np
import keras_hpc
keras_hpc.init()
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, x.sum(axis=1), epochs=2, verbose=0)
keras_hpc.check_replicas(model)
print("rank", keras_hpc.rank(), "of", keras_hpc.size(), "agrees, from", keras_hpc.__file__)
"""


def test_the_version_stands_in_one_place():
    assert f'version: "{VERSION}"' in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == VERSION
    assert f'version: "{VERSION}"' in (ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text()
    assert f"v{VERSION}.tar.gz" in (ROOT / "packaging" / "spack" / "package.py").read_text()
    (easyconfig,) = (ROOT / "packaging" / "easybuild").glob("*.eb")
    assert f"version = '{VERSION}'" in easyconfig.read_text()
    assert f"-{VERSION}-" in easyconfig.name


def _run(command, folder, env=None, timeout=600):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=folder, env=env, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
def test_source_archive_builds_without_network(tmp_path):
    """From build requirements of pinned versions, downloaded before."""
    _run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", tmp_path / "wheels",
          "--requirement", ROOT / "packaging" / "build-requirements.txt"], tmp_path)  # fmt: skip
    _run([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    offline = ["--quiet", "--no-index", "--find-links", tmp_path / "wheels"]
    _run(
        [python, "-m", "pip", "install", *offline, "--requirement", ROOT / "packaging" / "build-requirements.txt"],
        tmp_path,
    )
    _run([python, "-c", f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"], ROOT)
    archive = tmp_path / f"keras_hpc-{VERSION}.tar.gz"
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"native/CMakeLists.txt", "keras_hpc/tools/demo/digits.npz", "LICENSE", "README.md"} <= names
    env = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    _run(
        [python, "-m", "pip", "wheel", *offline, "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, archive],
        tmp_path,
        env,
        1200,
    )
    assert list(tmp_path.glob("keras_hpc-*.whl"))


@pytest.mark.soak
@pytest.mark.skipif(
    not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64-static")),
    reason="needs g++-aarch64-linux-gnu and qemu-user-static",
)
def test_engine_of_the_other_machine_reduces(tmp_path):
    """Emulated, ranks as threads: the library of the wheel, and a program that was compiled with it."""
    pytest.importorskip("auditwheel", reason="make wheels installs it")
    _run([sys.executable, ROOT / "packaging" / "wheels.py", "--no-sdist", "--arch", "aarch64", "--out", tmp_path], ROOT,
         timeout=1500)  # fmt: skip
    (wheel,) = tmp_path.glob("*aarch64.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    flags = ["-std=c++17", "-O1", "-pthread", f"-I{ROOT / 'native'}", f"-I{ROOT / 'native' / 'include'}"]
    flags += ["-Lkeras_hpc", "-Wl,-rpath,$ORIGIN/keras_hpc"]
    source = ROOT / "tests" / "native" / "two_teams.cpp"
    _run(["aarch64-linux-gnu-g++", *flags, "-o", "two_teams", source, "-lkeras_hpc", "-ldl"], tmp_path)
    done = subprocess.run(
        ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", "./two_teams"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        check=False,
    )
    # Its last part has time limits of 20 ms, which an emulator may miss.
    assert len(re.findall(r"^\d ranks, \d threads for each team: done$", done.stdout, re.M)) == 9, done
    assert "wrong" not in done.stderr


@pytest.mark.soak
@pytest.mark.mpi
def test_wheels_are_clean_and_train_in_a_bare_environment(tmp_path):
    pytest.importorskip("auditwheel", reason="make wheels installs it")
    _run(
        [sys.executable, ROOT / "packaging" / "wheels.py", "--no-sdist", "--out", tmp_path / "dist"], ROOT, timeout=1500
    )
    wheels = list((tmp_path / "dist").glob("*.whl"))
    here = [wheel for wheel in wheels if os.uname().machine in wheel.name]
    assert here
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            names = file.namelist()
        assert "keras_hpc/tools/demo/digits.npz" in names
        assert sum(name.endswith(".so") for name in names) == 4, "nothing of others is copied in"
        assert [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))] == []
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    (wheel,) = [one for one in here if f"-{tag}-" in one.name or ("abi3" in one.name and sys.version_info >= (3, 12))]
    _run([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    _run([tmp_path / "venv" / "bin" / "pip", "install", "--quiet", f"{wheel}[jax,mpich]"], tmp_path, timeout=900)
    (tmp_path / "train.py").write_text(TRAIN)
    console = tmp_path / "venv" / "bin" / "keras-hpc"
    env = child_environment("jax")
    assert f"keras_hpc             {VERSION} in {tmp_path}" in _run([console, "doctor"], tmp_path, env)
    said = _run([console, "run", "-n", "2", "train.py"], tmp_path, env)
    assert sorted(line[:15] for line in said.splitlines() if " agrees, from " in line) == [
        "[0] rank 0 of 2",
        "[1] rank 1 of 2",
    ]
    assert Path(sys.prefix).name not in said.partition("from ")[2]


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.timeout(4000)
@pytest.mark.skipif(
    not (os.geteuid() == 0 and (shutil.which("debootstrap") or os.environ.get("TESTS_DEBIAN11"))),
    reason="needs root and debootstrap",
)
def test_a_wheel_runs_on_an_old_system(tmp_path):
    """Debian 11 with another Python, made from nothing, or where TESTS_DEBIAN11 says: built, installed and trained."""
    pytest.importorskip("auditwheel", reason="make wheels installs it")
    root = Path(os.environ.get("TESTS_DEBIAN11", tmp_path / "debian11"))
    if not root.exists():
        _run([ROOT / "packaging" / "debian11.sh", root], tmp_path, timeout=2400)
    in_root = [ROOT / "packaging" / "in_root.sh", root]
    wheels = [sys.executable, ROOT / "packaging" / "wheels.py"]
    _run([*wheels, "--root", root, "--out", tmp_path], ROOT, timeout=1500)
    (wheel,) = tmp_path.glob("*.whl")
    assert int(re.search(r"-cp312-abi3-manylinux_2_(\d+)_\w+\.whl$", wheel.name)[1]) <= 28

    folder = root / "tried"
    shutil.rmtree(folder, ignore_errors=True)
    downloads = folder / "wheels"
    sys.path.insert(0, str(ROOT / "packaging"))
    try:
        import wheels as maker
    finally:
        sys.path.pop(0)
    maker.download("3.13", downloads, [f"{wheel}[jax,mpich]"])
    (folder / "train.py").write_text(TRAIN)
    commands = [
        "python -m venv /tried/venv",
        ". /tried/venv/bin/activate",
        f"pip install --quiet --no-index --find-links /tried/wheels '/tried/wheels/{wheel.name}[jax,mpich]'",
        "cd /tried",
        "export KERAS_BACKEND=jax",
        "ldd --version | head -1",
        "keras-hpc doctor",
        "keras-hpc run -n 2 train.py",
    ]
    said = _run([*in_root, "sh", "-euc", "\n".join(commands)], tmp_path, timeout=900)
    assert "GLIBC 2.31" in said
    assert f"keras_hpc             {VERSION} in /tried/venv/" in said
    assert len(re.findall(r"^\[\d\] rank \d of 2 agrees, from /tried/venv/", said, re.M)) == 2, said
