# SPDX-License-Identifier: Apache-2.0
"""How long an allreduce takes: ours, the MPI library's, and what memory alone would allow.

All ways run in one process, in turns, so that a noisy machine is noisy for all of them. Each rank rewrites its data
before every operation. Of every repetition the slowest rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_hpc import _native
from keras_hpc.job.team import Team
from keras_hpc.tools import tables

# Rows of the report: how the data lie, and what MPI is given to do in their place.
PATHS = {"private": "mpi", "segment": "mpi", "fusion": "mpi fusion"}
Row = dict[str, Any]
_OTHERS = ("mpi nonblocking", "floor")
_BATCH_BYTES = 16 << 10  # below it one operation is too short for the clock


def measure(
    team: Team,
    sizes: Sequence[int],
    seconds: float,
    done: Callable[[list[Row]], None],
    tensors: int = 32,
    wire_dtype: str | None = None,
    mbit: int | None = None,
) -> list[Row]:
    """Times an allreduce (sum of float32) of each size. Collective.

    Args:
        team: without communication threads, two ranks or more.
        sizes: bytes.
        seconds: about how long to measure each size.
        done: called with the rows of each size as soon as they are known.
        tensors: of the "fusion" rows: so many tensors are packed, reduced and unpacked.
        wire_dtype: "float16" or "bfloat16": ours are rounded to it between nodes, MPI's are not.
        mbit: bandwidth of each node's link, Mbit/s each way, if it is known: the floor is that of the network then.

    Returns:
        One dictionary per size and path, the same on all ranks. Times are in microseconds: `keras_hpc_us`, `mpi_us` and
        `floor_us` are 20th percentiles over the repetitions, which noise moves least, `..._median_us` are medians.
        `speedup` is `mpi_us / keras_hpc_us`.

    Raises:
        CommunicationError: a way gave a wrong result; nothing is timed then.
    """
    rows = []
    for nbytes in sizes:
        watch = _native.Stopwatch(team.native, nbytes, tensors, wire_dtype or "")
        ways = [way for way in (*PATHS, *dict.fromkeys(PATHS.values()), *_OTHERS) if watch.can(way)]
        for way in ways:
            wrong = team.allgather(np.array([not watch.verify(way)])).nonzero()[0]
            if len(wrong):
                raise _native.Error(f"{way}: wrong result for {nbytes} bytes on rank {', '.join(map(str, wrong))}")
        times = _times(team, watch, ways, nbytes, seconds)
        mine = [_row(nbytes, path, watch.chosen(path), times) for path in PATHS]
        if mbit and team.node_count > 1:
            sent = 2 * (team.node_count - 1) / team.node_count * nbytes
            for row in mine:
                row["floor_us"] = row["floor_median_us"] = round(8 * sent / mbit, 3)
        done(mine)
        rows += mine
    return rows


def _times(team: Team, watch: Any, ways: Sequence[str], nbytes: int, seconds: float) -> dict[str, np.ndarray]:
    """Seconds of each repetition of each way, by the slowest rank."""
    first = np.array([np.median(watch.time(way, 3)) for way in ways])  # warms up, too
    team.allreduce(first, "max")
    # The shorter ones many in a row, up to a tenth of a millisecond. All ranks count alike.
    batches = [int(np.clip(1e-4 / t, 1, 200)) if nbytes < _BATCH_BYTES else 1 for t in first]
    repeats = int(np.clip(seconds / (1.5 * np.dot(first, batches)), 12, 400))
    rounds = 6  # in turns, but a few in a row: the first after another way finds other data in the caches
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, batch in zip(ways, batches, strict=True):
            samples[way] += watch.time(way, -(-repeats // rounds), batch)
    return {way: team.allgather(np.array([s])).max(axis=0) for way, s in samples.items()}


def _row(nbytes: int, path: str, algorithm: str, times: dict[str, np.ndarray]) -> Row:
    row: Row = {"bytes": nbytes, "path": path, "algorithm": algorithm}
    ways = {"keras_hpc": path, "mpi": PATHS[path], "mpi_iallreduce": "mpi nonblocking", "floor": "floor"}
    for name, way in ways.items():
        if way in times:
            row[f"{name}_us"] = round(float(np.percentile(times[way], 20)) * 1e6, 3)
            row[f"{name}_median_us"] = round(float(np.median(times[way])) * 1e6, 3)
    if "mpi_us" in row:
        row["speedup"] = round(row["mpi_us"] / max(row["keras_hpc_us"], 1e-3), 2)
    return row


_NUMBERS = {
    "keras_hpc us": "keras_hpc_us",
    "median": "keras_hpc_median_us",
    "MPI us": "mpi_us",
    "MPI median": "mpi_median_us",
    "floor us": "floor_us",
    "speed-up": "speedup",
}
COLUMNS = (
    tables.Column("bytes", 10, right=True),
    tables.Column("path", 8),
    *(tables.Column(name, 10, right=True) for name in _NUMBERS),
    tables.Column("algorithm", 10),
)


def cells(row: Row) -> tuple[str, ...]:
    """Returns a row as text."""
    numbers = (f"{row.get(key, float('nan')):.2f}" for key in _NUMBERS.values())
    return (str(row["bytes"]), row["path"], *numbers, row["algorithm"])


def plot(report: dict[str, Any], file: Path) -> None:
    """Draws time and bandwidth against size."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    curves = {f"keras_hpc, {path}": (path, "keras_hpc_us", f"C{i}-o") for i, path in enumerate(PATHS)}
    curves["MPI_Allreduce"] = ("private", "mpi_us", "k--s")
    curves["pack, MPI_Allreduce, unpack"] = ("fusion", "mpi_us", "k:^")
    for label, (path, key, style) in curves.items():
        rows = [row for row in report["rows"] if row["path"] == path and key in row]
        sizes, times = [row["bytes"] for row in rows], [row[key] for row in rows]
        left.plot(sizes, times, style, label=label, markersize=4)
        right.plot(
            sizes, [size / us / 1e3 for size, us in zip(sizes, times, strict=True)], style, label=label, markersize=4
        )
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="µs, 20th percentile", title="Time of an allreduce")
    right.set(xscale="log", xlabel="bytes", ylabel="GB/s (bytes / time)", title="Bandwidth")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['ranks']} ranks on {report['nodes']} node(s), {report['mpi']}", fontsize=10)
    figure.savefig(file, dpi=150)
    plt.close(figure)
