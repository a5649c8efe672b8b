# SPDX-License-Identifier: Apache-2.0
"""What a rank of `keras_hpc run` does first: takes GPU, cores, threads and output, then becomes the user's program.

Run as a file, with the standard library alone, so it takes a few milliseconds. Becoming the program, instead of
starting it, leaves launcher, signals and exit status as they would be without us.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import selectors
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# In a batch script Slurm sets its own in front of mpiexec: they come last.
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PALS_RANKID", "SLURM_PROCID")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")

# Where NVIDIA's driver names its GPUs, and where Linux says which cores are beside them.
_DRIVER = Path("/proc/driver/nvidia/gpus")
_BUS = Path("/sys/bus/pci/devices")
_DEVICES = Path("/dev")


def main() -> None:
    """Becomes the command after `--`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pin", action="store_true", help="take cores of this node")
    parser.add_argument("--cores", type=int, help="so many; default: this rank's share")
    parser.add_argument("--threads", type=int, help="that compute; default: one for each core, less one to communicate")
    parser.add_argument("--output-dir", type=Path, help="where a file gets the output")
    parser.add_argument("--append", action="store_true", help="behind what the file has: of the job before")
    parser.add_argument("--label", action="store_true", help="begin each line of output with the rank")
    parser.add_argument("command", nargs="+")
    wanted = parser.parse_args()
    if wanted.output_dir:
        _write_to(wanted.output_dir / f"rank{_number(_RANK)}.txt", append=wanted.append)
    elif wanted.label:
        _label(f"[{_number(_RANK)}] ".encode())
    pinned = 0
    if wanted.pin:
        local_rank, local_size = _number(_LOCAL_RANK), _number(_LOCAL_SIZE)
        gpus = _gpus(local_size)
        if gpus:  # init() would do it, but too late for what is imported before
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank][0]
        pinned = _pin(local_rank, local_size, wanted.cores, [beside for _, beside in gpus])
    if wanted.threads:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"), str(wanted.threads))
    elif pinned and "OMP_NUM_THREADS" not in os.environ:  # init() would do it, but too late for what is loaded before
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "KERAS_HPC_RUN_OMP_NUM_THREADS"), str(max(1, pinned - 1)))
    os.execv(wanted.command[0], wanted.command)


def _number(names: tuple[str, ...]) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    sys.exit(
        f"keras_hpc run: this launcher does not tell a rank who it is. Expected one of {', '.join(names)}. Leave "
        "--output-dir out, and use --no-pin and --no-label."
    )


def _gpus(ranks: int) -> list[tuple[str, frozenset[int]]]:
    """Find a GPU for each rank of this node; none where there are not enough, or none whose names are known.

    Returns:
        For each local rank, how CUDA_VISIBLE_DEVICES names its GPU, and the cores beside it, as far as they are known.
    """
    models = set()
    beside = {}
    for folder in sorted(_DRIVER.glob("*")):  # by their places on the bus
        with contextlib.suppress(OSError, KeyError):
            facts = dict(re.findall(r"(.+):\s*(.*?)\s*\n", (folder / "information").read_text()))
            os.close(os.open(_DEVICES / f"nvidia{facts['Device Minor']}", os.O_RDWR))  # else it is not this job's
            beside[facts["GPU UUID"]] = _cores_beside(folder.name)
            models.add(facts["Model"])
    # Of different ones CUDA puts the fastest first, and a rank may want that one.
    all_named = ",".join(beside) if len(models) == 1 else ""
    named = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", all_named).split(",")))
    if len(named) < ranks or not all(re.fullmatch(r"\d+|(GPU|MIG)-[0-9a-fA-F/-]+", name) for name in named):
        return []
    in_order = list(beside.values())

    def cores(name: str) -> frozenset[int]:
        if name.isdecimal():  # places on the bus, unless GPUs differ: then only the cores are not the nearest
            return in_order[int(name)] if int(name) < len(in_order) else frozenset()
        return next((found for uuid, found in beside.items() if uuid.startswith(name)), frozenset())

    return [(name, cores(name)) for name in named[:ranks]]


def _cores_beside(bus_id: str) -> frozenset[int]:
    try:
        text = (_BUS / bus_id.lower() / "local_cpulist").read_text().strip()
    except OSError:
        return frozenset()
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def _pin(local_rank: int, local_size: int, wanted: int | None, beside: Sequence[frozenset[int]]) -> int:
    """Keep this process to cores of its own, where there are enough; returns how many.

    Args:
        local_rank: this rank's number on its node.
        local_size: how many there are.
        wanted: cores of each; None: its share.
        beside: for each of them the cores beside its GPU, or none.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = wanted or len(cores) // local_size
    if share * local_size > len(cores) or share == 0:
        if wanted:
            sys.exit(
                f"keras_hpc run: `--cores` is the number of cores of each rank. Expected at most "
                f"{len(cores) // local_size}: {local_size} ranks share {len(cores)} cores here. Received: {wanted}"
            )
        return 0
    os.sched_setaffinity(0, _shares(cores, share, beside or [frozenset()] * local_size)[local_rank])
    return share


def _shares(cores: Sequence[int], share: int, beside: Sequence[frozenset[int]]) -> list[list[int]]:
    """Share out cores: to each of the ranks so many, beside its GPU as long as there are such, then what is left."""
    left = list(cores)
    shares: list[list[int]] = []
    for near in beside:
        shares.append([core for core in left if core in near][:share])
        left = [core for core in left if core not in shares[-1]]
    for mine in shares:
        more = left[: share - len(mine)]
        mine += more
        left = left[len(more) :]
    return shares


def _write_to(file: Path, *, append: bool) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC), 0o666)
    except OSError as error:
        sys.exit(f"keras_hpc run: `--output-dir` is a folder that every rank can write to. Received: {error}")
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _label(label: bytes) -> None:
    """Leads stdout and stderr through a process that begins each line with the label.

    Launchers have options for this, but label whatever arrives in one piece, which may be half of a line.
    """
    pipes = {stream: os.pipe() for stream in (1, 2)}
    if os.fork() == 0:
        if os.fork() == 0:  # a grandchild: the user's program must not find a child that it does not know
            for _, writing in pipes.values():
                os.close(writing)
            _pass_on({reading: stream for stream, (reading, _) in pipes.items()}, label)
        os._exit(0)
    os.wait()
    for stream, (reading, writing) in pipes.items():
        os.dup2(writing, stream)
        os.close(reading)
        os.close(writing)


def _pass_on(streams: dict[int, int], label: bytes) -> None:
    """Until the other ends of all pipes are closed. Signals are for the user's program: its last words must get out."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    begun = dict.fromkeys(streams, b"")
    with selectors.DefaultSelector() as selector:
        for reading in streams:
            selector.register(reading, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                *lines, rest = (begun[key.fd] + data).split(b"\n")
                begun[key.fd] = rest
                if not data:
                    selector.unregister(key.fd)
                    lines = [rest] if rest else []
                _write(streams[key.fd], b"".join(label + line + b"\n" for line in lines))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
