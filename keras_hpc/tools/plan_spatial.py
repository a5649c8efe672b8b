# SPDX-License-Identifier: Apache-2.0
"""`python -m keras_hpc plan --spatial`: into how many parts samples are best split, by measured times of layers.

After Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism" (IPDPS 2019),
Section V, in the terms of this package. Of P parts and n samples of a group, a step takes

    sum over layers of   layer(n, shape of a part), forward and backward, measured on this machine
                       + copy of the window + messages of its halo, forward and, but for the first layer, backward
    + the reduction of the gradients, of which backward hides what it can

A message of m bytes takes alpha + m / bandwidth. Layers are measured alone, on one rank, so ranks that share caches and
memory of a node are slower than this says. Set OMP_NUM_THREADS, or what the framework reads, to a rank's threads.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKWARD = 2 / 3  # of a step, behind which a reduction can hide
MIN_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Costs:
    """What messages and copies cost.

    Attributes:
        alpha_s: latency of a message between ranks of a group, seconds.
        bytes_per_s: between them.
        copy_bytes_per_s: into new memory.
        reduction_s: seconds that a reduction of so many bytes takes on all ranks.
    """

    alpha_s: float
    bytes_per_s: float
    copy_bytes_per_s: float
    reduction_s: Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Split:
    """What is expected of one way to arrange the ranks.

    Attributes:
        groups: how many.
        parts: ranks of each, along the first spatial axis.
        step_s: seconds of a step.
        halo_bytes: that the rank receives which receives most, in a step.
        compute_s: of `step_s`, layers alone.
    """

    groups: int
    parts: int
    step_s: float
    halo_bytes: int
    compute_s: float


def model_of(text: str) -> Any:
    """Return the model that a function in a file makes.

    Args:
        text: FILE.py:FUNCTION.
    """
    path, _, name = text.rpartition(":")
    if not path or not Path(path).is_file():
        sys.exit(f"--spatial names a function that returns a model. Expected FILE.py:FUNCTION. Received: {text!r}")
    spec = importlib.util.spec_from_file_location("planned_model", path)
    if spec is None or spec.loader is None:
        sys.exit(f"--spatial names a function in a file of Python. Expected FILE.py:FUNCTION. Received: {text!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(f"There is no function `{name}` in {path}. Expected FILE.py:FUNCTION. Received: {text!r}")
    model: Any = function()
    return model


def evaluate(
    model: Any, ranks: int, batch: int, costs: Costs, seconds_of: Callable[[Any, list[tuple[int, ...]], bool], float]
) -> list[Split]:
    """Return what is expected of each number of parts that divides the ranks and that the model can be split into.

    Args:
        model: a functional or sequential one.
        ranks: of the job.
        batch: samples of each group.
        costs: of what layers do not do.
        seconds_of: time of a layer on inputs of some shapes, and whether their gradient is wanted.
    """
    from keras_hpc.spatial.geometry import Grid
    from keras_hpc.spatial.partition import plan_of

    gradients = sum(4 * math.prod(v.shape) for v in model.trainable_variables)
    found = []
    for parts in (n for n in range(1, ranks + 1) if ranks % n == 0):
        plan = plan_of(model, Grid((parts,)), MIN_ROWS)
        if parts > 1 and not plan.is_split:
            continue
        compute, exchange, halo = _of_plan(plan, batch, costs, seconds_of)
        reduction = costs.reduction_s(gradients) if ranks > 1 else 0.0
        step = compute + exchange
        step += max(0.0, reduction - BACKWARD * step)
        found.append(Split(ranks // parts, parts, step, halo, compute))
    return found


def best(splits: list[Split]) -> Split:
    """Return the one that trains on most samples in a second."""
    return max(splits, key=lambda split: split.groups / split.step_s)


def _of_plan(plan: Any, batch: int, costs: Costs, seconds_of: Any) -> tuple[float, float, int]:
    """Return seconds of the layers, seconds of exchanges, and bytes received, of the part that has most rows."""
    from keras_hpc.spatial.plan import _nbytes

    compute = exchange = 0.0
    halo = 0
    first = {id(tensor) for tensor in plan.model.inputs} if not plan._prefix else set()
    middle = plan.grid.size // 2  # has neighbours on both sides, and as many rows as any
    place = plan.grid.place(middle)
    for node, step in plan.nodes():
        needs_gradient = not any(id(tensor) in first for tensor in node.input_tensors)
        ways = 1 + needs_gradient  # forward, and backward what takes gradients to other ranks
        if step.plan is not None:
            inner = _of_plan(step.plan, batch, costs, seconds_of)
            compute, exchange, halo = compute + inner[0], exchange + inner[1], halo + inner[2]
            continue
        shapes = []
        for tensor, read in zip(node.input_tensors, step.fetches, strict=True):
            shape = [batch, *(n or 1 for n in tensor.shape[1:])]
            for axis in plan.splits[id(tensor)]:
                shape[axis] = _rows(shape[axis], plan.grid.parts[axis - 1], place[axis - 1])
            for one in read.axes if read and step.kind != "borders" else ():
                shape[one.axis] = one.move_at(place).rows
            if read and any(one.communicates for one in read.axes):
                nbytes = _nbytes(node.operation, tensor)
                received = batch * read.cost(plan.grid, tensor.shape, nbytes)[1]
                window = 0 if step.kind == "borders" else math.prod(shape) * nbytes
                messages = 2 * costs.alpha_s + received / costs.bytes_per_s
                exchange += ways * (messages + window / costs.copy_bytes_per_s)
                halo += ways * received
            shapes.append(tuple(shape))
        if step.kind in ("moments", "statistics", "average", "maximum"):
            exchange += 4 * costs.alpha_s
        compute += seconds_of((node, step, plan), shapes, needs_gradient)
    return compute, exchange, halo


def _rows(extent: int, parts: int, part: int) -> int:
    from keras_hpc.spatial.geometry import bounds

    begin, end = bounds(extent, parts)[part]
    return end - begin


def measure(of: Any, shapes: list[tuple[int, ...]], needs_gradient: bool) -> float:
    """Return the seconds of a node of a plan on a part, forward and backward."""
    from keras_hpc.spatial import layers as kinds
    from keras_hpc.spatial import windows
    from keras_hpc.tools import layer_times

    node, step, _ = of
    layer = node.operation
    tensors = node.input_tensors

    def call(*inputs: Any) -> Any:
        values = {id(tensor): x for tensor, x in zip(tensors, inputs, strict=True)}
        args, kwargs = node.arguments.fill_in(values)
        return layer(*args, **kwargs)

    settings = {}
    if step.kind == "window":
        if type(layer) in (*kinds.PADDING, *kinds.CROPPING):
            return 0.0
        settings = kinds.settings_of(layer, step.axes, shapes[0][1:-1])
    with windows.with_settings(layer, settings):
        alone = len(tensors) == 1 and not node.arguments.kwargs and hasattr(layer, "trainable_variables")
        measured = layer_times.in_training(layer) if alone else layer_times.Layer(call, {})
        seconds: float = layer_times.seconds_of(measured, shapes, needs_gradient)
        return seconds


def run(arguments: Any, network: Any) -> int:
    """Print what is expected, and the best.

    Args:
        arguments: of the command line.
        network: how fast ranks reach each other, a `plan.Network`.
    """
    from keras_hpc.job import resources
    from keras_hpc.tools import layer_times

    resources.keep_freed()  # as in a job
    model = model_of(arguments.spatial)
    ranks, nodes = arguments.ranks, arguments.nodes or arguments.ranks

    def reduction(nbytes: int) -> float:
        inside = ranks // nodes
        seconds: float = 2 * (inside - 1) / inside * nbytes / (network.inside_gb_per_s * 1e9)
        if nodes > 1:
            seconds += 2 * (nodes - 1) / nodes * nbytes / (network.between_gb_per_s * 1e9)
            seconds += 2 * math.ceil(math.log2(nodes)) * network.between_us / 1e6
        return seconds

    latency, speed = network.between_us, network.between_gb_per_s
    if nodes < ranks:  # groups are of neighbouring ranks, so of ranks of one node as far as possible
        latency, speed = min(latency, 5.0), network.inside_gb_per_s
    costs = Costs(latency / 1e6, speed * 1e9, layer_times.copy_bytes_per_s(), reduction)
    splits = evaluate(model, ranks, arguments.batch_size or 1, costs, measure)
    print(f"{'groups x parts':<16}{'step':>12}{'layers':>12}{'halo received':>16}{'samples/s':>12}")
    chosen = best(splits)
    for split in splits:
        rate = split.groups * (arguments.batch_size or 1) / split.step_s
        mark = "  best" if split is chosen else ""
        print(
            f"{f'{split.groups} x {split.parts}':<16}{1e3 * split.step_s:>9.4g} ms{1e3 * split.compute_s:>9.4g} ms"
            f"{split.halo_bytes / 1e6:>13.3g} MB{rate:>12.3g}{mark}"
        )
    return 0
