# SPDX-License-Identifier: Apache-2.0
"""A Markdown page of what `python -m benchmarks ... --json` has measured."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from benchmarks import scaling, validation

# What a training step spends its time on, as DeepEx names it. Hidden communication takes no time of the step.
PARTS = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "exposed": "communication, exposed",
    "update": "update",
    "hidden": "communication, hidden",
}
_INTRODUCTION = """\
# Performance

`make bench` writes this page from what the commands below have measured. Each section names its machine and versions.

**Allreduce** (`python -m benchmarks allreduce`): a sum of float32 over all ranks.

- Each rank has a core of its own where there are enough.
- The engine and the MPI library's `MPI_Allreduce` (its default settings) run in turns in the same process. Data are
  rewritten before every operation.
- Times are microseconds of the slowest rank: the 20th percentile, with the median in brackets.
- *private*: an array of the process.
- *segment*: an array made by `keras_hpc.empty`.
- *fusion*: 32 tensors, as in a training step. MPI packs, reduces and unpacks them.
- *floor*: the time of `b = a += b` in place for half of the elements. An allreduce of two ranks cannot avoid moving
  that memory. Below 8 MiB its arrays stay in one core's caches, so it is no bound for arrays that travel between cores.
- `--hosts` makes hosts that share the cores of this machine. Links of the given bandwidth join them. There the floor is
  what each of n hosts must send: 2 (n - 1) / n of the float32 bytes. What fits into a link's burst of 256 KiB goes
  faster.

**Overlap** (`python -m benchmarks overlap`): a step that computes in pieces, and starts the reduction of a tensor after
each piece. Medians of the slowest rank. *hidden* is the share of the reduction's time that does not make the step
longer.

**Gradients** (the same with `--backend`): a step that computes many small gradients, with and without their reduction,
in turns. It shows what one gradient costs on its way from the framework to the engine and back. The engine's own time
is included.

**Training** (`python -m examples.cnn.benchmark`): `fit` on synthetic data, in turns with plain Keras on one rank. Each
rank has one core and computes with one thread. TensorFlow has two inter-op threads; it had one, with which it hides no
reduction, in the rows of HEP-CNN and Inception v3. Medians of the slowest rank. Efficiency is plain Keras' step divided
by this one. On JAX and PyTorch it may exceed 1, because `init()` also lets glibc keep freed memory. The row of one rank
alone shows how much is due to that.

**Peers** (`make bench-peers`, or `python -m benchmarks.peers.compare` with some contenders): the same step with other
ways to train on two ranks, in turns, each against its own step on one rank.

- *exposed* is the time that the second rank adds to the step.
- *apart* are two ranks that have nothing to do with each other. They show what such a machine leaves to two ranks that
  do communicate.
- *Horovod* is its last release, of 2023, built from source for this TensorFlow and Open MPI by
  `benchmarks/peers/install_horovod.sh`. One of its files is left out, which does not compile: the operations for XLA.
  It has no Keras 3, so a plain TensorFlow step trains the same network, with `DistributedGradientTape`. Open MPI yields
  while it waits. Cycles of 1 ms and up to 128 MiB fused are its own choice; where `HOROVOD_CYCLE_TIME` or
  `HOROVOD_FUSION_THRESHOLD` say otherwise, the heading does, too. What we tried: [which-one.md](which-one.md).
- *MWMS* is tf-keras, which is Keras 2, with `MultiWorkerMirroredStrategy` over gRPC.
- `--mbit 1000` and `--mbit 2500`: each rank has a host made of namespaces, as above, with links of 1 or 2.5 Gbit/s.

