# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc plan --spatial`: into how many parts samples are best split, by steps rehearsed on this node.

After Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism" (IPDPS 2019),
Section V, with times of whole parts in the place of those of layers: single layers do not tell how a framework fuses
them, nor how ranks share a node. A step of groups of P ranks takes

    a step of a part, without other ranks' rows, measured on as many ranks at once as a node gets (`rehearsal`)
    + the messages of its halos, forward and, but for the first layer, backward
    + the reduction of the gradients between nodes, of which backward hides what it can

A message of m bytes takes alpha + m / bandwidth.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any

from keras_hpc.tools import rehearsal

BACKWARD = 2 / 3  # of a step, behind which a reduction can hide
MIN_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Link:
    """How two ranks reach each other.

    Attributes:
        alpha_s: latency of a message, seconds.
        bytes_per_s: of a long one.
    """

    alpha_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Split:
    """What is expected of one way to arrange the ranks.

    Attributes:
        groups: how many.
        parts: ranks of each, along the first spatial axis.
        rehearsed_s: of `step_s`, what was measured.
        messages_s: of `step_s`, what messages between the ranks of a group take.
        reduction_s: of `step_s`, what reducing the gradients between nodes takes and backward does not hide.
        halo_bytes: that the rank receives which receives most, in a step.
    """

    groups: int
    parts: int
    rehearsed_s: float
    messages_s: float
    reduction_s: float
    halo_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.rehearsed_s + self.messages_s + self.reduction_s


def plans(model: Any, ranks: int) -> Iterator[tuple[int, Any]]:
    """Yield the numbers of parts that divide the ranks and into which a model can be split, each with its plan."""
    from keras_hpc.spatial.geometry import Grid
    from keras_hpc.spatial.partition import plan_of

    for parts in (n for n in range(1, ranks + 1) if ranks % n == 0):
        plan = plan_of(model, Grid((parts,)), MIN_ROWS)
        if parts == 1 or plan.is_split:
            yield parts, plan


def expected(ranks: int, parts: int, rehearsed_s: float, messages: tuple[float, int], reduction_s: float) -> Split:
    """Return what is expected of groups of `parts` ranks.

    Args:
        ranks: of the job.
        parts: of each group.
        rehearsed_s: seconds of a step without what follows.
        messages: of the halos, seconds and bytes.
        reduction_s: seconds of the reduction between nodes, without any backward that hides it.
    """
    seconds, nbytes = messages
    exposed = max(0.0, reduction_s - BACKWARD * (rehearsed_s + seconds))
    return Split(ranks // parts, parts, rehearsed_s, seconds, exposed, nbytes)


def best(splits: list[Split]) -> Split:
    """Return the one that trains on most samples in a second."""
    return max(splits, key=lambda split: split.groups / split.step_s)


def messages_of(plan: Any, batch: int, link: Link) -> tuple[float, int]:
    """Return seconds of the messages of a step, and the bytes of their halos, of the rank that receives most.

    Args:
        plan: of a model.
        batch: samples of a group.
        link: between the ranks of a group.
    """
    from keras_hpc.spatial.plan import _nbytes

    seconds, halo = 0.0, 0
    first = {id(tensor) for tensor in plan.model.inputs} if not plan._prefix else set()
    for node, step in plan.nodes():
        if step.plan is not None:
            inner = messages_of(step.plan, batch, link)
            seconds, halo = seconds + inner[0], halo + inner[1]
            continue
        for tensor, read in zip(node.input_tensors, step.fetches, strict=True):
            if read and any(one.communicates for one in read.axes):
                ways = 1 + (id(tensor) not in first)  # backward what takes gradients to other ranks
                received = batch * read.cost(plan.grid, tensor.shape, _nbytes(node.operation, tensor))[1]
                seconds += ways * (2 * link.alpha_s + received / link.bytes_per_s)
                halo += ways * received
        if step.kind in ("moments", "statistics", "average", "maximum"):
            seconds += 4 * link.alpha_s
    return seconds, halo


def run(arguments: Any, network: Any) -> int:
    """Print what is expected, and the best.

    Args:
        arguments: of the command line.
        network: how fast ranks reach each other, a `plan.Network`.
    """
    model = rehearsal.model_of(arguments.spatial)
    ranks, batch = arguments.ranks, arguments.batch_size or 1
    nodes = arguments.nodes or ranks
    gradients = sum(4 * math.prod(v.shape) for v in model.trainable_variables)
    splits = []
    print(f"{'groups x parts':<16}{'step':>12}{'rehearsed':>12}{'halo received':>16}{'samples/s':>12}", flush=True)
    for parts, plan in plans(model, ranks):
        name = f"{ranks // parts} x {parts}"
        try:
            rehearsed = rehearsal.rehearse(arguments.spatial, parts, ranks // nodes, batch)
        except rehearsal.RehearsalError as error:
            print(f"{name:<16}{error}", flush=True)
            continue
        messages = messages_of(plan, batch, link_of(network, is_inside=parts <= ranks // nodes))
        split = expected(ranks, parts, rehearsed, messages, _reduction(network, nodes, gradients))
        splits.append(split)
        print(
            f"{name:<16}{1e3 * split.step_s:>9.4g} ms{1e3 * split.rehearsed_s:>9.4g} ms"
            f"{split.halo_bytes / 1e6:>13.3g} MB{split.groups * batch / split.step_s:>12.3g}",
            flush=True,
        )
    if not splits:
        sys.exit("No arrangement could be rehearsed.")
    chosen = best(splits)
    print(f"best: {chosen.groups} x {chosen.parts}, init(spatial={chosen.parts})")
    return 0


def link_of(network: Any, *, is_inside: bool) -> Link:
    """Return the slowest link of a group: of neighbouring ranks, so inside of a node if it has as many."""
    if is_inside:
        return Link(min(network.between_us, 5.0) / 1e6, network.inside_gb_per_s * 1e9)
    return Link(network.between_us / 1e6, network.between_gb_per_s * 1e9)


def _reduction(network: Any, nodes: int, nbytes: int) -> float:
    """Return the seconds that a reduction takes between nodes; what it takes inside is rehearsed."""
    if nodes == 1:
        return 0.0
    seconds: float = 2 * (nodes - 1) / nodes * nbytes / (network.between_gb_per_s * 1e9)
    seconds += 2 * math.ceil(math.log2(nodes)) * network.between_us / 1e6
    return seconds
