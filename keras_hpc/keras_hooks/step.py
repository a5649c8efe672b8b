# SPDX-License-Identifier: Apache-2.0
"""Wraps a model's `train_step` and `test_step`, so that they know how many samples this rank holds, which may be none.

The gradients of a rank count in proportion to its samples, and so do logs, which say how many those are. A rank without
samples runs the step on one sample of zeros with weight 0, or on a whole batch of them where the model takes no other:
it takes part in every exchange, contributes nothing, and forgets what the zeros did to its own state, but not what the
other ranks' samples did to statistics that all share. On PyTorch it takes samples that it had before, if any: zeros may
give numbers that are none, as where a mask leaves nothing of them, and PyTorch's losses and distributions raise then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_hpc.job import current
from keras_hpc.keras_hooks import building, losses, part_extents, part_outputs, running
from keras_hpc.keras_hooks.state import layer_states, normalization, seeds
from keras_hpc.keras_hooks.state.variables import buffers
from keras_hpc.keras_hooks.trials import own_steps

StepFunction = Callable[..., Any]
Begin = Callable[[Any], contextlib.AbstractContextManager[running.Step]]
_SAMPLES = "_keras_hpc_samples"  # among the logs of a step, until its function returns them


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a step function is made.

    Args:
        active: whether it works together with other ranks.
        in_lockstep: whether all ranks run as many steps, so that they may exchange something in each.
        may_be_empty: whether batches may be empty. Only TensorFlow does not know the size of a batch when it traces.
        rows: of a batch that stands for none.
        whole: whether ranks take whole batches, so that one that stands for none has as many rows as those before: a
            step may know how many they are, or the first axis of its batches may be none of samples.
        virtual: whether this rank computes several parts of a batch in turn.
    """

    active: bool
    in_lockstep: bool
    may_be_empty: bool
    rows: int
    whole: bool = False
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
    # For one row, PyTorch's own layers refuse to normalize a batch.
    rows = building.fixed_batch(model) or (2 if keras.backend.backend() == "torch" else 1)
    if current.job().virtual is not None:
        return Mode(True, True, True, rows, virtual=True)
    # What ranks exchange in a step would be all that they send in local steps.
    in_lockstep = shared_out if kind == "test" else current.team_of(model).schedule.local is None
    whole = current.job().batch == "local"
    return Mode(True, in_lockstep, bool(getattr(adapter, "may_be_empty", False)), rows, whole)


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
    shares_states = kind == "train" and mode.in_lockstep
    is_own = not own_steps.has_own(model, f"{kind}_step")

    @contextlib.contextmanager
    def begin(count: Any) -> Iterator[running.Step]:
        this = running.Step(model, key, mode.in_lockstep, count, shares_states=shares_states)
        with running.running_step(this):
            if is_own:
                losses.meet(this)
            yield this

    makes = {"jax": _jax_step, "torch": _torch_step}
    make = makes.get(keras.backend.backend(), _guarded_step if mode.may_be_empty else _plain_step)
    counted = make(layer_states.together(step) if shares_states else step, begin, mode)

    @functools.wraps(step)
    def drawing_by_rank(*args: Any) -> Any:
        batch = args[-1][0] if keras.backend.backend() == "torch" else args[-1]
        part_outputs.decide(model, batch)
        with part_extents.explained(model, lambda: batch), seeds.of_rank(model):
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


def samples_of(logs: Any) -> Any:
    """Take the number of this rank's samples in the last step from its logs: a number or a tensor; None: unknown."""
    return logs.pop(_SAMPLES, None) if isinstance(logs, dict) else None


def _noted(logs: Any, count: Any) -> Any:
    if not isinstance(logs, dict) or count is None:
        return logs
    known = isinstance(count, int) and keras.backend.backend() == "torch"
    return {**logs, _SAMPLES: count if known else keras.ops.cast(count, "int32")}


def _plain_step(step: StepFunction, begin: Begin, mode: Mode) -> StepFunction:
    def counted(data: Any) -> Any:
        count = batch_size(data)
        with begin(count):
            return _noted(step(data), count)

    return counted


def _jax_step(step: StepFunction, begin: Begin, mode: Mode) -> StepFunction:
    rows = mode.rows

    def counted(state: Any, data: Any) -> Any:
        nonlocal rows
        count = batch_size(data)
        empty = isinstance(count, int) and count == 0
        if mode.whole and isinstance(count, int):
            rows = max(rows, count)  # of the batches that it is compiled for
        with begin(count) as this:
            logs, new_state = step(state, zeros(data, rows) if empty else data)
        if not empty:
            return _noted(logs, count), new_state
        logs = _noted(_without_nan(logs), count)
        if len(state) == 3:  # test_step: trainable, non-trainable, metrics
            return logs, state
        trainable, non_trainable, optimizer, _ = new_state
        own = set(map(id, own_state(this.model, this.shares_states)))
        variables = zip(this.model.non_trainable_variables, non_trainable, state[1], strict=True)
        kept = [old if id(variable) in own else new for variable, new, old in variables]
        return logs, (trainable, kept, optimizer, state[3])

    return counted


