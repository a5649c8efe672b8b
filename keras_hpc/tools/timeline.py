# SPDX-License-Identifier: Apache-2.0
"""When a training step has which gradient: what `init(trace=)` has recorded of a real job, for the simulator."""

from __future__ import annotations

import bisect
import dataclasses
import gzip
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WARM_UP = 2  # steps of each rank: they trace, compile and touch memory for the first time
_FEWEST = 4  # steps to learn from


class TimelineError(ValueError):
    """A file has no steps to learn from; the message says why."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A training step of one rank, as if it never waited for another one.

    Attributes:
        elements: of each gradient, in the order of its plan, as if they were float32.
        ready: when each is there, as a share of `compute_s`.
        compute_s: from the begin of a step until its last gradient is there, seconds.
        update_s: from the last averaged gradient until the step's end.
        variation: how long each measured step took, over the median of its rank.
        own_variation: likewise, over what all ranks of the trace took in the same step: what slowed the whole machine
            is taken out. Of as many independent ranks it has the same spread. Empty: of one rank, or of ranks that do
            not have the same steps.
    """

    elements: tuple[int, ...]
    ready: tuple[float, ...]
    compute_s: float
    update_s: float
    variation: tuple[float, ...]
    own_variation: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """A step that waits for nothing."""
        return self.compute_s + self.update_s

    @property
    def parameters(self) -> int:
        """Elements of all gradients."""
        return sum(self.elements)

    def scaled(self, step_s: float) -> Timeline:
        """Return the same step on a machine on which it takes `step_s`."""
        factor = step_s / self.step_s
        return dataclasses.replace(self, compute_s=factor * self.compute_s, update_s=factor * self.update_s)

    def write(self, path: Path) -> None:
        """Write it as `read` reads it."""
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n")


def read(path: Path) -> Timeline:
    """Return the timeline in a file, of `init(trace=)` or of `Timeline.write`.

    Raises:
        TimelineError: there is none in it.
    """
    try:
        content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
        if "traceEvents" in content:
            return _of_trace(content["traceEvents"], content["otherData"]["plans"])
        lists = {name: tuple(content[name]) for name in ("elements", "ready", "variation")}
        lists["own_variation"] = tuple(content.get("own_variation", ()))
        return Timeline(compute_s=content["compute_s"], update_s=content["update_s"], **lists)
    except TimelineError as error:
        raise TimelineError(f"{error} Received: {path}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TimelineError(
            f"Expected a file that init(trace=...) wrote at the end of a training. Received: {path}, {error!r}"
        ) from None


@dataclasses.dataclass(frozen=True)
class _Step:
    """Of one rank, seconds."""

    ready: dict[str, float]  # of each gradient, since the step began
    waited_until: float
    end: float


def _of_trace(events: Sequence[dict[str, Any]], plans: Sequence[dict[str, Any]]) -> Timeline:
    if not plans:
        raise TimelineError("No plan lived until finalize(): keep the model and its optimizer until then.")
    plan = max(plans, key=lambda plan: sum(tensor["elements"] for tensor in plan["tensors"]))
    tensors = {tensor["name"]: tensor for tensor in plan["tensors"]}
    of_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            of_rank[event["pid"]].append(event)
    ranks = [_steps(found, set(tensors), plan["name"]) for found in of_rank.values()]
    steps = [step for found in ranks for step in found]
    if len(steps) < _FEWEST:
        raise TimelineError(
            f"Expected at least {_FEWEST} training steps after the first {_WARM_UP} of a rank, in each of which every "
            f"gradient of plan '{plan['name']}' was started once. Found: {len(steps)}."
        )
    compute = [max(step.ready.values()) for step in steps]
    update = [step.end - step.waited_until for step in steps]
    lasted = [[max(step.ready.values()) + step.end - step.waited_until for step in found] for found in ranks]
    variation = [[seconds / statistics.median(rank) for seconds in rank] for rank in lasted if rank]
    return Timeline(
        elements=tuple(tensor["elements"] * _words(tensor["dtype"]) // 2 for tensor in tensors.values()),
        ready=tuple(
            statistics.median(step.ready[name] / last for step, last in zip(steps, compute, strict=True))
            for name in tensors
        ),
        compute_s=statistics.median(compute),
        update_s=statistics.median(update),
        variation=tuple(itertools.chain(*variation)),
        own_variation=_own(variation),
    )


def _own(variation: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """What is left of each rank's variation without what all of them have in common."""
    count = len(variation)
    if count < 2 or len({len(rank) for rank in variation}) > 1:
        return ()
    spread = math.sqrt(count / (count - 1))  # a mean of few ranks takes some of their own with it
    means = [statistics.mean(of_step) for of_step in zip(*variation, strict=True)]
    return tuple(
        1 + spread * (seconds / mean - 1) for rank in variation for seconds, mean in zip(rank, means, strict=True)
    )


def _steps(events: Sequence[dict[str, Any]], tensors: set[str], plan: str) -> list[_Step]:
    """The whole steps of a rank, but for the first ones."""
    events = sorted(events, key=lambda event: float(event["ts"]))
    steps = [event for event in events if event["cat"] == "step" and event["name"].endswith(" train")]
    # JAX may end the call of a step before the step has ended: what begins before the next one belongs to it.
    bounds = [bisect.bisect_left(events, step["ts"], key=lambda event: float(event["ts"])) for step in steps]
    found = []
    for step, (first, last) in zip(steps, itertools.pairwise([*bounds, len(events)]), strict=True):
        mine = events[first:last]
        starts = [e for e in mine if e["cat"] == "start" and e["name"] in tensors]
        waits = [e["ts"] + e["dur"] for e in mine if e["cat"] == "wait" and e["name"] in tensors | {plan}]
        if len(starts) != len(tensors) or {e["name"] for e in starts} != tensors or not waits:
            continue
        begin, end = step["ts"], max(step["ts"] + step["dur"], *waits)
        ready = {e["name"]: (e["ts"] - begin) / 1e6 for e in starts}
        found.append(_Step(ready, (max(waits) - begin) / 1e6, (end - begin) / 1e6))
    return found[_WARM_UP:]


def _words(dtype: str) -> int:
    """Of 16 bits."""
    return 1 if dtype in ("float16", "bfloat16") else 4 if dtype in ("float64", "int64") else 2
