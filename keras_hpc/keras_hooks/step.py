# SPDX-License-Identifier: Apache-2.0
"""Wraps a model's `train_step` and `test_step`, so that they know how many samples this rank holds, which may be none.

The gradients of a rank count in proportion to its samples. A rank without samples runs the step on one sample of zeros
with weight 0, or on a whole batch of them where the model takes no other: it takes part in every exchange, contributes
nothing, and forgets what the zeros did to its own state, but not what the other ranks' samples did to statistics that
all share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_hpc.job import current
from keras_hpc.keras_hooks import building, normalization, running, seeds

StepFunction = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a step function is made.

    Args:
        active: whether it works together with other ranks.
        in_lockstep: whether all ranks run as many steps, so that they may exchange something in each.
        may_be_empty: whether batches may be empty. Only TensorFlow does not know the size of a batch when it traces.
        rows: of a batch that stands for none.
        virtual: whether this rank computes several parts of a batch in turn.
    """

    active: bool
    in_lockstep: bool
    may_be_empty: bool
    rows: int
    virtual: bool = False


PLAIN = Mode(False, False, False, 1)


def mode_of(kind: str, model: Any) -> Mode:
    """Return how the step function of a model is to be made for the running call.

    Args:
        kind: "train" or "test".
        model: the model.
    """
    call = running.call()
    adapter = None if call is None else call.adapter
    if not current.active() or (call is not None and call.own_data):
        return PLAIN
    shared_out = hasattr(adapter, "may_be_empty")
    rows = building.fixed_batch(model) or 1
    if current.job().virtual is not None:
        return Mode(True, True, True, rows, virtual=True)
    # What ranks exchange in a step would be all that they send in local steps.
    in_lockstep = shared_out if kind == "test" else current.team_of(model).schedule.local is None
    return Mode(True, in_lockstep, bool(getattr(adapter, "may_be_empty", False)), rows)


def wrap(model: Any, kind: str, mode: Mode, step: StepFunction) -> StepFunction:
    """Return `step` with its batch size known where gradients are reduced.

    Args:
        model: the model that owns `step`.
        kind: "train" or "test".
        mode: how to make it.
        step: `train_step` or `test_step`, bound; on PyTorch the function that runs it.
    """
    # The model's, the same on every rank.
    key = f"{current.job().known.key_of(model, 'model')}/{kind}"

    def described(count: Any) -> running.Step:
        return running.Step(model, key, mode.in_lockstep, count)

    make = {"jax": _jax_step, "torch": _torch_step}.get(
        keras.backend.backend(), _guarded_step if mode.may_be_empty else _plain_step
    )
    counted = make(step, described, mode.rows)

    @functools.wraps(step)
    def drawing_by_rank(*args: Any) -> Any:
        with seeds.of_rank(model):
            return counted(*args)

    return drawing_by_rank


def batch_size(data: Any) -> Any:
    """Return the leading dimension of the first tensor in `data`, a number or a scalar tensor; None without one."""
    for leaf in keras.tree.flatten(data):
        if hasattr(leaf, "nrows"):  # tf.RaggedTensor
            return leaf.nrows()
        if getattr(leaf, "shape", None) is not None and len(leaf.shape) > 0:
            return keras.ops.shape(leaf)[0]
    return None


def _plain_step(step: StepFunction, described: Callable[[Any], running.Step], rows: int) -> StepFunction:
    def counted(data: Any) -> Any:
        with running.running_step(described(batch_size(data))):
            return step(data)

    return counted


def _jax_step(step: StepFunction, described: Callable[[Any], running.Step], rows: int) -> StepFunction:
    def counted(state: Any, data: Any) -> Any:
        count = batch_size(data)
        empty = isinstance(count, int) and count == 0
        with running.running_step(described(count)):
            logs, new_state = step(state, zeros(data, rows) if empty else data)
        if not empty:
            return logs, new_state
        if len(state) == 3:  # test_step: trainable, non-trainable, metrics
            return logs, state
        trainable, non_trainable, optimizer, _ = new_state
        model = described(count).model
        own = set(map(id, _own_state(model)))
        variables = zip(model.non_trainable_variables, non_trainable, state[1], strict=True)
        kept = [old if id(variable) in own else new for variable, new, old in variables]
        return logs, (trainable, kept, optimizer, state[3])

    return counted


def _torch_step(step: StepFunction, described: Callable[[Any], running.Step], rows: int) -> StepFunction:
    def counted(batches: Any) -> Any:
        (data,) = batches  # PyTorch's trainer runs one step at a time
        this = described(batch_size(data))
        empty = isinstance(this.count, int) and this.count == 0
        variables = _own_state(this.model) if empty else []
        before = [keras.ops.copy(variable.value) for variable in variables]
        with running.running_step(this):
            logs = step([zeros(data, rows) if empty else data])
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return logs

    return counted


def _guarded_step(step: StepFunction, described: Callable[[Any], running.Step], rows: int) -> StepFunction:
    import tensorflow as tf

    def counted(data: Any) -> Any:
        count = batch_size(data)
        if count is None:
            return step(data)
        empty = tf.equal(count, 0)

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
                return leaf
            full = tf.cond(empty, lambda: _zero_rows(leaf, rows), lambda: leaf)
            full.set_shape([None if rows == 1 else rows, *leaf.shape[1:]])
            return full

        variables = _own_state(described(count).model)
        before = [tf.identity(variable.value) for variable in variables]
        with running.running_step(described(count)):
            logs = step(keras.tree.map_structure(filled, data))

        def restore() -> Any:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return tf.constant(True)

        tf.cond(empty, restore, lambda: tf.constant(False))
        return logs

    return counted


def _own_state(model: Any) -> list[Any]:
    """Return the variables that a step changes by this rank's samples alone, and not through gradients."""
    alike = list(normalization.shared_statistics(model))
    for layer in model._flatten_layers():
        # Whoever changes frozen weights in a step, as those of a teacher, computes them from other weights.
        alike += layer._trainable_variables
        if isinstance(layer, keras.layers.SpectralNormalization):
            alike += layer._non_trainable_variables  # the vector follows the kernel
    others = set(map(id, alike))
    return [*(v for v in model.non_trainable_variables if id(v) not in others), *model.metrics_variables]


def zeros(data: Any, rows: int) -> Any:
    """Return so many samples of zeros in the place of data that have none."""
    return keras.tree.map_structure(lambda leaf: _zero_rows(leaf, rows), data)


def _zero_rows(leaf: Any, rows: int) -> Any:
    if leaf is None or len(leaf.shape) == 0:
        return leaf
    return keras.ops.zeros((rows, *keras.ops.shape(leaf)[1:]), dtype=leaf.dtype)
