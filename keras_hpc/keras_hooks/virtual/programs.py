# SPDX-License-Identifier: Apache-2.0
"""The two programs of a training step of virtual ranks: of one part's gradients, and of the update.

A part's program is the same for all parts and on any number of ranks: what differs, as the part's own state and the
number that its random seeds are folded with, it is given. Were all parts of a rank computed in one program, a compiler
would see other programs on other numbers of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.gradients import early_start
from keras_hpc.keras_hooks.state import seeds
from keras_hpc.keras_hooks.step import batch_size
from keras_hpc.keras_hooks.virtual import sums


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a global batch.

    Args:
        number: of the part.
        total: samples of all parts.
        share: the part's, of these; 0 if it has none, and is computed on zeros.
        is_summed: whether its gradients become those of all parts.
    """

    number: int
    total: int
    share: float
    is_summed: bool


# A part's gradients (none in a test), its logs, and its new state.
Results = tuple[list[Any], Any, list[Any]]
# Given the model's state on JAX, data, the part, and the part's own state.
Program = Callable[[Any, Any, Part, list[Any]], Results]
_STATEFUL = {
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "Multinomial",
    "RandomShuffle",
    "RandomGamma",
    "RandomPoissonV2",
}


def own_variables(model: Any) -> list[Any]:
    """Return the variables that a step changes by itself and not by gradients, in the order of JAX's states."""
    return [*model.non_trainable_variables, *model.metrics_variables]


def reading(model: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Return what copies the values of a model's variables, in one program on TensorFlow."""
    if keras.backend.backend() != "tensorflow" or model.run_eagerly:
        return lambda variables: [keras.ops.copy(variable.value) for variable in variables]
    import tensorflow as tf

    programs: dict[tuple[int, ...], Any] = {}  # which hold their variables

    def read(variables: Sequence[Any]) -> list[Any]:
        key = tuple(map(id, variables))
        if key not in programs:

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
            def traced() -> list[Any]:
                return [tf.identity(variable.value) for variable in variables]

            programs[key] = tf.function(traced)
        return list(programs[key]())

    return read


def of_part(model: Any, kind: str, key: str, made: Any) -> Program:
    """Return what computes one part.

    Args:
        model: a built model.
        kind: "train" or "test".
        key: names the model's exchanges.
        made: Keras' own function (PyTorch).
    """
    step = getattr(model, f"{kind}_step")

    def described(data: Any, offset: Any, total: Any, part: Part | None = None) -> running.Step:
        total = keras.ops.reshape(keras.ops.cast(total, "float32"), (1,))
        this = running.Step(model, key, True, batch_size(data), total=total, offset=offset)
        if part is not None:
            this.part, this.weight = part.number, part.share if part.is_summed else None
        return this

    if keras.backend.backend() == "tensorflow":
        return _on_tensorflow(model, step, described)
    if keras.backend.backend() == "jax":
        return _on_jax(model, step, described)
    return _on_torch(model, made, described)


def _only(applied: list[Any]) -> list[Any]:
    if len(applied) > 1:
        raise ValueError(f"With init(virtual_ranks=) a step makes one update. Received: {len(applied)} updates")
    return list(applied[0]) if applied else []


def _on_tensorflow(model: Any, step: Callable[..., Any], described: Callable[..., running.Step]) -> Program:
    import tensorflow as tf

    programs: dict[Any, tuple[Any, list[bool]]] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(data: Any, scalars: Sequence[Any], values: list[Any]) -> Results:
        offset, total, share, is_summed = scalars
        own = own_variables(model)
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)
        with running.running_step(described(data, offset, total)), running.trying() as applied:
            logs = step(data)
        gradients = sums.early(model, _only(applied.gradients), share, is_summed)
        return gradients, logs, [tf.identity(variable.value) for variable in own]

    def program_for(data: Any, values: list[Any]) -> tuple[Any, list[bool]]:
        leaves = keras.tree.flatten(data)
        plain = [leaf for leaf in leaves if leaf is not None]
        if any(not isinstance(leaf, tf.Tensor) for leaf in plain):
            raise ValueError(
                "With init(virtual_ranks=) data are dense tensors so far. Received: "
                f"{sorted({type(leaf).__name__ for leaf in plain})}"
            )
        specs = [tf.TensorSpec([None, *leaf.shape[1:]] if leaf.shape.rank else [], leaf.dtype) for leaf in plain]
        key = (repr(keras.tree.map_structure(lambda leaf: leaf is None, data)), tuple(specs))
        if key not in programs:
            present: list[bool] = []

            @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
            def traced(tensors: list[Any], scalars: list[Any], values: list[Any]) -> Results:
                given = iter(tensors)
                filled = [None if leaf is None else next(given) for leaf in leaves]
                gradients, logs, new = run(keras.tree.pack_sequence_as(data, filled), scalars, values)
                present[:] = [gradient is not None for gradient in gradients]
                return [gradient for gradient in gradients if gradient is not None], logs, new

            shapes = [tf.TensorSpec(value.shape, value.dtype) for value in values]
            scalars = [tf.TensorSpec([], dtype) for dtype in (tf.int32, tf.float32, tf.float64, tf.bool)]
            program = tf.function(traced).get_concrete_function(specs, scalars, shapes)
            _refuse_stateful(program.graph.as_graph_def())
            programs[key] = program, present
        return programs[key]

    def part(state: Any, data: Any, part: Part, values: list[Any]) -> Results:
        scalars = [
            tf.constant(seeds.offset(part.number), tf.int32),
            tf.constant(part.total, tf.float32),
            tf.constant(part.share, tf.float64),
            tf.constant(part.is_summed),
        ]
        if model.run_eagerly:
            results: Results = run(data, scalars, values)
            return results
        program, present = program_for(data, values)
        tensors = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
        found, logs, new = program(tensors, scalars, list(values))
        gradients = iter(found)
        return [next(gradients) if there else None for there in present], logs, list(new)

    return part


