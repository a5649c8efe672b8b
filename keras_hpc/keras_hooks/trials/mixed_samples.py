# SPDX-License-Identifier: Apache-2.0
"""Names models whose outputs for a sample depend on the other samples of its batch: each rank has a part of them.

A layer of the user's own may take a mean over axis 0, and the loss of its outputs does not say so. With
`init(batch="global")` a model that has code of the user's own is tried, once: the outputs for half of some samples must
be the same beside the other half. BatchNormalization does so on purpose and is documented.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current, log
from keras_hpc.keras_hooks import building, running
from keras_hpc.keras_hooks.state import normalization, seeds, variables
from keras_hpc.keras_hooks.trials import made_up, own_steps, unchanged


def check(model: Any, adapter: Any) -> None:
    """Try a model before its first step in a `fit`, once. Ranks call it together, and find the same.

    Args:
        model: a model that is built.
        adapter: of its data.
    """
    state = current.job().known.model(model)
    if state.mixing_was_tried or not _is_worth_trying(model):
        return
    state.mixing_was_tried = True
    x = _samples(model, adapter)
    if x is None or not _mixes(model, x) or current.team_of(model).rank > 0:
        return
    log.warning(
        f"model `{model.name}`: what it gives for a sample depends on the other samples of the batch, of which each "
        "rank has a part. So ranks do not compute what one rank computes. Let layers compute each sample by itself, or "
        "reduce what they take of all samples: keras_hpc.allreduce(keras.ops.mean(x, axis=0))"
    )


def _is_worth_trying(model: Any) -> bool:
    """Return whether a model has code of the user's own, that no other check tries and no known layer disturbs."""
    layers = model._flatten_layers()
    if (
        current.job().group is not None
        or not own_steps.is_keras_own(model)
        or building.keeps_states(model)
        or variables.buffers(model)
    ):
        return False  # a step of the user's own is tried as a whole
    return any(map(_is_users, layers)) and not any(map(normalization.is_normalization, layers))


def _is_users(layer: Any) -> bool:
    """Return whether a layer, or what stands between the layers of a functional model, is of the user's own."""
    operations = getattr(layer, "operations", None) or []
    return (
        isinstance(layer, keras.layers.Lambda)
        or not type(layer).__module__.startswith("keras.")
        or not all(isinstance(operation, keras.Layer) for operation in operations)
    )


def _samples(model: Any, adapter: Any) -> Any:
    """Return an even number of samples, or None if nobody knows what they look like."""
    if hasattr(adapter, "rows"):
        rows = adapter.rows(2 * made_up.ROWS)
        half = len(keras.tree.flatten(rows)[0]) // 2
        return keras.tree.map_structure(lambda x: x[: 2 * half], rows) if half else None
    inputs = getattr(model, "inputs", None)
    if inputs is None:
        return None
    given = inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(made_up.samples, given)


def _mixes(model: Any, x: Any) -> bool:
    """Return whether outputs for half of the samples are others beside the other half."""
    half = len(keras.tree.flatten(x)[0]) // 2
    layers = model._flatten_layers()
    try:
        with seeds.kept(), unchanged.attributes(layers), running.trying() as trial, current.unhooked():
            first = keras.tree.map_structure(lambda a: a[:half], x)
            alone, again, beside = (_outputs(model, given) for given in (first, first, x))
    except Exception:  # noqa: BLE001  a model may refuse such samples; what is wrong with it, the step raises again
        return False
    if trial.communicates:
        return False
    tolerance = made_up.tolerance_of(layer.compute_dtype for layer in layers)
    for here, same, there in zip(alone, again, beside, strict=True):
        is_per_sample = here.ndim > 0 and here.shape[0] == half and there.shape == (2 * half, *here.shape[1:])
        if not is_per_sample or not np.isfinite(here).all():
            continue
        rounding = tolerance * abs(here).max(initial=0)
        draws = (abs(same - here) > rounding).any()
        if not draws and (abs(there[:half] - here) > rounding).any():
            return True
    return False


def _outputs(model: Any, x: Any) -> list[np.ndarray]:
    """Return the outputs of a model in training, where it draws nothing then."""
    quiet = not variables.seed_generators(model)
    options = {"training": quiet} if "training" in inspect.signature(model.call).parameters else {}
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]

    def call(x: Any) -> Any:
        return model.stateless_call(*values, x, **options)[0]

    if keras.backend.backend() == "jax":
        import jax

        call = jax.jit(call)
    with backends.current().outside_programs():
        outputs = call(keras.tree.map_structure(keras.ops.convert_to_tensor, x))
        return [np.asarray(backends.current().to_numpy(leaf), np.float64) for leaf in keras.tree.flatten(outputs)]
