# SPDX-License-Identifier: Apache-2.0
"""Computes a model as its plan says: this rank's part of every tensor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_hpc import backends
from keras_hpc.spatial import extents, geometry, operations, settings, statistics, windows
from keras_hpc.spatial.fetch import Fetch, Fill, fetch
from keras_hpc.spatial.group import Group
from keras_hpc.spatial.masks import Masks
from keras_hpc.spatial.plan import WHOLE, Plan, Split, Step


@dataclasses.dataclass(frozen=True)
class OverGroup:
    """What a layer that has a part gets of all positions, with its gradient.

    Attributes:
        sum: of a vector that each rank of the group has.
        moments: mean and variance of each channel, of those of this rank's positions.
    """

    sum: Callable[[Any], Any]
    moments: Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass
class Order:
    """The order in which exchanges follow each other, where the framework knows no order of its own.

    Attributes:
        token: of the last one, which the next one takes; its gradient goes the other way. None: there was none.
    """

    token: Any = None


class _Layer(threading.local):
    order: Order  # of the exchanges of the model that runs
    part: int | None = None  # the first rank of the group that has the part which the layer that runs gives
    over_group: OverGroup | None = None  # for what the layer needs of all positions


_layer = _Layer()


def part() -> int | None:
    """Return the first rank of the group with the part that the layer gives that runs in this thread; None: all do."""
    return _layer.part


def over_group() -> OverGroup | None:
    """Return what gives sums and moments over the group, while a layer runs that has a part; None: it needs none."""
    return _layer.over_group


@contextlib.contextmanager
def _exchanging(order: Order) -> Iterator[None]:
    before = vars(_layer).get("order")
    _layer.order = order
    try:
        yield
    finally:
        vars(_layer)["order"] = before


@contextlib.contextmanager
def _running(part: int | None, over: OverGroup | None) -> Iterator[None]:
    before = _layer.part, _layer.over_group
    _layer.part, _layer.over_group = part, over
    try:
        yield
    finally:
        _layer.part, _layer.over_group = before


class Runner:
    """Computes a model together with the other ranks of the group.

    Args:
        plan: of the model.
        group: the ranks.
        drawing: returns a context in which a layer draws random numbers of this rank's own.
        masks: of tensors.
    """

    def __init__(
        self, plan: Plan, group: Group, drawing: Callable[[], contextlib.AbstractContextManager[None]], masks: Masks
    ) -> None:
        self.plan, self._group, self._drawing, self._masks = plan, group, drawing, masks
        self._done = _last_uses(plan)
        self._inner = {
            id(node): Runner(step.plan, group, drawing, masks) for node, step in plan.nodes() if step.plan is not None
        }

    def run(self, inputs: Any, operation_fn: Callable[[Any], Any], whole: bool, name: str, order: Order) -> Any:
        """Return the outputs of the model. Collective on the group.

        Args:
            inputs: as the model takes them; each tensor that is split may be whole, or this rank's part of it.
            operation_fn: Keras' own: returns what calls an operation.
            whole: whether outputs are wanted whole, or as this rank's parts.
            name: of the model, the same on all ranks and of no other model.
            order: of the exchanges of the step, or of this call.
        """
        with _exchanging(order):
            outputs = self._outputs(inputs, operation_fn, whole, name)
            after = backends.current().after
            return keras.tree.map_structure(lambda y: self._masks.carried(y, after(y, order)), outputs)

    def _outputs(self, inputs: Any, operation_fn: Callable[[Any], Any], whole: bool, name: str) -> Any:
        model = self.plan.model
        values = {}
        for tensor, x in zip(model.inputs, keras.tree.flatten(inputs), strict=True):
            split = self.plan.splits[id(tensor)]
            spatial, what = {*split, *range(1, len(tensor.shape) - 1)}, f"input `{tensor.name}`"
            cut = functools.partial(self.cut, shape=tensor.shape, split=split, what=what, axes=spatial)
            values[id(tensor)] = self._masks.carried(x, cut(x), cut)
        for number, (node, step) in enumerate(self.plan.nodes()):
            # A layer may have several nodes.
            of_node = f"{name}/{node.operation.name}/{number}"
            outputs = self._compute(of_node, node, step, values, operation_fn)
            values.update((id(x), y) for x, y in zip(node.outputs, keras.tree.flatten(outputs), strict=True))
            for tensor in self._done[id(node)]:  # which frees what no gradient needs
                del values[tensor]
        outputs = [values[id(tensor)] for tensor in model.outputs]
        if whole:
            outputs = [
                self._with_mask(y, fetch(self.plan.grid, x.shape, split, WHOLE), f"{name}/output {number}")
                for number, (x, y, split) in enumerate(zip(model.outputs, outputs, self.plan.outputs, strict=True))
            ]
        return keras.tree.pack_sequence_as(model._outputs_struct, outputs)

    def cut(
        self, x: Any, shape: Sequence[int | None], split: Split, what: str, axes: Collection[int] | None = None
    ) -> Any:
        """Return this rank's part of a tensor that is whole; one that is this part already stays as it is.

        Args:
            x: the tensor.
            shape: of the whole one.
            split: along which axes it is split.
            what: it is.
            axes: whose extents are known, those that are split by default.

        Raises:
            ValueError: it is neither.
        """
        reason = extents.fault_of(x.shape, shape, split, self._group.part, split if axes is None else axes)
        if reason:
            name = self.plan.model.name
            raise ValueError(f"The ranks of a group have a part each of {what} of model `{name}`. {reason}")
        for axis in sorted(split):
            if x.shape[axis] == shape[axis]:
                x = _rows(x, axis, *self._group.part(shape[axis] or 0, axis - 1))
        return x

    def share(self, number: int) -> float:
        """Return this rank's positions of an output, divided by what the group's ranks have on average."""
        tensor, split = self.plan.model.outputs[number], self.plan.outputs[number]
        factor = 1.0
        for axis in split:
            begin, end = self._group.part(tensor.shape[axis], axis - 1)
            factor *= (end - begin) * self.plan.grid.parts[axis - 1] / tensor.shape[axis]
        return factor

    def copies(self, number: int) -> int:
        """Return how many ranks of the group have the same part of an output."""
        return self._group.size // math.prod(self.plan.grid.parts[axis - 1] for axis in self.plan.outputs[number])

    def is_first_copy(self, rank: int) -> bool:
        """Return whether a rank of the group is the first that has its part of the outputs."""
        place = self.plan.grid.place(rank)
        return all(part == 0 or index + 1 in self.plan.outputs[0] for index, part in enumerate(place))

    # ---- nodes

    def _compute(self, name: str, node: Any, step: Step, values: dict[int, Any], operation_fn: Any) -> Any:
        layer = node.operation
        mine: dict[int, Any] = {}
        if step.kind == "borders":
            return self._with_borders(name, node, step, values[id(node.input_tensors[0])], operation_fn(layer))
        for index, (tensor, read) in enumerate(zip(node.input_tensors, step.fetches, strict=True)):
            # A layer that reads windows has no use for masks in Keras, nor has Flatten.
            masked = step.kind in ("layer", "alike") and not isinstance(layer, keras.layers.Flatten)
            fetched = self._with_mask if masked else self._fetched
            mine[id(tensor)] = fetched(values[id(tensor)], read, f"{name}.{index}" if index else name)
        if step.kind == "model":
            inner = _in_mode(operation_fn, node.arguments.kwargs.get("training"))
            return self._inner[id(node)]._outputs([mine[id(x)] for x in node.input_tensors], inner, False, name)
        args, kwargs = node.arguments.fill_in(mine)
        call = operation_fn(layer)
        if step.kind == "reduction":
            return self._reduced(name, node, args[0])
        if step.kind == "operation":
            shape = list(node.outputs[0].shape)
            for axis in step.splits[0]:
                begin, end = self._group.part(shape[axis], axis - 1)
                shape[axis] = end - begin
            return operations.compute(layer, step.windows, shape, args, kwargs, call)
        over = self._over_all(name, node) if step.kind == "moments" else None
        split = WHOLE if step.kind == "alike" else step.splits[0]
        part = self._group.first_with_part(split) if split else None
        with _running(part, over), self._drawing() if split and _may_draw(layer) else contextlib.nullcontext():
            if step.kind == "window":
                grid, place = self._group.grid, self._group.place
                return windows.compute(layer, step.axes, step.splits[0], grid, place, args[0], call)
            if step.kind == "statistics":
                own = self._statistics(name, node, layer)
                with settings.once(layer, {"call": own}):
                    return call(*args, **kwargs)
            with settings.again_in(layer, lambda: _running(part, over)):
                outputs = call(*args, **kwargs)
        if step.kind in ("average", "maximum"):
            mask = kwargs.get("mask", self._masks.of(args[0]))
            return self._over_group(step.kind, name, node, args[0], outputs, mask)
        return outputs

    def _with_borders(self, name: str, node: Any, step: Step, x: Any, call: Callable[..., Any]) -> Any:
        """Return what a convolution makes of this rank's own rows and of those that it receives."""
        (axis,), grid, place = step.splits[0], self._group.grid, self._group.place
        read = next(one for one in step.fetches[0].axes if one.axis == axis)  # type: ignore[union-attr]
        borders = geometry.borders(step.axes[axis - 1], grid.parts[axis - 1], place[axis - 1])  # type: ignore[arg-type]
        blocks = [rows for _, rows in read.move_at(place).sends]
        made = self._group.borders(f"{name} axis {axis}", read)
        add = functools.partial(backends.current().with_borders, made, axis, blocks, _layer.order)
        return windows.compute_own(node.operation, step.axes, axis, borders or (), x, add, call)

    def _over_group(self, kind: str, name: str, node: Any, x: Any, y: Any, mask: Any) -> Any:
        """Return a global pooling of all parts, of that of this part."""
        tensor = node.input_tensors[0]
        if kind == "average" and mask is not None:
            one = statistics.masked_average(functools.partial(self._gathered, name), x, mask)
        elif kind == "average":
            of_part = ops.reshape(y, (-1, 1, y.shape[-1]))
            one = statistics.combined(functools.partial(self._gathered, name), self._shares(tensor), of_part)
        else:
            one = statistics.maximum(functools.partial(self._gathered, name), x, range(1, len(x.shape) - 1))
        return ops.reshape(one, (-1, *y.shape[1:]))

    def _statistics(self, name: str, node: Any, layer: Any) -> Callable[..., Any]:
        """Return the `call` of a layer that normalizes over the positions of each sample."""
        tensor = node.input_tensors[0]
        split = self.plan.splits[id(tensor)]
        parts = [self._group.part(n, axis - 1) if axis in split else (0, n) for axis, n in enumerate(tensor.shape)]
        rows, shares = [slice(*part) for part in parts], self._shares(tensor)
        return functools.partial(statistics.normalized, layer, shares, rows, functools.partial(self._gathered, name))

    def _reduced(self, name: str, node: Any, x: Any) -> Any:
        """Return what an operation makes of the positions of all parts."""
        tensor, operation = node.input_tensors[0], node.operation
        axes = sorted(operations.reduced_axes(operation, len(x.shape)))
        split = self.plan.splits[id(tensor)]
        copies = self._group.size // math.prod(self.plan.grid.parts[axis - 1] for axis in split)
        gather = functools.partial(self._gathered, name)
        y = statistics.reduced(type(operation).__name__, gather, self._shares(tensor), copies, x, axes)
        return y if operation.keepdims else keras.tree.map_structure(lambda one: ops.squeeze(one, axis=axes), y)

    def _shares(self, tensor: Any) -> list[float]:
        """Return of a tensor's positions the part that each rank of the group has; several may have the same."""
        grid, split = self._group.grid, self.plan.splits[id(tensor)]
        copies = grid.size // math.prod(grid.parts[axis - 1] for axis in split)
        shares = [1 / copies] * grid.size
        for rank in range(grid.size):
            for axis in split:
                begin, end = geometry.bounds(tensor.shape[axis], grid.parts[axis - 1])[grid.place(rank)[axis - 1]]
                shares[rank] *= (end - begin) / tensor.shape[axis]
        return shares

    def _over_all(self, name: str, node: Any) -> OverGroup:
        """Return sums and moments over the group, for a layer that normalizes over samples and positions."""
        gather = functools.partial(self._gathered, f"{name} sums")
        shares = self._shares(node.input_tensors[0])

        def total(numbers: Any) -> Any:
            return ops.sum(gather(ops.reshape(numbers, (1, 1, -1))), axis=(0, 1))

        def moments(mean: Any, variance: Any) -> tuple[Any, Any]:
            # As those of one sample: the ranks of a group have parts of the same samples.
            both = statistics.combined(gather, shares, ops.expand_dims(mean, 0), ops.expand_dims(variance, 0))
            return ops.reshape(both[0], mean.shape), ops.reshape(both[1], variance.shape)

        return OverGroup(total, moments)

    def _gathered(self, name: str, row: Any) -> Any:
        """Return (batch, ranks, channels) of (batch, 1, channels)."""
        # None where a layer is computed again, backward.
        return backends.current().exchange(self._group.gather(name), row, 1, _layer.order or Order())

    # ---- fetches

    def _with_mask(self, x: Any, read: Fetch | None, name: str) -> Any:
        def change(mask: Any) -> Any:
            return self._fetched(mask, read, f"{name} mask")

        return self._masks.carried(x, self._fetched(x, read, name), change)

    def _fetched(self, x: Any, read: Fetch | None, name: str) -> Any:
        if read is None:
            return x
        pads = {}
        fill = _fill_of(read, x)
        done: set[int] = set()
        by_axis = {one.axis: one for one in read.axes}
        for one in read.axes:
            if one.axis in done:
                continue
            move = one.move_at(self._group.place)
            if one.communicates:
                plain = one.without_padding() if read.fill == "edge" else one
                beside = by_axis.get(one.axis + 1)
                if beside is None or read.fill == "edge" or not beside.only_pads:
                    beside = None
                else:  # the copy that makes room for other ranks' rows pads them, too
                    done.add(beside.axis)
                made = self._group.exchange(f"{name} axis {one.axis}", plain, 0.0 if fill == "edge" else fill, beside)
                x = _exchanged(made, x, one.axis)
            elif one.cuts:
                x = _rows(x, one.axis, *move.own)
            if read.fill == "edge" or not one.communicates:
                pads[one.axis] = move.pads
        # Also where this rank has none: all ranks' graphs are to have the same nodes.
        return _padded(x, pads, fill) if any(by_axis[axis].pads for axis in pads) else x


