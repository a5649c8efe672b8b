# SPDX-License-Identifier: Apache-2.0
"""Wraps a model's `train_step` and `test_step`, so that they know how many samples this rank holds, which may be none.

The gradients of a rank count in proportion to its samples. A rank without samples runs the step on one sample of zeros
with weight 0: it takes part in every exchange, contributes nothing, and forgets what the sample did to its own state,
but not what the other ranks' samples did to statistics that all share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_hpc.keras_hooks import normalization, scope

StepFunction = Callable[..., Any]


def wrap(model: Any, key: str, step: StepFunction, together: bool, guard: bool) -> StepFunction:
    """Returns `step` with its batch size known to the funnel.

    Args:
        model: the model that owns `step`.
        key: names the model's plans, the same on every rank.
        step: `train_step` or `test_step`, bound; on PyTorch the function that runs it.
        together: whether all ranks run as many steps.
        guard: whether batches may be empty. Only TensorFlow does not know the size of a batch when it runs this.
    """
    make = {"jax": _jax_step, "torch": _torch_step}.get(
        keras.backend.backend(), _guarded_step if guard else _plain_step
    )
    return functools.wraps(step)(make(step, functools.partial(scope.Step, model, key, together)))


def batch_size(data: Any) -> Any:
    """Returns the leading dimension of the first tensor in `data`, a number or a scalar tensor; None without one."""
    for leaf in keras.tree.flatten(data):
        if hasattr(leaf, "nrows"):  # tf.RaggedTensor
            return leaf.nrows()
        if getattr(leaf, "shape", None) is not None and len(leaf.shape) > 0:
            return keras.ops.shape(leaf)[0]
    return None


def _plain_step(step: StepFunction, described: Callable[[Any], scope.Step]) -> StepFunction:
    def counted(data: Any) -> Any:
        with scope.running_step(described(batch_size(data))):
            return step(data)

    return counted


def _jax_step(step: StepFunction, described: Callable[[Any], scope.Step]) -> StepFunction:
    def counted(state: Any, data: Any) -> Any:
        count = batch_size(data)
        empty = isinstance(count, int) and count == 0
        with scope.running_step(described(count)):
            logs, new_state = step(state, keras.tree.map_structure(_one_zero_row, data) if empty else data)
        if not empty:
            return logs, new_state
        if len(state) == 3:  # test_step: trainable, non-trainable, metrics
            return logs, state
        trainable, non_trainable, optimizer, _ = new_state
        model = described(count).model
        shared = set(map(id, normalization.shared_statistics(model)))
        variables = zip(model.non_trainable_variables, non_trainable, state[1], strict=True)
        kept = [new if id(variable) in shared else old for variable, new, old in variables]
        return logs, (trainable, kept, optimizer, state[3])

    return counted


def _torch_step(step: StepFunction, described: Callable[[Any], scope.Step]) -> StepFunction:
    def counted(batches: Any) -> Any:
        (data,) = batches  # PyTorch's trainer runs one step at a time
        this = described(batch_size(data))
        empty = isinstance(this.count, int) and this.count == 0
        variables = _own_state(this.model) if empty else []
        before = [keras.ops.copy(variable.value) for variable in variables]
        with scope.running_step(this):
            logs = step([keras.tree.map_structure(_one_zero_row, data) if empty else data])
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return logs

    return counted


def _guarded_step(step: StepFunction, described: Callable[[Any], scope.Step]) -> StepFunction:
    import tensorflow as tf

    def counted(data: Any) -> Any:
        count = batch_size(data)
        if count is None:
            return step(data)
        empty = tf.equal(count, 0)

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
                return leaf
            rows = tf.cond(empty, lambda: _one_zero_row(leaf), lambda: leaf)
            rows.set_shape([None, *leaf.shape[1:]])
            return rows

        variables = _own_state(described(count).model)
        before = [tf.identity(variable.value) for variable in variables]
        with scope.running_step(described(count)):
            logs = step(keras.tree.map_structure(filled, data))

        def restore() -> Any:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return tf.constant(True)

        tf.cond(empty, restore, lambda: tf.constant(False))
        return logs

    return counted


def _own_state(model: Any) -> list[Any]:
    """Returns the variables that a step changes by this rank's samples alone, and not through gradients."""
    shared = set(map(id, normalization.shared_statistics(model)))
    return [*(v for v in model.non_trainable_variables if id(v) not in shared), *model.metrics_variables]


def _one_zero_row(leaf: Any) -> Any:
    """Returns one sample of zeros for a leaf that has none."""
    if leaf is None or len(leaf.shape) == 0:
        return leaf
    return keras.ops.zeros((1, *keras.ops.shape(leaf)[1:]), dtype=leaf.dtype)