**Scaling** (`make simulate`, `make simulate-large`): the engine on *simulated* nodes. `python -m benchmarks validation`
shows how near the simulator comes where the engine can be measured. See [simulation.md](simulation.md).
"""


def page(reports: Sequence[dict[str, Any]]) -> str:
    """Returns the page, of one machine and several MPI libraries say."""
    kinds = {
        "allreduce": _allreduce,
        "overlap": _overlap,
        "gradients": _gradients,
        "training": _training,
        "peers": _peers,
        "scaling": _scaling,
        "validation": _validation,
    }
    return "\n".join([_INTRODUCTION, *(kinds[report.get("kind", "allreduce")](report) for report in reports)])


def _heading(report: dict[str, Any]) -> str:
    kind = report.get("kind", "allreduce").capitalize()
    if "title" in report:
        title, *more = report["title"].splitlines()
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        return f"## {kind}: {title}\n\n{' '.join(more) or versions}\n"
    wire = f", ours sent as {report['wire_dtype']} between nodes" if "wire_dtype" in report else ""
    hosts = f" ({report['mbit']} Mbit/s each way)" if report.get("mbit") else ""
    where = f"{report['ranks']} ranks on {report['nodes']} node{'s' * (report['nodes'] > 1)}{hosts}"
    return f"## {kind}: {where}, {report['mpi']}{wire}\n\n{report['machine']}\n"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], text: Container[str]) -> str:
    """Returns a table whose columns are aligned to the right but for those of `text`."""
    rule = ["---" if column in text else "---:" for column in columns]
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)])


def _allreduce(report: dict[str, Any]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        ours = f"{row['keras_hpc_us']:.2f} ({row['keras_hpc_median_us']:.2f})"
        mpi = f"{row['mpi_us']:.2f} ({row['mpi_median_us']:.2f})" if "mpi_us" in row else ""
        floor = f"{row['floor_us']:.2f}"
        return [f"{row['bytes']:,}", row["path"], ours, mpi, str(row.get("speedup", "")), floor, row["algorithm"]]

    columns = ["bytes", "path", "keras_hpc", "MPI", "speed-up", "floor", "way"]
    return f"{_heading(report)}\n{_table(columns, map(cells, report['rows']), {'path', 'way'})}\n"


def _overlap(report: dict[str, Any]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        times = [f"{row[key]:.3f}" for key in ("compute_ms", "alone_ms", "step_ms")]
        return [row["strategy"], *times, f"{row['ratio']:.2f}", f"{row['hidden']:.0%}"]

    rows = report["rows"]
    columns = ["way to wait", "compute ms", "reduction ms", "step ms", "step / compute", "hidden"]
    tensors = f"{rows[0]['tensors']} tensors of {rows[0]['bytes']:,} bytes."
    return f"{_heading(report)}\n{tensors}\n\n{_table(columns, map(cells, rows), {'way to wait'})}\n"


def _gradients(report: dict[str, Any]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        times = [f"{row[key]:.1f}" for key in ("without_us", "step_us")]
        return [row["backend"], str(row["tensors"]), f"{row['bytes']:,}", *times, f"{row['per_gradient_us']:.2f}"]

    columns = ["backend", "gradients", "bytes", "step without reduction, us", "with it, us", "per gradient, us"]
    return f"{_heading(report)}\n{_table(columns, map(cells, report['rows']), {'backend'})}\n"


def _training(report: dict[str, Any]) -> str:
    def step(row: dict[str, Any]) -> list[str]:
        spread = f"{row['step_ms lowest']:.1f} - {row['step_ms highest']:.1f}"
        return [row["runs"], f"{row['step_ms']:.1f}", spread, f"{row['samples/s']:.0f}", f"{row['efficiency']:.3f}"]

    steps = _table(
        ["runs", "ms a step", "lowest - highest", "samples/s", "efficiency"], map(step, report["scaling"]), {"runs"}
    )
    means = [row for row in report["profile"] if row["rank"] == "mean"]
    labels = PARTS
    if "compute" in means[0]:  # reports from before forward was timed alone
        labels = {"input": PARTS["input"], "compute": "forward and backward", **PARTS}
        labels = {name: label for name, label in labels.items() if name in means[0]}
    parts = _table(
        ["runs", *(f"{label}, ms" for label in labels.values())],
        [[row["runs"], *(f"{row[name]:.2f}" for name in labels)] for row in means],
        {"runs"},
    )
    checks = "\n".join(f"`check_replicas` on {name}: {ms:.1f} ms." for name, ms in report["check_replicas_ms"].items())
    return f"{_heading(report)}\n{_training_command(report['arguments'])}\n\n{steps}\n\n{parts}\n\n{checks}\n"


def _training_command(arguments: dict[str, Any]) -> str:
    """Returns what was typed, with how often it measured."""
    options = " ".join(f"--{name} {arguments[name]}" for name in ("model", "backend", "rounds", "steps"))
    return f"`python -m examples.cnn.benchmark {options}`"


def _peers(report: dict[str, Any]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        spread = f"{row['2 ranks ms lowest']:.1f} - {row['2 ranks ms highest']:.1f}"
        one = [row["against"], f"{row['1 rank ms']:.1f}"]
        two = [row["contender"], f"{row['2 ranks ms']:.1f}", spread]
        return [*two, *one, f"{row['efficiency']:.3f}", f"{row['exposed ms']:.1f}"]

    columns = [
        *("2 ranks with", "their step, ms", "lowest - highest"),
        *("1 rank with", "its step, ms", "efficiency", "exposed, ms"),
    ]
    return f"{_heading(report)}\n{_table(columns, map(cells, report['lines']), {'2 ranks with', '1 rank with'})}\n"


def _scaling(report: dict[str, Any]) -> str:
    def cells(row: dict[str, Any]) -> list[str]:
        buckets = f", buckets of {row['bucket_mib']} MiB" if row["bucket_mib"] else ""
        lanes = "" if row["lanes"] == scaling.LANES else f", {row['lanes']} thread{'s' * (row['lanes'] > 1)}"
        noise = f", {row['noise']} noise" if row["noise"] else ""
        step = f"{row['step_ms']:g} ms{noise}"
        times = [f"{row['step']:.2f}", f"{row['exposed_ms']:.2f}", f"{row['efficiency']:.1%}"]
        reach = f"{row['perfect_ms'] / row['step']:.3f}"
        return [row["platform"], row["model"], step, row["way"] + buckets + lanes, f"{row['nodes']:,}", *times, reach]

    columns = [
        *("platform", "model", "a step alone", "reduced by", "nodes", "simulated step, ms", "exposed, ms"),
        *("simulated efficiency", "of a perfect overlap"),
    ]
    text = {"platform", "model", "a step alone", "reduced by"}
    platforms = [
        [name, *(f"{platform[what]}" for what in ("description", "nodes", "gb_per_s", "latency_us"))]
        for name, platform in report["platforms"].items()
    ]
    links = ["platform", "stands for", "nodes", "GB/s of a link", "latency of a link, us"]
    assumptions = _table(["taken for granted", ""], report["assumptions"].items(), {"taken for granted", ""})
    simulated = f"Simulated in {report['seconds']} s on {report['machine']}."
    rows = _table(columns, map(cells, report["rows"]), text)
    if report.get("large"):
        return f"## Scaling: simulated, many nodes, {report['simgrid']}\n\n{simulated}\n\n{rows}\n"
    return (
        f"## Scaling: simulated, {report['simgrid']}\n\n{simulated} "
        "*perfect overlap*: a step in which the link carries each gradient from the moment it is there, and nothing "
        "else takes time.\n\n![simulated efficiency against nodes](performance/scaling.png)\n\n"
        f"{rows}\n\n"
        f"{_table(links, platforms, {'platform', 'stands for'})}\n\n{assumptions}\n"
    )


def validation_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns what was measured beside what was simulated."""

    def cells(row: dict[str, Any]) -> list[str]:
        link = f"{row['mbit']} Mbit/s" if row["mbit"] else "no limit"
        times = [f"{row['measured_ms']:.2f}", f"{row['simulated_ms']:.2f}", f"{validation.error(row):+.1%}"]
        exposed = ["", ""]
        if "compute_ms" in row:
            exposed = [f"{row['measured_exposed_ms']:.1f} / {row['simulated_exposed_ms']:.1f}"]
            exposed.append(f"{validation.error(row, 'exposed_ms'):+.0%}")
        network = [f"{row['latency_us']:.0f}", f"{row['together_gb_per_s']:.2f}"]
        return [str(row["hosts"]), link, *network, row["what"], *times, *exposed]

    columns = [
        *("hosts", "link", "latency, us", "all hosts, GB/s", "what", "measured, ms", "simulated, ms", "error"),
        *("exposed: measured / simulated, ms", "its error"),
    ]
    return _table(columns, map(cells, rows), {"link", "what"})


def _validation(report: dict[str, Any]) -> str:
    return (
        f"## Scaling: the simulator against the engine, {report['mpi']}\n\n{report['machine']}. Hosts made of "
        "namespaces, which share its cores, and so what these can send (*all hosts*); medians; nothing is fitted. "
        f"{validation.summary(report['rows'])}.\n\n"
        f"{validation_table(report['rows'])}\n"
    )
