"""`doctor` across hosts: it finds the one whose network is slow."""

import os
import re
import sys

import pytest
from launch import child_environment, launch

from benchmarks.hosts import Hosts, HostsError
from keras_hpc.tools import launchers

pytestmark = [pytest.mark.mpi, pytest.mark.soak]


def test_the_slow_host_is_named(tmp_path):
    mpiexec = launchers.find_mpiexec(launchers.find_library())
    command = launchers.mpiexec_command(mpiexec, 3, [(f"host{i}", 1) for i in (1, 2, 3)])
    command += [sys.executable, "-m", "keras_hpc", "doctor", "--parameters", "1000"]
    # Over the network, not through the memory that hosts of one machine share.
    tcp = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    try:
        with Hosts(3) as hosts:
            hosts.limit("host2", 200)
            env = child_environment("jax", os.environ | tcp | hosts.environment)
            done = launch(1, hosts.on_head(command), timeout=120, env=env, cwd=tmp_path, mpi=False)
    except HostsError as why:
        pytest.skip(str(why))
    assert done.returncode == 0, done.output
    assert re.search(r"^  1 +1 +0 +host2 ", done.output, re.M), done.output
    found = re.findall(r"hint: (node \d) is slow: its links to other nodes [\d.]+ us, ([\d.]+) GB/s", done.output)
    assert [node for node, _ in found] == ["node 1"], done.output
    assert float(found[0][1]) < 0.05, "200 Mbit/s are 0.025 GB/s"
