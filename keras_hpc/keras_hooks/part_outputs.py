# SPDX-License-Identifier: Apache-2.0
"""Decides, before a model in parts makes its first step, whether its outputs are needed whole.

Losses and metrics that have a value for each position are computed of parts (`part_losses`). Others mix positions, as a
ratio of sums over all pixels: they need outputs whole, on all ranks of a group alike, and each rank computes what one
rank does. So do outputs that are not all split alike. Which it is, losses and metrics say of the shapes of a batch, so
all ranks find the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, part_extents, part_losses, parts
from keras_hpc.spatial.plan import functional_of


@dataclasses.dataclass
class Question:
    """Whether a function mixes positions.

    Attributes:
        of: the loss or metric.
        what: its name.
        arguments: of `part_losses.Part.mixed_axis`.
    """

    of: Any
    what: str
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Trial(part_losses.Part):
    """Outputs that are looked at before the first step. Nothing is computed, so nothing is refused.

    Attributes:
        questions: that are asked afterwards, where functions have values.
        mixing: the losses and metrics that have no value for each position.
    """

    questions: list[Question] = dataclasses.field(default_factory=list)
    mixing: list[str] = dataclasses.field(default_factory=list)

    is_trial = True

    def ask(self, of: Any, what: str, *arguments: Any) -> None:
        """Keep a question."""
        self.questions.append(Question(of, what, arguments))

    def check(self, values: Any, what: str) -> None:
        """Note what has no value for each position."""
        if not self.has_each(values):
            self.mixing.append(what)


def decide(model: Any, batch: Any) -> None:
    """Find out, once after `compile`, whether a model's outputs are needed whole. Without communication.

    Args:
        model: a compiled model.
        batch: of which only shapes and dtypes matter.
    """
    if parts.runner_of(model) is None:
        return
    state = current.job().known.model(functional_of(model))
    if not state.outputs_are_decided and parts.gives_parts(model):
        with part_extents.explained(model, lambda: batch):
            trial = _trial(model, parts.as_whole(model, batch))
        own = [f"The metric `{one.name}` of your own class" for one in part_losses.own_metrics(model)]
        mixing = [*own, *trial.mixing, *(one.what for one in trial.questions if trial.mixed_axis(*one.arguments))]
        if mixing:
            state.needs_whole_outputs = True
            model.predict_function = None  # it may give parts
            current.notice(
                f"{mixing[0]} has no value for each position that depends on this position alone, as far as is known; "
                f"so the outputs of model `{model.name}`, which is computed in parts, are whole on all ranks of a group"
            )
        else:
            for one in trial.questions:
                trial.note(one.of, one.arguments[-1])
    state.outputs_are_decided = True
    if not parts.gives_parts(model):
        _check_targets(model, batch)


def _trial(model: Any, batch: Any) -> Trial:
    """Return what losses and metrics say of a batch of whole samples."""
    count = next((leaf.shape[0] for leaf in keras.tree.flatten(batch) if leaf is not None and len(leaf.shape)), None)
    samples = 1 if count == 0 else count  # a rank without any asks about one; TensorFlow may not know how many

    def symbolic(leaf: Any) -> Any:
        shape = (samples, *leaf.shape[1:]) if len(leaf.shape) else ()
        return keras.KerasTensor(shape, keras.backend.standardize_dtype(leaf.dtype))

    x, y, weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(_or_none(symbolic), batch))
    graph = functional_of(model)
    outputs = keras.tree.map_structure(symbolic, graph._outputs_struct)
    output, split = parts.outputs_of(parts.runner_of(model).plan)[0]  # type: ignore[union-attr]
    trial = Trial(1.0, 1, {axis: int(output.shape[axis]) for axis in split})
    trace: Callable[..., Any] = keras_private.get(keras_private.COMPUTE_OUTPUT_SPEC)

    def without_values(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # In a step of JAX variables have none, and what they get is dropped.
            every = [*model.variables, *model.metrics_variables]
            with keras.StatelessScope([(v, keras.ops.zeros(v.shape, v.dtype)) for v in every]):
                return function(*args, **kwargs)

        return call

    if getattr(model, "_compile_metrics", None) is not None:
        with part_losses.computing("metric", trial):
            trace(without_values(model.compute_metrics), x, y, outputs, sample_weight=weight)
    if getattr(model, "_compile_loss", None) is not None:
        with part_losses.computing("loss", trial):
            trace(without_values(model.compute_loss), x=x, y=y, y_pred=outputs, sample_weight=weight)
    return trial


def _or_none(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda leaf: None if leaf is None else function(leaf)


def _check_targets(model: Any, batch: Any) -> None:
    """Raise if targets are this rank's part where outputs are whole."""
    _, *given = keras.utils.unpack_x_y_sample_weight(batch)
    _, *wholes = keras.utils.unpack_x_y_sample_weight(parts.as_whole(model, batch))
    for mine, whole in zip(keras.tree.flatten(given), keras.tree.flatten(wholes), strict=True):
        if mine is not whole:
            raise ValueError(
                f"The outputs of model `{model.name}` in parts are whole, as not all of them are split alike, or a "
                "loss or metric has no value for each position. Expected targets and sample weights of whole samples, "
                f"{tuple(whole.shape)[1:]}; its inputs may be this rank's part. Received: {tuple(mine.shape)[1:]}"
            )
