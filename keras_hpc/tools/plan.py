# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc plan`: what a job will need before it is started, and what will limit it.

An epoch of n samples takes n / (b k) steps of k ranks with batches of b. To keep up with steps of t seconds, samples of
S bytes must be read at k b S / t (Kurth et al., "TensorFlow at Scale", Cray User Group 2018). A reduction of G bytes
over M nodes moves 2 (M - 1) / M G through each node's link (Patarasuk and Yuan, 2009) in at least 2 log2(M) messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from keras_hpc.tools import simulator, tables, timeline

_BACKWARD = 2 / 3  # of a step, behind which a reduction can hide
_MEMORY_GB_PER_S = 5.0  # between ranks of a node, where nobody has measured it
_LATENCY_US = 5.0
_MOST = 1e18  # of anything
_LONGEST_SECONDS = 4 * 3600  # of a simulation


@dataclasses.dataclass(frozen=True)
class Job:
    """What is planned.

    Attributes:
        ranks: of the job.
        nodes: on which they are, in equal parts.
        samples: of an epoch.
        batch_size: of each rank.
        step_ms: time of a step on one rank alone, milliseconds.
        parameters: trainable, float32.
        sample_bytes: of one sample, as it is read.
    """

    ranks: int
    nodes: int
    samples: int
    batch_size: int
    step_ms: float
    parameters: int
    sample_bytes: float


@dataclasses.dataclass(frozen=True)
class Network:
    """How fast ranks reach each other.

    Attributes:
        between_gb_per_s: of a node's link, GB/s.
        between_us: latency between nodes, microseconds.
        inside_gb_per_s: between ranks of a node, GB/s.
    """

    between_gb_per_s: float
    between_us: float = _LATENCY_US
    inside_gb_per_s: float = _MEMORY_GB_PER_S


def estimate(job: Job, network: Network) -> dict[str, float]:
    """Return what the job needs: see the module.

    Returns:
        a dictionary: `global_batch`; `steps` of an epoch; `epoch_s`; `read_gb_per_s` of all ranks together, so that
        input keeps up; `gradient_mb` of each rank and step; `sent_mb` through each node's link; `reduction_ms`;
        `efficiency`, of each rank, if two thirds of a step, its backward pass, hide the reduction as far as they can;
        `efficiency_exposed`, if nothing does.
    """
    seconds = job.step_ms / 1e3
    gradients = 4.0 * job.parameters
    per_node = job.ranks / job.nodes
    sent = 2 * (job.nodes - 1) / job.nodes * gradients
    reduction = 2 * (per_node - 1) / per_node * gradients / (network.inside_gb_per_s * 1e9)
    if job.nodes > 1:
        reduction += sent / (network.between_gb_per_s * 1e9)
        reduction += 2 * math.ceil(math.log2(job.nodes)) * network.between_us / 1e6
    exposed = max(0.0, reduction - _BACKWARD * seconds)
    steps = math.ceil(job.samples / (job.batch_size * job.ranks))
    return {
        "global_batch": job.batch_size * job.ranks,
        "steps": steps,
        "epoch_s": steps * (seconds + exposed),
        "read_gb_per_s": job.ranks * job.batch_size * job.sample_bytes / seconds / 1e9,
        "gradient_mb": gradients / 1e6,
        "sent_mb": sent / 1e6,
        "reduction_ms": 1e3 * reduction,
        "efficiency": seconds / (seconds + exposed),
        "efficiency_exposed": seconds / (seconds + reduction),
    }


def limit(found: dict[str, float], step_ms: float, read_gb_per_s: float | None) -> str:
    """Return one line: what limits the job, and what can be done."""
    needed = found["read_gb_per_s"]
    if read_gb_per_s is not None and needed > read_gb_per_s:
        slower = needed / read_gb_per_s
        return (
            f"input is the limit: the ranks need {needed:.3g} GB/s and get {read_gb_per_s:.3g}, so steps take "
            f"{slower:.2g} times as long ({step_ms * slower:.3g} ms). Keep the data in memory or on local disks "
            "(`keras_hpc.data.stage`), make samples smaller, or read fewer of them"
        )
    if found["efficiency"] < 0.9:
        return (
            f"communication is the limit: {found['reduction_ms']:.3g} ms a step, more than backward can hide. A larger "
            '`batch_size`, `init(wire_dtype="bfloat16")`, or `configure_team(schedule="pipelined")`'
        )
    if read_gb_per_s is None:
        return f"computing, if the file system reads {needed:.3g} GB/s for this job (--read-gb-per-s tells)"
    return "computing"


