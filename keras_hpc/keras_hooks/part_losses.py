# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of models in parts (`parts`), where outputs are this rank's part.

Targets are cut like the outputs, and a loss that is a mean over positions is multiplied by

    share = this rank's positions / the mean of those of the group's ranks

so that its mean over the group is the loss of the whole sample; the means that metrics keep are weighted by it. Losses
and metrics are asked once, of made-up samples, whether the value of a position depends on others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import keras

from keras_hpc.keras_hooks import keras_private, parts, running
from keras_hpc.keras_hooks.trials import pair_losses

Method = Callable[..., Any]
_ASKED_ROWS = 8  # of made-up samples, of each axis

# Of losses and metrics that do not mix positions: of outputs with how many axes, and along which of these.
_asked: weakref.WeakKeyDictionary[Any, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Part:
    """The outputs of which a loss or metric is computed.

    Attributes:
        share: this rank's positions, divided by what the group's ranks have on average.
        copies: how many ranks of the group have the same part.
        rows: that this rank has of each axis along which outputs are split, 1 for the first spatial one.
        repeats: of each array of sample weights, how many parts have the same, as they are not cut.
    """

    share: float
    copies: int
    rows: dict[int, int]
    repeats: frozenset[int] = frozenset()

    is_trial: ClassVar[bool] = False  # in which nothing is computed

    def mixed_axis(self, function: Callable[..., Any], dtype: str, y_true: Any, y_pred: Any) -> int | None:
        """Return an axis along which what a function gives for a position depends on others; None: there is none."""
        extents = keras.tree.flatten(y_pred)[0].shape[1:-1]

        def small(leaf: Any) -> Any:
            shape = list(leaf.shape)
            for axis, rows in [*enumerate(extents, 1), *self.rows.items()]:
                if axis < len(shape) and shape[axis] == rows:
                    shape[axis] = min(rows, _ASKED_ROWS)
            return keras.KerasTensor(shape, keras.backend.standardize_dtype(leaf.dtype))

        true, pred = keras.tree.map_structure(small, (y_true, y_pred))
        mixed = (axis for axis in sorted(self.rows) if pair_losses.depends_on_others(function, dtype, true, pred, axis))
        return next(mixed, None)

    def ask(self, of: Any, what: str, *arguments: Any) -> None:
        """Raise if a loss or metric mixes positions, of which some may be another rank's.

        Args:
            of: the loss or metric.
            what: its name.
            arguments: of `mixed_axis`.
        """
        if (axis := self.mixed_axis(*arguments)) is not None:
            raise ValueError(
                f"{what} of outputs in parts mixes positions, and ranks see a part of them only. Expected a value for "
                "each position that depends on this position alone; or compile the model again, which finds out that "
                f"outputs are needed whole. Received: values that change beside others along axis {axis}"
            )
        self.note(of, arguments[-1])

    def is_known(self, of: Any, y_pred: Any) -> bool:
        """Return whether a loss or metric was asked about outputs like these, along all axes that are split."""
        return _ways(self, y_pred) <= _asked.get(of, set())

    def note(self, of: Any, y_pred: Any) -> None:
        """Remember that a loss or metric does not mix positions of outputs like these."""
        _asked.setdefault(of, set()).update(_ways(self, y_pred))

    def has_each(self, values: Any) -> bool:
        """Return whether there is a value for each row that is split."""
        found = tuple(values.shape)
        return all(found[axis : axis + 1] == (rows,) for axis, rows in self.rows.items())

    def check(self, values: Any, what: str) -> None:
        """Raise unless there is a value for each row that is split: what mixes them cannot be added up from parts."""
        if not self.has_each(values):
            found = tuple(values.shape)
            rows = [str(self.rows.get(axis, "any")) for axis in range(1, max(self.rows) + 1)]
            raise ValueError(
                f"{what} of outputs in parts has a value for each position, because ranks see a part of them only. "
                f"Expected the shape (batch, {', '.join(rows)}, ...); or compile the model again, which finds out that "
                f"outputs are needed whole. Received: {found}"
            )


def _ways(part: Part, y_pred: Any) -> set[tuple[int, int]]:
    return {(len(keras.tree.flatten(y_pred)[0].shape), axis) for axis in part.rows}


class _Of(threading.local):
    loss: Part | None = None
    metric: Part | None = None
    name: str = ""  # of the loss


_of = _Of()


def install(job: Any, patcher: Any) -> None:
    """Hooks losses and metrics, in a job with groups."""
    if job.group is None:
        return
    trainer = keras_private.get(keras_private.TRAINER)
    patcher.patch(trainer, "compute_loss", functools.partial(_on_parts, "loss"))
    patcher.patch(trainer, "compute_metrics", functools.partial(_on_parts, "metric"))
    patcher.patch(keras.metrics.Mean, "update_state", _weighted)
    patcher.patch(keras.losses.Loss, "__call__", _asking_loss)
    patcher.patch(keras.metrics.MeanMetricWrapper, "update_state", _asking_metric)


def _on_parts(kind: str, original: Method) -> Method:
    """Wrap `compute_loss` and `compute_metrics`: of parts, with targets and weights cut like them."""

    @functools.wraps(original)
    def compute(
        self: Any,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        part = _part_of(self, y_pred)
        if part is None:
            return original(self, x, y, y_pred, sample_weight, *args, **kwargs)
        runner = parts.runner_of(self)
        y = keras.tree.map_structure(functools.partial(_cut, runner, "targets"), y)
        repeats = {_repeats(runner, leaf) for leaf in keras.tree.flatten(sample_weight) if leaf is not None}
        part = dataclasses.replace(part, repeats=frozenset(repeats))
        sample_weight = keras.tree.map_structure(functools.partial(_cut, runner, "sample weights"), sample_weight)
        with computing(kind, part):
            return original(self, x, y, y_pred, sample_weight, *args, **kwargs)

    return compute


@contextlib.contextmanager
def computing(kind: str, part: Part) -> Iterator[None]:
    """Context in which losses, or metrics, are of a part: `kind` is "loss" or "metric"."""
    before = getattr(_of, kind)
    setattr(_of, kind, part)
    try:
        yield
    finally:
        setattr(_of, kind, before)


def _part_of(model: Any, y_pred: Any) -> Part | None:
    """Return which part outputs are; None if they are whole, or nothing that has values."""
    leaves = [leaf for leaf in keras.tree.flatten(y_pred) if leaf is not None]
    if not leaves or isinstance(leaves[0], keras.KerasTensor) or not parts.gives_parts(model):
        return None
    runner = parts.runner_of(model)
    if runner is None or running.step() is None or not parts.communicates():
        return None
    split = runner.plan.outputs[0]  # all are split alike, and have as many rows there
    return Part(runner.share(0), runner.copies(0), {axis: int(leaves[0].shape[axis]) for axis in split})


def _cut(runner: Any, what: str, leaf: Any) -> Any:
    """Return this rank's part of targets or weights, if they have the outputs' positions."""
    if leaf is None:
        return None
    return runner.cut(leaf, parts.outputs_of(runner.plan)[0][0].shape, _cut_axes(runner, leaf), what)


def _cut_axes(runner: Any, leaf: Any) -> frozenset[int]:
    """Return along which axes targets or weights are cut, or are a part already: not where one is for all positions."""
    output, split = parts.outputs_of(runner.plan)[0]
    return frozenset(a for a in split if a < len(leaf.shape) and (leaf.shape[a] != 1 or output.shape[a] == 1))


def _repeats(runner: Any, leaf: Any) -> int:
    """Return how many parts of the outputs have the same weights."""
    _, split = parts.outputs_of(runner.plan)[0]
    return math.prod(runner.plan.grid.parts[axis - 1] for axis in split - _cut_axes(runner, leaf))


def repeats_of_weights(reduction: Any) -> int:
    """Return how many parts of the outputs of which a loss is computed have the same weights of samples."""
    found = _of.loss.repeats if _of.loss is not None else frozenset()
    if len(found) > 1:
        raise ValueError(
            f"A loss of outputs in parts with reduction={reduction!r} has weights of one kind for all. Expected "
            "weights for each position, or for each sample. Received: both"
        )
    return next(iter(found), 1)


def copies_of_loss(team: Any) -> int:
    """Return on how many ranks of a group the loss that is computed has the same values."""
    return int(team.parts) if _of.loss is None else _of.loss.copies


def counting_ranks(model: Any, team: Any) -> list[int]:
    """Return the ranks whose metrics count: of those that see the same outputs, the first one."""
    runner = parts.runner_of(model) if parts.gives_parts(model) else None
    ranks = range(team.size)
    return [
        rank
        for rank in ranks
        if (rank % team.parts == 0 if runner is None else runner.is_first_copy(rank % team.parts))
    ]


def share_of_loss(values: Any, reduction: Any) -> float | None:
    """Return what a mean over the positions of this rank's part is multiplied by; None if outputs are whole.

    Raises:
        ValueError: the loss has no value for each position, or is not reduced.
    """
    part = _of.loss
    if part is None:
        return None
    part.check(values, f"The loss `{_of.name}`")
    if part.is_trial:
        return None
    if reduction in (None, "none"):
        raise ValueError(
            f"The loss `{_of.name}` of outputs in parts is reduced. Expected a mean or a sum. Received: {reduction!r}"
        )
    return part.share


def _asking_loss(original: Method) -> Method:
    @functools.wraps(original)
    def __call__(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if _of.loss is not None and not _of.loss.is_known(self, y_pred):
            function = pair_losses.in_one_program(self, self.call)
            _of.loss.ask(self, f"The loss `{self.name}`", function, self.dtype, y_true, y_pred)
        before, _of.name = _of.name, self.name
        try:
            return original(self, y_true, y_pred, sample_weight=sample_weight)
        finally:
            _of.name = before

    return __call__


def _asking_metric(original: Method) -> Method:
    @functools.wraps(original)
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if _of.metric is not None and not _of.metric.is_known(self, y_pred):
            function = pair_losses.in_one_program(self, functools.partial(self._fn, **self._fn_kwargs))
            _of.metric.ask(self, f"The metric `{self.name}`", function, self.dtype, y_true, y_pred)
        return original(self, y_true, y_pred, sample_weight=sample_weight)

    return update_state


def _weighted(original: Method) -> Method:
    """Weigh what metrics average: Keras takes the mean of each sample first, and parts may have different sizes."""

    @functools.wraps(original)
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        part = _of.metric
        if part is None:
            return original(self, values, sample_weight=sample_weight)
        part.check(values, f"What the metric `{self.name}` averages")
        if part.is_trial:
            return original(self, values, sample_weight=sample_weight)
        if sample_weight is not None:
            weight = keras.ops.convert_to_tensor(sample_weight, self.dtype) * part.share
        else:  # then Keras takes no notice of a mask, as of `ignore_class`: with the positions it is gone
            values = keras.ops.mean(keras.ops.cast(values, self.dtype), axis=tuple(range(1, len(values.shape))))
            weight = keras.ops.full((keras.ops.shape(values)[0],), part.share, self.dtype)
        return original(self, values, sample_weight=weight)

    return update_state


def own_metrics(model: Any) -> list[Any]:
    """Return the metrics of a model that are of a class of the user's own, which may mix positions."""
    every = _leaves(getattr(model._compile_metrics, "metrics", None) or [])
    return [metric for metric in every if not type(metric).update_state.__module__.startswith("keras.")]


def _leaves(metrics: Any) -> Iterator[Any]:
    for metric in metrics:
        inner = getattr(metric, "metrics", None)
        yield from _leaves(inner) if inner else [metric]