def _last_uses(plan: Plan) -> dict[int, list[int]]:
    """Return for each node which tensors no node needs any more after it, both by their `id`."""
    last: dict[int, int] = {}
    for node, _ in plan.nodes():
        last.update((id(x), id(node)) for x in (*node.outputs, *node.input_tensors))
    kept = {id(x) for x in plan.model.outputs}
    done: dict[int, list[int]] = {id(node): [] for node, _ in plan.nodes()}
    for tensor, node in last.items():
        if tensor not in kept:
            done[node].append(tensor)
    return done


def _in_mode(operation_fn: Callable[[Any], Any], training: bool | None) -> Callable[[Any], Any]:
    """Return what calls an operation of a model that is called with `training`, unless the call of all says another."""
    if training is None:
        return operation_fn

    def calling(operation: Any) -> Any:
        call = operation_fn(operation)
        if not getattr(operation, "_call_has_training_arg", False):
            return call
        return lambda *args, **kwargs: call(*args, **{**kwargs, "training": training})

    return calling


def _may_draw(layer: Any) -> bool:
    """Return whether a layer may draw random numbers: one of Keras that has a generator, or one of the user's own."""
    if not isinstance(layer, keras.layers.Layer):
        return False
    every = layer._flatten_layers()
    return any(not type(one).__module__.startswith("keras.") or hasattr(one, "seed_generator") for one in every)