def _torch_step(step: StepFunction, begin: Begin, mode: Mode) -> StepFunction:
    earlier: Any = None  # samples of this rank, where a later batch may have none

    def counted(batches: Any) -> Any:
        nonlocal earlier
        (data,) = batches  # PyTorch's trainer runs one step at a time
        count = batch_size(data)
        empty = isinstance(count, int) and count == 0
        if earlier is None and count and mode.may_be_empty:
            first = functools.partial(_first_rows, rows=mode.rows)
            earlier = data if mode.whole else keras.tree.map_structure(first, data)
        with begin(count) as this:
            variables = [*own_state(this.model, this.shares_states), *buffers(this.model)] if empty else []
            before = [keras.ops.copy(variable.value) for variable in variables]
            logs = step([data if not empty else zeros(data, mode.rows) if earlier is None else earlier])
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return _noted(_without_nan(logs) if empty else logs, count)

    return counted


def _guarded_step(step: StepFunction, begin: Begin, mode: Mode) -> StepFunction:
    import tensorflow as tf

    fixed = mode.rows if mode.rows > 1 else None
    with tf.device("CPU:0"):  # where shapes are
        known = tf.Variable(mode.rows, trainable=False)  # how many rows a batch that stands for none has

    def counted(data: Any) -> Any:
        count = batch_size(data)
        if count is None:
            return step(data)
        empty = tf.equal(count, 0)
        rows = known.assign(tf.maximum(known, tf.cast(count, tf.int32))) if mode.whole else mode.rows

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                return _filled(leaf, tf.where(empty, rows, 0))
            if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
                return leaf
            full = tf.cond(empty, lambda: _zero_rows(leaf, rows), lambda: leaf)
            full.set_shape([fixed, *leaf.shape[1:]])
            return full

        with begin(count) as this:
            variables = own_state(this.model, this.shares_states)
            before = [tf.identity(variable.value) for variable in variables]
            logs = step(keras.tree.map_structure(filled, data))

        def restore() -> Any:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return tf.constant(True)

        tf.cond(empty, restore, lambda: tf.constant(False))
        return _noted(_without_nan(logs, empty), count)

    return counted


def _filled(tensor: Any, more: Any) -> Any:
    """Return a ragged or sparse tensor that has no rows with so many more: of one zero, or of none that are kept."""
    import tensorflow as tf

    if isinstance(tensor, tf.SparseTensor):
        count = tensor.dense_shape[:1] + tf.cast(more, tf.int64)
        return tf.SparseTensor(tensor.indices, tensor.values, tf.concat([count, tensor.dense_shape[1:]], 0))
    values = tensor.flat_values
    zeros = tf.zeros(tf.concat([[more], tf.shape(values)[1:]], 0), values.dtype)
    ends = tf.range(1, tf.cast(more, tensor.row_splits.dtype) + 1)
    splits = [tf.concat([of_axis, ends], 0) for of_axis in tensor.nested_row_splits]
    return tf.RaggedTensor.from_nested_row_splits(tf.concat([values, zeros], 0), splits, validate=False)


def _without_nan(logs: Any, empty: Any = True) -> Any:
    """Return logs of zeros that stand for no samples, from which a callback must not conclude that training failed."""

    def finite(value: Any) -> Any:
        value = keras.ops.convert_to_tensor(value)
        if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)):
            return value
        bad = keras.ops.logical_and(empty, keras.ops.logical_not(keras.ops.isfinite(value)))
        return keras.ops.where(bad, keras.ops.zeros_like(value), value)

    return keras.tree.map_structure(finite, logs)


def own_state(model: Any, shares_states: bool) -> list[Any]:
    """Return the variables that a step changes by this rank's samples alone, and not through gradients."""
    alike = [*normalization.shared_statistics(model), *(layer_states.shared(model) if shares_states else [])]
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


def _first_rows(leaf: Any, rows: int) -> Any:
    """Return a copy of the first rows of an array, again and again where it has fewer."""
    if not len(getattr(leaf, "shape", ())):
        return leaf
    return keras.ops.take(leaf, [row % leaf.shape[0] for row in range(rows)], axis=0)


def _zero_rows(leaf: Any, rows: int) -> Any:
    if leaf is None or len(leaf.shape) == 0:
        return leaf
    return keras.ops.zeros((rows, *keras.ops.shape(leaf)[1:]), dtype=leaf.dtype)
