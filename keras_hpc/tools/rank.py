# SPDX-License-Identifier: Apache-2.0
"""What a rank of `keras_hpc run` does first: takes its cores, threads and output, then becomes the user's program.

Run as a file, with the standard library alone, so it takes a few milliseconds. Becoming the program, instead of
starting it, leaves launcher, signals and exit status as they would be without us.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import sys
from pathlib import Path

# In a batch script Slurm sets its own in front of mpiexec: they come last.
_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PALS_RANKID", "SLURM_PROCID")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")


def main() -> None:
    """Becomes the command after `--`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pin", action="store_true", help="take cores of this node")
    parser.add_argument("--cores", type=int, help="so many; default: this rank's share")
    parser.add_argument("--threads", type=int, help="that compute; default: one for each core, less one to communicate")
    parser.add_argument("--output-dir", type=Path, help="where a file gets the output")
    parser.add_argument("--label", action="store_true", help="begin each line of output with the rank")
    parser.add_argument("command", nargs="+")
    wanted = parser.parse_args()
    if wanted.output_dir:
        _write_to(wanted.output_dir / f"rank{_number(_RANK)}.txt")
    elif wanted.label:
        _label(f"[{_number(_RANK)}] ".encode())
    pinned = _pin(_number(_LOCAL_RANK), _number(_LOCAL_SIZE), wanted.cores) if wanted.pin else 0
    if wanted.threads:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC"), str(wanted.threads))
    elif pinned:  # init() would do it, but too late for libraries that are loaded before
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, pinned - 1)))
    os.execv(wanted.command[0], wanted.command)


def _number(names: tuple[str, ...]) -> int:
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    sys.exit(
        f"keras_hpc run: this launcher does not tell a rank who it is. Expected one of {', '.join(names)}. Leave "
        "--output-dir out, and use --no-pin and --no-label."
    )


def _pin(local_rank: int, local_size: int, wanted: int | None) -> int:
    """Keep this process to cores of its own, where there are enough; returns how many."""
    cores = sorted(os.sched_getaffinity(0))
    share = wanted or len(cores) // local_size
    if share * local_size > len(cores) or share == 0:
        if wanted:
            sys.exit(
                f"keras_hpc run: `--cores` is the number of cores of each rank. Expected at most "
                f"{len(cores) // local_size}: {local_size} ranks share {len(cores)} cores here. Received: {wanted}"
            )
        return 0
    os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])
    return share


def _write_to(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
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