def _rows(x: Any, axis: int, begin: int, end: int) -> Any:
    return x[(slice(None),) * axis + (slice(begin, end),)]


def _exchanged(made: Any, x: Any, axis: int) -> Any:
    """Exchange rows. Integers of a kind that the engine does not know travel as those of 32 bits."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if "float" in dtype or dtype in ("int32", "int64"):
        return backends.current().exchange(made, x, axis, _layer.order)
    return ops.cast(backends.current().exchange(made, ops.cast(x, "int32"), axis, _layer.order), dtype)


def _fill_of(read: Fetch, x: Any) -> Fill:
    """Return what padding of a tensor is filled with: integers have no infinity."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    return float(np.iinfo(dtype).min) if read.fill == -math.inf and "int" in dtype else read.fill


def _padded(x: Any, pads: dict[int, tuple[int, int]], fill: Any) -> Any:
    if fill != "edge":
        widths = [pads.get(axis, (0, 0)) for axis in range(len(x.shape))]
        return ops.pad(x, widths, constant_values=fill) if fill else ops.pad(x, widths)
    for axis, (before, after) in pads.items():
        first, last = _rows(x, axis, 0, 1), _rows(x, axis, x.shape[axis] - 1, x.shape[axis])
        x = ops.concatenate([*[first] * before, x, *[last] * after], axis=axis)
    return x
