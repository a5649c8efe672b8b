"""Fixtures for tests that start ranks. No MPI and no framework in the process of the tests themselves."""

import gc
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import forks
import pytest
from launch import ROOT, Run, child_environment, launch
from xdist.scheduler import LoadScopeScheduling

# For `import examples`; last, so that an installed keras_hpc goes before the source folder.
sys.path.append(str(ROOT))

RunRanks = Callable[..., Run]


def pytest_addoption(parser):
    parser.addoption("--all-ranks", action="store_true", help="run every check on 1, 2, 3 and 4 ranks (an hour)")
    parser.addoption("--every-mpi", action="store_true", help="train with every MPI, started by mpiexec and by srun")


# What takes longest begins first, or one worker would wait for the other at the end. Others begin by their number of
# tests, which says nothing of how long these take.
LONG = [
    *(f"tests/test_ranks.py {job}" for job in ("tensorflow-2", "jax-2", "torch-2")),
    "tests/test_readme.py",
    "tests/test_failures.py",
    "tests/test_idioms.py",
    "tests/test_simulator.py",
    "tests/test_gpu.py",
    "tests/test_device_plan.py",
    "tests/test_device_errors.py",
    "tests/test_examples.py",
    *(f"tests/test_ranks.py {job}" for job in ("jax-3", "tensorflow-3", "torch-3", "torch-4")),
    "tests/cluster/test_slurm.py",
    "tests/cluster/test_mpich_network.py",
    "tests/cluster/test_mpis.py",
    "tests/test_doctor.py",
    "tests/test_watchdog.py",
    "tests/test_resume.py",
    "tests/test_console.py",
    "tests/test_migrate.py",
    "tests/test_jets.py",
    "tests/test_memory.py",
    "tests/test_gan3d_networks.py",
    "tests/test_selection.py",
    "tests/test_bench.py",
]


class ByJob(LoadScopeScheduling):
    """Leaves the tests of a file to one worker; those of test_ranks.py that share a backend and a number of ranks."""

    def _split_scope(self, nodeid):
        file, _, test = nodeid.partition("::")
        job = re.search(r"-(\w+-\d)\]$", test) if file.endswith("test_ranks.py") else None
        return f"{file} {job[1]}" if job else file

    def _assign_work_unit(self, node):
        for scope in LONG:
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)


def pytest_collection_finish():
    """Spare the garbage collector what frameworks made when imported: it looks at millions of objects each time."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # the ranks of a check run without pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    return ByJob(config, log)


def _tail(text: str, limit: int = 12_000) -> str:
    return text if len(text) <= limit else f"[... {len(text) - limit} characters]\n{text[-limit:]}"


@pytest.fixture
def run_ranks() -> RunRanks:
    """A function that starts ranks, waits for them, and fails the test with their output if anything is amiss.

    `run_ranks(n, args, timeout=120, env=None, backend="tensorflow", expect_failure=False, mpi=True, lean=True)` runs
    `python args...` on `n` ranks (`mpi=False`: one process without mpiexec; `lean=False`: with all that is installed)
    and returns a `launch.Run`. What is in `before` stands before it in each rank's command; `python=False`: the
    arguments are the whole command. Lean ranks are forks that need not import their framework: see forks.py.
    """

    def run(
        n: int,
        args: list[str | Path],
        *,
        timeout: float = 120,
        env: dict[str, str] | None = None,
        backend: str = "tensorflow",
        expect_failure: bool = False,
        mpi: bool = True,
        lean: bool = True,
        before: Sequence[str] = (),
        python: bool = True,
        **options: Path,
    ) -> Run:
        # What is set before a rank starts, its cores apart, a fork does not have.
        interpreter = [] if not python else forks.python(backend) if lean and not before else [sys.executable]
        command = [*before, *interpreter, *map(str, args)]
        environment = child_environment(backend, env, lean)
        if args[0] == "-m" and str(args[1]).startswith(("examples", "benchmarks")):
            environment["TESTS_EXAMPLES"] = "1"
        done = launch(n, command, timeout=timeout, env=environment, mpi=mpi, **options)
        report = f"{n} ranks, {backend}: {' '.join(map(str, args))}\n{_tail(done.output)}"
        if done.returncode is None:
            pytest.fail(f"still running after {timeout} s, ended by the test: {report}", pytrace=False)
        if done.leaked_processes:
            pytest.fail(f"left processes {done.leaked_processes} behind: {report}", pytrace=False)
        if expect_failure != (done.returncode != 0):
            pytest.fail(f"ended with {done.returncode}: {report}", pytrace=False)
        return done

    return run
