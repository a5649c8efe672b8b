# SPDX-License-Identifier: Apache-2.0
"""Decides, before anything runs, how the ranks of a group compute a functional model together.

The graph of such a model has the extents of every tensor. `Plan` walks it once and finds for each tensor along which
axes it is *split*, or that it is *whole*, the same on all ranks of the group; and for each node what must be fetched
before its layer is called (`Step`). A tensor is split along an axis if its extent gives each part `min_rows` rows,
whatever layer made it. What cannot be split is refused here, by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.spatial import asking, geometry, operations, statistics
from keras_hpc.spatial import layers as kinds
from keras_hpc.spatial.fetch import Fetch, fetch
from keras_hpc.spatial.report import table

Split = frozenset[int]  # axes of a tensor, 1 for the first spatial one
WHOLE: Split = frozenset()


@dataclasses.dataclass(frozen=True)
class Step:
    """How a node of the graph is computed.

    Attributes:
        kind: "layer"; "alike": the same with the random numbers of all parts; "operation": on `windows` of some
            axes; "window": on a window, whose axes are in `axes`; "borders": on the part's own rows, to which what
            others' rows add is added; "moments" (batch normalization), "statistics" (of each sample) and "average",
            which add up over the group; "maximum"; "reduction": over all axes that are split; "model": by `plan`.
        splits: along which axes each output is split.
        fetches: for each input what must be fetched, or None.
        axes: of a window, what the layer does along each spatial axis.
        windows: of an operation, what it reads along the axes that it slices or pads.
        plan: of a model inside of the model.
        note: of what it does beside its fetches, for the report.
    """

    kind: str
    splits: tuple[Split, ...]
    fetches: tuple[Fetch | None, ...]
    axes: tuple[geometry.Axis, ...] = ()
    windows: Mapping[int, geometry.Windowed] = dataclasses.field(default_factory=dict)
    plan: Plan | None = None
    note: str = ""


class Plan:
    """How a group of ranks computes a model. `print(plan)` shows a line for each layer.

    Attributes:
        model: the functional model.
        grid: the ranks of a group.
        min_rows: a tensor with fewer rows for each part is whole.
        splits: of each tensor of the graph, by its `id`.
        steps: of each node of the graph, by its `id`.
    """

    def __init__(
        self, model: Any, grid: geometry.Grid, min_rows: int, inputs: Sequence[Split] | None = None, prefix: str = ""
    ) -> None:
        self.model, self.grid, self.min_rows, self._prefix = model, grid, min_rows, prefix
        self.splits: dict[int, Split] = {}
        self.steps: dict[int, Step] = {}
        has_images = inputs is not None or (grid.size > 1 and self._has_images(model))
        for number, tensor in enumerate(model.inputs):
            split = inputs[number] if inputs is not None else self._split_of(tensor) if has_images else WHOLE
            self.splits[id(tensor)] = split
        for node in nodes_of(model):
            step = self.steps[id(node)] = self._step(node, has_images)
            sees_part = step.plan is None and (any(step.splits) or step.kind != "layer")
            if sees_part and (reason := kinds.fault_of_regularizer(node.operation)):
                raise self._refusal(node.operation, reason)
            self.splits.update((id(x), split) for x, split in zip(node.outputs, step.splits, strict=True))

    @property
    def outputs(self) -> list[Split]:
        """Along which axes each output of the model is split."""
        return [self.splits[id(tensor)] for tensor in self.model.outputs]

    @property
    def is_split(self) -> bool:
        """Whether the ranks of a group have different parts of anything."""
        return any(self.splits.values()) or any(step.plan.is_split for step in self.steps.values() if step.plan)

    def __str__(self) -> str:
        """Return a line for each layer."""
        parts = " x ".join(map(str, self.grid.parts))
        head = f"`{self.model.name}` in {parts} parts, each of at least {self.min_rows} rows of an axis that is split"
        return table(head, list(self._lines()))

    def nodes(self) -> Iterator[tuple[Any, Step]]:
        """Yield the nodes of the graph in the order in which they are computed, and what is done at each."""
        for node in nodes_of(self.model):
            yield node, self.steps[id(node)]

    def layers_of_parts(self) -> Iterator[Any]:
        """Yield the layers whose output is split, and those inside of them."""
        for node, step in self.nodes():
            if step.plan is not None:
                yield from step.plan.layers_of_parts()
            elif any(step.splits) and isinstance(node.operation, keras.layers.Layer):
                yield from node.operation._flatten_layers()

    def messages(self, samples: int, whole: bool = False) -> tuple[int, int]:
        """Return how many messages follow each other in a step, and the bytes of their rows.

        Both forward and backward, of the rank that receives most.

        Args:
            samples: of a group.
            whole: whether outputs are wanted whole, as in a step of the user's own.
        """
        count = nbytes = 0
        given = {id(tensor) for tensor in self.model.inputs} if not self._prefix else set()  # want no gradients
        reads = []
        for node, step in self.nodes():
            if step.plan is not None:
                inner = step.plan.messages(samples)
                count, nbytes = count + inner[0], nbytes + inner[1]
                continue
            for tensor, read in zip(node.input_tensors, step.fetches, strict=True):
                reads.append((tensor, read, _nbytes(node.operation, tensor)))
            if step.kind in ("moments", "statistics", "average", "maximum", "reduction"):
                count += 4
        for tensor, split in zip(self.model.outputs, self.outputs, strict=True) if whole else ():
            reads.append((tensor, fetch(self.grid, tensor.shape, split, WHOLE), _nbytes(None, tensor)))
        for tensor, read, size in reads:
            if read and any(one.communicates for one in read.axes):
                ways = 1 if id(tensor) in given else 2
                count += 2 * ways  # from both sides
                nbytes += ways * samples * read.cost(self.grid, tensor.shape, size)[1]
        return count, nbytes

    def _lines(self) -> Iterator[tuple[str, str, str, int, int, str]]:
        for node, step in self.nodes():
            name = self._prefix + node.operation.name
            if step.plan:
                yield from step.plan._lines()
                continue
            costs = [
                one.cost(self.grid, x.shape, _nbytes(node.operation, x))
                for one, x in zip(step.fetches, node.input_tensors, strict=True)
                if one
            ]
            shape = str(tuple(node.outputs[0].shape))
            yield (
                name,
                shape,
                self._name_of(step.splits[0]),
                sum(r for r, _ in costs),
                sum(b for _, b in costs),
                step.note,
            )

    def _name_of(self, split: Split) -> str:
        if not split:
            return "whole"
        return "split " + " x ".join(str(p if i + 1 in split else 1) for i, p in enumerate(self.grid.parts))

    # ---- tensors

    def _split_of(self, tensor: Any) -> Split:
        """Return the axes along which a tensor is split, by its extents alone."""
        extents = tensor.shape[1:-1]
        parts = self.grid.parts
        if len(extents) < len(parts):
            return WHOLE
        found = set()
        for index, count in enumerate(parts):
            if count == 1:
                continue
            if extents[index] is None:
                raise ValueError(
                    "A model can be split only where the extents of its images are known. Expected numbers in "
                    f"keras.Input, or keras_hpc.partition(model, parts=1). Received: a tensor of shape {tensor.shape} "
                    f"in `{self.model.name}`"
                )
            if extents[index] >= count * self.min_rows:
                found.add(index + 1)
        return frozenset(found)

    def _has_images(self, model: Any) -> bool:
        """Return whether there is a convolution, or the like, over as many axes as the job splits."""
        for node in nodes_of(model):
            if hasattr(functional_of(node.operation), "_nodes_by_depth"):
                if self._has_images(functional_of(node.operation)):
                    return True
            elif kinds.is_windowed(node.operation) and len(node.outputs[0].shape) - 2 >= len(self.grid.parts):
                return True
        return False

    # ---- layers

    def _step(self, node: Any, has_images: bool) -> Step:
        layer, inputs, outputs = node.operation, node.input_tensors, node.outputs
        before = tuple(self.splits[id(x)] for x in inputs)
        nothing = (None,) * len(inputs)
        whole = Step("layer", (WHOLE,) * len(outputs), nothing)
        if not has_images:
            return whole
        if isinstance(layer, keras.Model):
            return self._model(node, before)
        if kinds.is_windowed(layer):
            return self._window(node, before[0])
        if not any(before):
            return whole
        if type(layer) is keras.layers.Flatten or kinds.mark_of(layer) == "whole":
            return self._everything(node, before)
        rank = len(inputs[0].shape)
        if operations.is_combined(node, before[0]):
            return Step("reduction", whole.splits, nothing, note=f"{type(layer).__name__.lower()} of all parts")
        if (effect := operations.effect_of(node, self.grid.parts)) is not None:
            return self._operation(node, before, effect)
        if reason := kinds.fault(layer, rank):
            raise self._refusal(layer, reason)
        is_layer = isinstance(layer, keras.layers.Layer)
        if is_layer and any(rank - 1 in split for split in before) and type(layer) not in kinds.MERGES:
            return self._everything(node, before)  # it takes the last axis for channels
        if type(layer) is keras.layers.BatchNormalization:
            # A mask is another input.
            fetches = (fetch(self.grid, x.shape, have, before[0]) for x, have in zip(inputs, before, strict=True))
            return Step("moments", before[:1], tuple(fetches), note=f"sums of 2 x {inputs[0].shape[-1]} numbers")
        if kinds.is_pointwise(layer, rank):
            return self._pointwise(node, before)
        if kinds.mark_of(layer) == "pointwise" or type(layer) is keras.layers.Lambda:
            step = self._pointwise(node, before)
            if step.splits[0] and (reason := asking.fault_of_layer(node, sorted(step.splits[0]))):
                raise self._refusal(layer, reason)
            return step
        if kinds.is_over_time(layer):
            return self._operation(node, before, operations.Effect(frozenset({1})))
        if kinds.draws_alike(layer, before[0]):
            return Step("alike", before, nothing)
        if (over := statistics.reduced_axes(layer, rank)) is not None:
            if not before[0] & over:
                return Step("layer", before, nothing)
            if before[0] <= over:
                return Step("statistics", before, nothing, note="means and variances of each sample")
        if type(layer) in kinds.GLOBAL_AVERAGE:
            return Step("average", whole.splits, nothing, note=f"sums of {inputs[0].shape[-1]} numbers")
        if type(layer) in kinds.GLOBAL_MAX:
            return Step("maximum", whole.splits, nothing, note=f"maxima of {inputs[0].shape[-1]} numbers")
        if type(layer).__module__.startswith("keras."):
            return self._everything(node, before)
        raise self._refusal(layer, "is of a kind of which it is not known how it mixes positions")

    def _everything(self, node: Any, before: Sequence[Split]) -> Step:
        """Return what gives all ranks everything, of which each computes all."""
        fetches = (fetch(self.grid, x.shape, have, WHOLE) for x, have in zip(node.input_tensors, before, strict=True))
        return Step("layer", (WHOLE,) * len(node.outputs), tuple(fetches))

    def _model(self, node: Any, before: Sequence[Split]) -> Step:
        layer = node.operation
        inner = functional_of(layer)
        if not hasattr(inner, "_nodes_by_depth") or type(layer).call not in (type(inner).call, keras.Sequential.call):
            if any(before):
                raise self._refusal(layer, "is a model with a `call` of its own")
            return Step("layer", (WHOLE,) * len(node.outputs), (None,) * len(before))
        # Of several inputs Keras gives a list of masks, each None.
        others = {name: value for name, value in node.arguments.kwargs.items() if name != "training"}
        if len(node.arguments.args) != 1 or any(v is not None for v in keras.tree.flatten(others)):
            raise self._refusal(layer, "is a model that is called with more than its inputs and `training`")
        inner = _with_extents(inner, node.input_tensors)
        plan = Plan(inner, self.grid, self.min_rows, before, f"{self._prefix}{layer.name}/")
        return Step("model", tuple(plan.outputs), (None,) * len(before), plan=plan)

    def _window(self, node: Any, before: Split) -> Step:
        layer, x, output = kinds.core_of(node.operation), node.input_tensors[0], node.outputs[0]
        split = self._split_of(output)
        # Of channels that come first, extents say nothing about rows: what looks whole may be the largest image.
        is_image = self.grid.size > 1 and len(x.shape) - 2 >= len(self.grid.parts)
        if is_image and (reason := kinds.fault_of_format(layer)):
            raise self._refusal(node.operation, reason)
        if not before and not split:
            return Step("layer", (WHOLE,), (None,))
        if reason := kinds.fault(layer, len(x.shape)):
            raise self._refusal(node.operation, reason)
        extents, outputs = x.shape[1:-1], output.shape[1:-1]
        if None in extents or None in outputs:
            raise self._refusal(node.operation, f"has an input of unknown extents, {x.shape}")
        if kinds.interpolates_elsewhere(layer, x, output) or len(x.shape) - 1 in before:
            return self._everything(node, [before])
        axes = tuple(kinds.axis_of(layer, i, extents[i], outputs[i]) for i in range(len(extents)))
        if tuple(axis.outputs for axis in axes) != tuple(outputs):
            expected = [axis.outputs for axis in axes]
            raise self._refusal(node.operation, f"has an output of {tuple(outputs)} rows where {expected} are expected")
        fill = kinds.padding_of(layer, axes)
        read = fetch(self.grid, x.shape, before, split, dict(enumerate(axes, 1)), fill)
        adds = read is not None and kinds.adds_borders(layer, axes, self.grid, before, split)
        return Step("borders" if adds else "window", (split,), (read,), axes)

    def _pointwise(self, node: Any, before: Sequence[Split]) -> Step:
        inputs, output = node.input_tensors, node.outputs[0]
        split: Split = frozenset().union(*before)
        ranks = {len(x.shape) for x in (*inputs, output) if x.shape}
        extents = {(a, x.shape[a]) for x in inputs for a in split if len(x.shape) > a}
        fits = all(extent in (1, output.shape[a]) for a, extent in extents if len(output.shape) > a)
        if len(ranks) > 1 or not fits or _has_constants(node, split):
            return self._everything(node, before)
        wanted = [frozenset(a for a in split if x.shape and x.shape[a] == output.shape[a]) for x in inputs]
        fetches = (fetch(self.grid, x.shape, h, w) for x, h, w in zip(inputs, before, wanted, strict=True))
        return Step("layer", (split,) * len(node.outputs), tuple(fetches))

    def _operation(self, node: Any, before: Sequence[Split], effect: operations.Effect) -> Step:
        have: Split = frozenset().union(*before)
        if _has_constants(node, have):
            return self._everything(node, before)
        windows = {axis: window for axis, window in effect.windows.items() if axis in have}
        large = {a for a, window in windows.items() if window.outputs >= self.grid.parts[a - 1] * self.min_rows}
        split = have & (effect.kept | large)
        inputs = node.input_tensors
        broadcasts = any(x.shape[axis] != inputs[0].shape[axis] for x in inputs for axis in split)
        if broadcasts or not (split or windows):
            return self._everything(node, before)
        fetches = (
            fetch(self.grid, x.shape, one, split, windows, effect.fill) for x, one in zip(inputs, before, strict=True)
        )
        is_layer = isinstance(node.operation, keras.layers.Layer)
        kind = "layer" if is_layer and type(node.operation) is not keras.layers.Reshape else "operation"
        return Step(kind, (split,) * len(node.outputs), tuple(fetches), windows=windows)

    def _refusal(self, layer: Any, reason: str) -> ValueError:
        return ValueError(
            f"`{self._prefix}{layer.name}` ({type(layer).__name__}) cannot be computed in parts: it {reason}. End the "
            "split part of the model before it, with a global pooling or Flatten, or leave the model whole: "
            "keras_hpc.partition(model, parts=1). A layer of your own is marked: with keras_hpc.spatial.pointwise if "
            "it computes each position by itself, with keras_hpc.spatial.whole if every rank is to have all positions. "
            f"Received: a model for {' x '.join(map(str, self.grid.parts))} parts"
        )


def functional_of(model: Any) -> Any:
    """Return the functional model that a sequential one keeps, or the model itself."""
    return getattr(model, "_functional", None) or model


def nodes_of(model: Any) -> Iterator[Any]:
    """Yield the nodes of a functional model in the order in which Keras computes them, without its inputs."""
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if node.operation and not node.is_input:
                yield node


def _with_extents(model: Any, inputs: Sequence[Any]) -> Any:
    """Return a model of the same layers for inputs of these extents, where it was made for any; else the model."""
    pairs = list(zip(model.inputs, inputs, strict=True))
    if not any(None in own.shape[1:] and len(own.shape) == len(x.shape) for own, x in pairs):
        return model
    known = [keras.Input(batch_shape=x.shape, dtype=x.dtype, name=own.name) for own, x in pairs]
    outputs = model._run_through_graph(known, operation_fn=lambda operation: operation)
    return keras.Model(known, outputs, name=model.name)


def _has_constants(node: Any, split: Split) -> bool:
    """Return whether an operand has positions, but is no tensor of the model: nobody says which part it is.

    Args:
        node: of a functional model.
        split: along which axes its inputs are split. The last one is among them where channels are gone: `x[..., 0]`.
    """
    last = len(node.outputs[0].shape) - 1 in split
    kept = () if isinstance(node.operation, keras.layers.Layer) else vars(node.operation).values()
    arrays = [value for value in kept if hasattr(value, "shape")]  # as the limits of `keras.ops.clip`
    for value in keras.tree.flatten((node.arguments.args, node.arguments.kwargs, arrays)):
        shape = np.shape(value) if not hasattr(value, "shape") else tuple(value.shape)
        if not isinstance(value, keras.KerasTensor) and any(n > 1 for n in (shape if last else shape[:-1])):
            return True
    return False


def _nbytes(layer: Any, tensor: Any) -> int:
    """Return the bytes of a value that a layer reads, in its compute dtype."""
    dtype = getattr(layer, "compute_dtype", None) or tensor.dtype
    return 2 if dtype in ("float16", "bfloat16") else int(np.dtype(dtype).itemsize)