def _refuse_stateful(graph: Any) -> None:
    """Raise where a program draws from TensorFlow's own streams: each operation goes on with its own, at each call."""
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    drawn = sorted({node.op for node in nodes} & _STATEFUL)
    if drawn:
        raise ValueError(
            "With init(virtual_ranks=) random numbers of a step come from Keras: keras.random with a SeedGenerator. "
            f"Received: operations that draw from streams of TensorFlow, {', '.join(drawn)}"
        )


def _on_jax(model: Any, step: Callable[..., Any], described: Callable[..., running.Step]) -> Program:
    import jax

    def run(trainable: Any, optimizer: Any, values: Any, data: Any, scalars: Any) -> Any:
        offset, total, share, is_summed = scalars
        statistics = len(model.non_trainable_variables)
        own, metrics = values[:statistics], values[statistics:]
        state = (trainable, own, metrics) if optimizer is None else (trainable, own, optimizer, metrics)
        with running.running_step(described(data, offset, total)), running.trying() as applied:
            logs, new = step(state, data)
        return sums.early(model, _only(applied.gradients), share, is_summed), logs, [*new[1], *new[-1]]

    program = jax.jit(run) if model.jit_compile and not model.run_eagerly else run

    def part(state: Any, data: Any, part: Part, values: list[Any]) -> Results:
        trainable, optimizer = state[0], state[2] if len(state) == 4 else None
        scalars = np.uint32(seeds.offset(part.number)), np.float32(part.total), np.float64(part.share), part.is_summed
        results: Results = program(trainable, optimizer, list(values), data, scalars)
        return results

    return part


def _on_torch(model: Any, made: Callable[..., Any], described: Callable[..., running.Step]) -> Program:
    import torch

    made = early_start.wrap(model, made)

    def part(state: Any, data: Any, part: Part, values: list[Any]) -> Results:
        own = own_variables(model)
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)
        # In memory that is aligned as all is, wherever the rows of a part are in an array.
        data = keras.tree.map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, data)
        offset = seeds.offset(part.number)
        with running.running_step(described(data, offset, part.total, part)), running.trying() as applied:
            with seeds.of_rank(model):
                logs = made([data])
        new = [variable.value.detach().clone() for variable in own]
        return sums.early(model, _only(applied.gradients), part.share, part.is_summed), logs, new

    return part


def update(model: Any) -> Callable[[Any, Sequence[Any]], Any]:
    """Return what applies gradients: given the model's state on JAX, and them. It returns the new state."""
    if keras.backend.backend() == "jax":
        import jax

        def stateless(trainable: Any, optimizer: Any, gradients: Any) -> Any:
            with running.summing():
                return model.optimizer.stateless_apply(optimizer, gradients, trainable)

        compiled = model.jit_compile and not model.run_eagerly
        program = jax.jit(stateless, donate_argnums=(0, 1)) if compiled else stateless

        def on_jax(state: Any, gradients: Sequence[Any]) -> Any:
            trainable, optimizer = program(state[0], state[2], list(gradients))
            return (trainable, state[1], optimizer, state[3])

        return on_jax

    if keras.backend.backend() == "tensorflow" and not model.run_eagerly:
        import tensorflow as tf

        present: dict[tuple[bool, ...], Any] = {}

        def on_tensorflow(state: Any, gradients: Sequence[Any]) -> Any:
            there = tuple(gradient is not None for gradient in gradients)
            if there not in present:

                @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
                def traced(given: list[Any]) -> None:
                    each = iter(given)
                    with running.summing():
                        filled = [next(each) if one else None for one in there]
                        model.optimizer.apply(filled, model.trainable_variables)

                present[there] = tf.function(traced, reduce_retracing=True)
            present[there]([gradient for gradient in gradients if gradient is not None])
            return state

        return on_tensorflow

    def at_once(state: Any, gradients: Sequence[Any]) -> Any:
        with running.summing():
            model.optimizer.apply(list(gradients), model.trainable_variables)
        return state

    return at_once
