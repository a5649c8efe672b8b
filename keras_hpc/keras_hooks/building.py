# SPDX-License-Identifier: Apache-2.0
"""Builds models, metrics and optimizers before their first step, so that ranks can make them equal.

And tells what a model that is built can be given.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, part_extents, parts, running
from keras_hpc.keras_hooks.state import variables
from keras_hpc.keras_hooks.trials import unchanged


def install(job: Any, patcher: Any) -> None:
    """Hooks the method by which Keras builds a model from its first batch, of which this rank may have no samples."""

    def from_a_sample(original: Any) -> Any:
        @functools.wraps(original)
        def _symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
            if iterator is None:
                with part_extents.explained(self, lambda: data_batch):
                    return original(self, data_batch=_with_a_sample(parts.as_whole(self, data_batch)))

            first: Any = None

            def looked_at() -> Iterator[Any]:
                nonlocal first
                for *steps, batches in iterator:  # Keras before 3.12 does not say which step is the last
                    batch = batches[0] if isinstance(batches, (list, tuple)) else next(batches)
                    first = batch
                    yield *steps, [_with_a_sample(parts.as_whole(self, batch))]

            looking = getattr(iterator.data_adapter, "looked_at", contextlib.nullcontext)
            with looking(), part_extents.explained(self, lambda: first):
                return original(self, iterator=looked_at())

        return _symbolic_build

    patcher.patch(keras_private.get(keras_private.TRAINER), "_symbolic_build", from_a_sample)


def batch_of(call: inspect.BoundArguments) -> Any:
    """Return what a call of `train_on_batch` or `test_on_batch` was given, as arrays or tensors."""

    def with_shape(leaf: Any) -> Any:
        return leaf if leaf is None or (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) else np.asarray(leaf)

    return keras.tree.map_structure(with_shape, tuple(call.arguments.get(name) for name in ("x", "y", "sample_weight")))


def is_built(model: Any) -> bool:
    """Return whether a model and its optimizers have all their variables."""
    layers = all(layer.built for layer in model._flatten_layers())
    return layers and all(optimizer.built for optimizer in variables.optimizers_of(model))


def counts(model: Any) -> bool:
    """Return whether what a compiled model measures has all its variables, which a model that was loaded lacks.

    They must exist before a step, as a rank without samples puts back what it finds before one.
    """
    measures = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss")]
    return all(measure is None or measure.built for measure in measures)


def build(model: Any, batch: Any, *, metrics: bool = False) -> None:
    """Build model and optimizer for a batch of data, or of shapes and dtypes, where Keras can.

    Args:
        model: a compiled model.
        batch: what `fit` trains on.
        metrics: whether the metrics must be built even if all else is; otherwise the first step builds them.
    """

    def symbolic(leaf: Any) -> Any:
        if leaf is None:
            return None
        return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))

    if is_built(model) and (not metrics or counts(model)):
        return
    try:
        with unchanged.numbers(_counting(model)):
            model._symbolic_build(data_batch=keras.tree.map_structure(symbolic, batch))
    except (RuntimeError, ValueError, NotImplementedError, AttributeError, TypeError):  # whatever a call() may raise
        # A model without call(), as a GAN's with a train_step of its own, is built by its first step. What is wrong
        # with a model is raised by that step, too.
        if keras.backend.backend() == "tensorflow":
            # Where Keras tries to build only a model that is called: the next compile() may give this one more layers.
            model._tracker.unlock()
        return


def _counting(model: Any) -> list[Any]:
    """Return what may count in Python how often it is called, where each step is: the model, its layers and metrics."""
    if not model.run_eagerly:
        return []
    of_compile = getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)
    given = [metric for metric in keras.tree.flatten(of_compile) if isinstance(metric, keras.metrics.Metric)]
    # What is not built may note numbers of its first input where it is built.
    built = [layer for layer in model._flatten_layers() if layer.built]
    return variables.unique([*built, *model.metrics, *given])


def trace(model: Any, step: Callable[[Any], Any], element_spec: Any) -> None:
    """Trace a step on TensorFlow once without running it: that creates what its first run would create.

    Several optimizers of one model are built by the step itself. The variables that the first one makes while a step
    is traced have no values until it runs, so nothing could make them equal before.

    Args:
        model: the model that owns it.
        step: its `train_step`.
        element_spec: of the data.
    """
    import tensorflow as tf

    if is_built(model) or model.run_eagerly:
        return

    def plain(spec: Any) -> Any:
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] == 0:
            return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
        return None if isinstance(spec, tf.OptionalSpec) else spec

    with running.only_building(), part_extents.explained(model, lambda: element_spec):
        tf.function(step).get_concrete_function(tf.nest.map_structure(plain, element_spec))


def _with_a_sample(batch: Any) -> Any:
    """Return a batch, or one of the same shapes with a sample if it has none."""

    def filled(leaf: Any) -> Any:
        shape = tuple(getattr(leaf, "shape", None) or ())
        if not shape or shape[0] != 0:
            return leaf
        return keras.KerasTensor((1, *shape[1:]), keras.backend.standardize_dtype(leaf.dtype))

    return keras.tree.map_structure(filled, batch)


def keeps_states(model: Any) -> bool:
    """Return whether a model has recurrent layers that go on, in a batch, from where the batch before has ended."""
    return any(isinstance(layer, keras.layers.RNN) and layer.stateful for layer in model._flatten_layers())


def fixed_batch(model: Any) -> int | None:
    """Return the only batch size that a model takes; None: any.

    Its inputs may name the size of the batch that has built it, as those of a Sequential without `Input` do, so the
    model is traced with another size, too.
    """
    inputs = getattr(model, "inputs", None) or []
    sizes = {x.shape[0] for x in inputs if len(x.shape)} - {None}
    if not sizes:
        return None
    size = int(sizes.pop())
    known = current.job().known.model(model).takes_any_batch
    key = size, len(model.layers)
    if key not in known:
        known[key] = _takes(model, inputs, size + 1)
    return None if known[key] else size


def _takes(model: Any, inputs: list[Any], rows: int) -> bool:
    """Return whether a model can be called with so many samples."""

    def symbolic(x: Any) -> Any:
        return keras.KerasTensor((rows, *x.shape[1:]), x.dtype, x.sparse)

    given = inputs[0] if len(inputs) == 1 else model.input
    trace: Callable[..., Any] = keras_private.get(keras_private.COMPUTE_OUTPUT_SPEC)
    try:
        trace(model.call, keras.tree.map_structure(symbolic, given))
    except Exception:  # noqa: BLE001  whatever the layers raise; the step raises it again
        return False
    return True