def add_command(commands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = commands.add_parser(
        "plan",
        help="what a job will need: steps, read bandwidth, communication, efficiency",
        description="Computes what a job will need before it is started, and says whether computing, communication or "
        "input will be its limit. Measure the network with `doctor --json FILE` on a few nodes.",
    )
    whole, amount = _number(int), _number(float)
    parser.add_argument("--ranks", type=whole, metavar="K", help="ranks of the job")
    parser.add_argument("--nodes", type=whole, metavar="M", help="nodes, with equal parts of them (default: K)")
    parser.add_argument("--samples", type=whole, metavar="N", help="samples of an epoch")
    parser.add_argument("--batch-size", type=whole, metavar="B", help="samples of each rank and step")
    parser.add_argument("--step-ms", type=amount, metavar="MS", help="time of one rank's step")
    parser.add_argument("--parameters", type=whole, metavar="P", help="trainable parameters, float32")
    parser.add_argument("--sample-bytes", type=amount, metavar="S", help="bytes of a sample, as read")
    parser.add_argument("--read-gb-per-s", type=amount, metavar="R", help="what the job can read, instead of --doctor")
    parser.add_argument("--doctor", type=Path, metavar="FILE", help="measured by `doctor --json FILE`")
    parser.add_argument("--gb-per-s", type=amount, metavar="W", help="of a node's link, instead of --doctor")
    parser.add_argument("--latency-us", type=amount, metavar="L", help=f"between nodes (default: {_LATENCY_US:g})")
    parser.add_argument(
        "--simulate",
        metavar="PLATFORM",
        help=f"simulate steps too, on {', '.join(simulator.PLATFORMS)} or an XML file of SimGrid's (needs SimGrid)",
    )
    parser.add_argument(
        "--lanes",
        type=whole,
        default=1,
        metavar="N",
        help="communication threads of a simulated node: the engine takes one for each 8 cores, at most 4 (default: 1)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="of init(trace=FILE): what --simulate takes steps from"
    )
    parser.add_argument(
        "--spatial",
        metavar="FILE.py:FUNCTION",
        help="rehearse steps of the parts of the model that this function returns, on as many ranks of this machine as "
        "each node will have, and say into how many parts init(spatial=) splits samples best",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan."""
    if arguments.simulate:
        return _simulate(arguments)
    if arguments.spatial:
        from keras_hpc.tools import plan_spatial

        nodes = _nodes(arguments, arguments.ranks or sys.exit("A plan with --spatial needs --ranks."))
        network = _network(arguments, nodes, _measured(arguments).get("summary", {}))
        return plan_spatial.run(arguments, network)
    if arguments.trace:
        sys.exit("--trace says what --simulate simulates. Give both.")
    needed = ("ranks", "samples", "batch_size", "step_ms", "parameters", "sample_bytes")
    if missing := [f"--{name.replace('_', '-')}" for name in needed if getattr(arguments, name) is None]:
        sys.exit(f"A plan needs {', '.join(missing)}, or --simulate.")
    nodes = _nodes(arguments, arguments.ranks)
    job = Job(
        ranks=arguments.ranks,
        nodes=nodes,
        samples=arguments.samples,
        batch_size=arguments.batch_size,
        step_ms=arguments.step_ms,
        parameters=arguments.parameters,
        sample_bytes=arguments.sample_bytes,
    )
    measured = _measured(arguments)
    found = estimate(job, _network(arguments, nodes, measured.get("summary", {})))
    data = measured.get("data", {})
    given = arguments.read_gb_per_s or (sum(data["nodes"]) / len(data["nodes"]) * nodes / 1e9 if data else None)
    read, sends = found["read_gb_per_s"], f"each node sends {found['sent_mb']:.4g} MB"
    exposed = f"{found['efficiency_exposed']:.0%} if nothing hides it"
    rows = {
        "ranks": f"{job.ranks} on {nodes} node{'s' * (nodes > 1)}",
        "global batch": f"{found['global_batch']:,} samples",
        "steps of an epoch": f"{found['steps']:,}, in {found['epoch_s']:.4g} s",
        "read bandwidth": f"{read:.3g} GB/s at least, {read / nodes:.3g} on each node",
        "gradients": f"{found['gradient_mb']:.4g} MB of each rank and step; {sends}",
        "reduction": f"{found['reduction_ms']:.3g} ms",
        "efficiency": f"{found['efficiency']:.0%} behind backward, {exposed}",
        "limit": limit(found, job.step_ms, given),
    }
    tables.pairs(rows, width=20)
    return 0


def _nodes(arguments: argparse.Namespace, ranks: int) -> int:
    nodes: int = arguments.nodes or ranks
    if ranks % nodes:
        sys.exit(f"Nodes get equal numbers of ranks. Expected a multiple of {nodes}. Received: --ranks {ranks}")
    return nodes


def _simulate(arguments: argparse.Namespace) -> int:
    """Print what the simulator says of a step on so many nodes, one rank on each."""
    nodes = arguments.nodes or arguments.ranks
    if nodes is None or arguments.ranks not in (None, nodes):
        sys.exit("The simulator has one rank on each node. Expected --nodes, and not another number of --ranks.")
    try:
        platform = simulator.platform_of(arguments.simulate)
        step = timeline.read(arguments.trace) if arguments.trace else _even(arguments)
        if arguments.step_ms:
            step = step.scaled(arguments.step_ms / 1e3)
        with tempfile.TemporaryDirectory() as folder:
            program = simulator.build(simulator.cache())
            runs = [
                simulator.simulate_steps(
                    *(program, platform, nodes, Path(folder), step, ["--lanes", arguments.lanes]),
                    variation=variation,
                    steps=3 if variation else 1,
                    seconds=_LONGEST_SECONDS,
                )
                for variation in ((), *(v for v in (step.variation, step.own_variation) if len(v) > 1))
            ]
    except (simulator.SimulatorError, timeline.TimelineError) as error:
        sys.exit(str(error))
    gradients = "as the trace has them" if arguments.trace else "evenly, in the last two thirds of a step"
    rows = {
        "simulated": f"{nodes} nodes of: {platform.description}; nothing here is measured on them",
        "a step alone": f"{1e3 * step.step_s:.4g} ms, {4 * step.parameters / 1e6:.4g} MB of gradients, {gradients}",
        "a step": f"{runs[0]['step_ms']:.4g} ms, of which {runs[0]['exposed_ms']:.3g} ms exposed",
        "efficiency": f"{runs[0]['efficiency']:.1%} if all nodes are alike",
    }
    if len(runs) > 1:
        rows["with variation"] = f"{runs[1]['efficiency']:.1%} if each node's steps vary as those of the trace"
    if len(runs) > 2:
        rows["with its own"] = f"{runs[2]['efficiency']:.1%} without what the trace's ranks had in common"
    tables.pairs(rows, width=20)
    return 0


def _even(arguments: argparse.Namespace) -> timeline.Timeline:
    """A step of which nothing is known but its time and its parameters, in tensors of a MiB."""
    if arguments.step_ms is None or arguments.parameters is None:
        sys.exit("What is a step? Expected --trace, or --step-ms and --parameters. Received: neither")
    count = math.ceil(arguments.parameters / (1 << 18))
    sizes = [arguments.parameters * (i + 1) // count - arguments.parameters * i // count for i in range(count)]
    ready = [1 - _BACKWARD * (count - 1 - i) / count for i in range(count)]
    return timeline.Timeline(tuple(sizes), tuple(ready), arguments.step_ms / 1e3, 0.0, ())


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `doctor` has measured, if that was given."""
    if not arguments.doctor:
        return {}
    try:
        measured: dict[str, Any] = json.loads(arguments.doctor.read_text())
        if not isinstance(measured["summary"], dict):
            raise TypeError("no summary in it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"--doctor is a file that `doctor --json` wrote. Received: {arguments.doctor}, {error}")
    return measured


def _network(arguments: argparse.Namespace, nodes: int, measured: dict[str, dict[str, float]]) -> Network:
    between, inside = measured.get("between", {}), measured.get("inside", {})
    speed = arguments.gb_per_s or between.get("gb_per_s")
    if nodes > 1 and speed is None:
        sys.exit(
            "How fast is a node's link? Expected --gb-per-s, or --doctor with a file that `doctor --json` wrote on at "
            "least two nodes. Received: neither"
        )
    return Network(
        between_gb_per_s=speed or math.inf,
        between_us=arguments.latency_us or between.get("latency_us", _LATENCY_US),
        inside_gb_per_s=inside.get("gb_per_s", _MEMORY_GB_PER_S),
    )


def _number(kind: type) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text.replace("_", ""))
        except ValueError:
            value = 0
        if not 0 < value < _MOST:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {what} between 0 and {_MOST:g}. Received: {text!r}")
        return value

    return parse
