"""Fixtures for tests on several hosts: a Slurm, what one rank computes, and the comparison with it."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import child_environment, launch

FOLDER = Path(__file__).parent
CANNOT = 77  # with_slurm.py where a machine cannot do it
# MPICH 5.0 over UCX introduces itself in lines longer than Slurm's pmi2 reads, so that MPI_Init fails or hangs: see
# docs/clusters.md.
SHORT_ADDRESSES = {"MPIR_CVAR_CH4_NETMOD": "ofi"}


@pytest.fixture
def slurm(tmp_path):
    """A function that runs a shell command in a Slurm of so many hosts, in an empty folder, and returns a `launch.Run`.

    `status`: what it must end with; None: any failure. `python`: which is first on the PATH. `must_end`: whether what
    it was to do is not enough.
    """

    def run(hosts, command, *, status=0, timeout=240, python=sys.executable, env=None, must_end=True):
        path = {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}
        words = [sys.executable, str(FOLDER / "with_slurm.py"), str(hosts), "bash", "-c", command]
        everything = child_environment("jax", path | SHORT_ADDRESSES | (env or {}))
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
    done = launch(1, words, timeout=120, env=child_environment("jax"), mpi=False)
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
