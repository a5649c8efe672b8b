# SPDX-License-Identifier: Apache-2.0
"""A Markdown page of what `python -m keras_hpc bench ... --json` has measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INTRODUCTION = """\
# Performance

Made by `make bench`. Allreduce: `python -m keras_hpc bench allreduce`, a sum of float32 over all ranks, each rank on a
core of its own where there are enough, in turns with the MPI library's `MPI_Allreduce` (its default settings) in the
same process, data rewritten before every operation. Times are microseconds, 20th percentile (median in brackets), of
the slowest rank.
*private*: an array of the process. *segment*: one made by `keras_hpc.empty`. *fusion*: 32 tensors, as in a
training step; MPI packs, reduces and unpacks them. *floor*: `b = a += b` in place for half of the elements,
the memory that an allreduce of two ranks cannot avoid to move. Below 8 MiB its arrays stay in one core's
caches, and it is no bound for arrays that travel between cores. With hosts made by `--hosts`, which share the cores of
this machine and are joined by links of the given bandwidth, the floor is what each of n hosts must send, 2 (n - 1) / n
of the float32 bytes; what fits into a link's burst of 256 KiB goes faster.

Overlap: `python -m keras_hpc bench overlap`, a step that computes in pieces and starts the reduction of a tensor after
each. Medians of the slowest rank; *hidden* is the share of the reduction's time that the step does not take longer.
"""


def page(reports: Sequence[dict[str, Any]]) -> str:
    """Returns the page, of one machine and several MPI libraries say."""
    parts = [_INTRODUCTION]
    for report in reports:
        kind = report.get("kind", "allreduce")
        wire = f", ours sent as {report['wire_dtype']} between nodes" if "wire_dtype" in report else ""
        hosts = f" ({report['mbit']} Mbit/s each way)" if "mbit" in report else ""
        where = f"{report['ranks']} ranks on {report['nodes']} node{'s' * (report['nodes'] > 1)}{hosts}"
        parts.append(f"## {kind.capitalize()}: {where}, {report['mpi']}{wire}\n\n{report['machine']}\n")
        parts.append({"allreduce": _allreduce, "overlap": _overlap}[kind](report["rows"]))
    return "\n".join(parts)


def _allreduce(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| bytes | path | keras_hpc | MPI | speed-up | floor | way |", "|---:|---|---:|---:|---:|---:|---|"]
    for row in rows:
        ours = f"{row['keras_hpc_us']:.2f} ({row['keras_hpc_median_us']:.2f})"
        mpi = f"{row['mpi_us']:.2f} ({row['mpi_median_us']:.2f})" if "mpi_us" in row else ""
        cells = [f"{row['bytes']:,}", row["path"], ours, mpi, str(row.get("speedup", "")), f"{row['floor_us']:.2f}"]
        lines.append(f"| {' | '.join([*cells, row['algorithm']])} |")
    return "\n".join(lines) + "\n"


def _overlap(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{rows[0]['tensors']} tensors of {rows[0]['bytes']:,} bytes.\n",
        "| way to wait | compute ms | reduction ms | step ms | step / compute | hidden |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        times = [f"{row[key]:.3f}" for key in ("compute_ms", "alone_ms", "step_ms")]
        lines.append(f"| {row['strategy']} | {' | '.join(times)} | {row['ratio']:.2f} | {row['hidden']:.0%} |")
    return "\n".join(lines) + "\n"
