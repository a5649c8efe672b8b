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
from typing import Any

from keras_hpc.tools import rehearsal

BACKWARD = 2 / 3  # of a step, behind which a reduction can hide


@dataclasses.dataclass(frozen=True)
class Link:
    """How two ranks reach each other.

    Attributes:
        alpha_s: latency of a message, seconds.
        bytes_per_s: of a long one.
    """

    alpha_s: float
    bytes_per_s: float

    def seconds(self, messages: int, nbytes: int) -> float:
        """Return what so many messages take, one after the other."""
        return messages * self.alpha_s + nbytes / self.bytes_per_s


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


def expected(ranks: int, parts: int, of_part: rehearsal.Rehearsed, link: Link, reduction_s: float) -> Split:
    """Return what is expected of groups of `parts` ranks.

    Args:
        ranks: of the job.
        parts: of each group.
        of_part: what a rehearsal has found.
        link: between the ranks of a group.
        reduction_s: seconds of the reduction between nodes, without any backward that hides it.
    """
    messages = link.seconds(of_part.messages, of_part.halo_bytes)
    exposed = max(0.0, reduction_s - BACKWARD * (of_part.seconds + messages))
    return Split(ranks // parts, parts, of_part.seconds, messages, exposed, of_part.halo_bytes)


def best(splits: list[Split]) -> Split:
    """Return the one that trains on most samples in a second."""
    return max(splits, key=lambda split: split.groups / split.step_s)


def run(arguments: Any, network: Any) -> int:
    """Print what is expected, and the best.

    Args:
        arguments: of the command line.
        network: how fast ranks reach each other, a `plan.Network`.
    """
    rehearsal.file_of(arguments.spatial)
    ranks, batch = arguments.ranks, arguments.batch_size or 1
    nodes = arguments.nodes or ranks
    inside = ranks // nodes
    splits = []
    print(f"{'groups x parts':<16}{'step':>12}{'rehearsed':>12}{'halo received':>16}{'samples/s':>12}", flush=True)
    for parts in (n for n in range(1, ranks + 1) if ranks % n == 0):
        try:
            found = rehearsal.rehearse(arguments.spatial, parts, inside, batch)
        except rehearsal.RehearsalError as error:
            print(f"{f'{ranks // parts} x {parts}':<16}{error}", flush=True)
            continue
        if found is None:
            continue
        link = link_of(network, is_inside=parts <= inside)
        split = expected(ranks, parts, found, link, _reduction(network, nodes, found.gradient_bytes))
        splits.append(split)
        print(
            f"{f'{split.groups} x {parts}':<16}{1e3 * split.step_s:>9.4g} ms{1e3 * split.rehearsed_s:>9.4g} ms"
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
