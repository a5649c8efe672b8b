# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a contender, with a core and a thread each, and reads the times of their steps."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import tempfile

import numpy as np

from benchmarks.hosts import Hosts
from examples.launch import ENVIRONMENT
from keras_hpc.tools import launchers
from keras_hpc.tools import rank as rank_shim

TIME_LIMIT_S = 600  # of a run
# Open MPI's default spins; with ranks that fill the cores yielding is the better setting for it.
SETTINGS = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # All get what keras_hpc.init() asks of glibc: on JAX and PyTorch steps are faster by much, whoever communicates.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "CUDA_VISIBLE_DEVICES": "",
}


def run(python, module, options, args, *, ranks, mpi, backend):
    """Makes a run; returns the median step, milliseconds, of the slowest rank in each step.

    Raises:
        RuntimeError: a rank failed.
    """
    settings = ENVIRONMENT | SETTINGS | {"KERAS_BACKEND": backend} | tuned()
    words = [python, "-m", module, "--model", args.model, "--batch-size", args.batch_size, "--steps", args.steps]
    words = [str(word) for word in (*words, *options)]
    hosts = Hosts(ranks, args.mbit) if args.mbit and ranks > 1 else contextlib.nullcontext()
    with tempfile.TemporaryFile("w+") as log, hosts as network:
        start = _by_mpiexec if mpi else _one_by_one
        commands = start(words, settings, ranks, network)
        cores = sorted(os.sched_getaffinity(0))
        processes = []
        try:
            for number, (command, more) in enumerate(commands):
                # The namespaces of hosts have their own share; mpiexec's ranks take one core each themselves.
                keep = cores[:ranks] if mpi or network else [cores[number % len(cores)]]
                os.sched_setaffinity(0, keep)
                env = os.environ | settings | more
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            statuses = [process.wait(TIME_LIMIT_S) for process in processes]
        finally:
            os.sched_setaffinity(0, cores)
            for process in processes:
                process.kill()
        log.seek(0)
        said = log.read()
    if any(statuses):
        raise RuntimeError(f"{' '.join(words)} ended with {statuses}:\n{said[-3000:]}")
    return float(np.median(np.max(times(said), axis=0)))


def tuned():
    """Returns the variables by which the user tunes Horovod."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("HOROVOD_")}


def _by_mpiexec(words, settings, ranks, network):
    """The one command that starts all, and what its environment has more."""
    python = words[0]
    shim = [python, "-I", rank_shim.__file__, "--pin", "--cores", "1", "--threads", "1", "--"]
    found = launchers.mpiexec_at(os.path.join(os.path.dirname(python), "mpiexec"))
    more = launchers.mpiexec_environment(ranks, placed=network is not None, pinned=True)
    if network is None:
        return [([*launchers.mpiexec_command(found, ranks), *shim, *words], more)]
    more |= network.environment
    launcher = launchers.mpiexec_command(found, ranks, [(name, 1) for name in network.names], settings | more)
    there = ["env", *(f"{name}={value}" for name, value in settings.items())]  # Open MPI leaves them here
    return [(network.on_head([*launcher, *there, *shim, *words]), more)]


def _one_by_one(words, _, ranks, network):
    """A command for each rank, and what tells it of the others."""
    if ranks == 1:
        return [(words, {})]
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(ranks)]
        ports = [server.getsockname()[1] for server in free]
    hosts = network.names if network else ["127.0.0.1"] * ranks
    meeting = {
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(ports[0]),
        "WORLD_SIZE": str(ranks),
        "ADDRESSES": ",".join(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)),
    }
    commands = []
    for number in range(ranks):
        command = [network.agent, hosts[number], shlex.join(words)] if network else words
        commands.append((command, meeting | {"RANK": str(number)}))
    return commands


def times(said):
    """Returns the steps of each rank, from what the scripts printed."""
    found = []
    for line in said.splitlines():
        if "RESULT " in line:
            text = line.partition("RESULT ")[2]
            if text.startswith("{"):  # benchmark_rank.py tells of all ranks
                found += [rank["step_ms"] for rank in json.loads(text)["ranks"]]
            else:
                found.append(json.loads(text.partition(" ")[2]))
    return found
