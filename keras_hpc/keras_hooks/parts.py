# SPDX-License-Identifier: Apache-2.0
"""With `init(spatial=)`: models of which each rank of a group computes a part of every sample.

`compile` plans a functional or sequential model (`spatial.plan`), and refuses what cannot be split. Where such a model
is called, its graph runs by the plan. In the steps of Keras itself, outputs stay the ranks' parts (`part_losses`).
Anywhere else, as in a step of the user's own, the model's outputs are whole, the same on all ranks of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.keras_hooks.data.arrays import digest
from keras_hpc.keras_hooks.state import seeds
from keras_hpc.keras_hooks.trials import own_steps
from keras_hpc.spatial import extents
from keras_hpc.spatial.masks import Masks
from keras_hpc.spatial.partition import plan_of
from keras_hpc.spatial.plan import Plan, Split, functional_of
from keras_hpc.spatial.run import Order, Runner

Method = Callable[..., Any]
MIN_ROWS = 4
CHECKED_CALLS = 3  # in which samples are compared, of each model


def install(job: Any, patcher: Any) -> None:
    """Hooks models, in a job with groups."""
    if job.group is None:
        return
    trainer = keras_private.get(keras_private.TRAINER)
    function, functional = keras_private.get(keras_private.FUNCTION), keras_private.get(keras_private.FUNCTIONAL)
    patcher.patch(trainer, "compile", _compile)
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        patcher.patch(keras_private.backend_trainer(), name, _planned)
    patcher.patch(keras_private.backend_trainer(), "make_predict_function", _make_predict_function)
    patcher.patch(function, "_run_through_graph", _run_through_graph)
    patcher.patch(functional, "input_spec", _input_spec)
    if keras.backend.backend() == "jax" and not job.keep_memory:
        import jax

        from keras_hpc.backends import jax_compiling

        trainer_module = keras_private.module(keras_private.JAX_TRAINER)
        if getattr(trainer_module, "jit", None) is jax.jit:  # and not that of Flax
            patcher.patch(trainer_module, "jit", jax_compiling.in_less_memory)


# ---- plans


def use(model: Any, plan: Plan) -> None:
    """Compute a model by a plan from now on."""
    group, known = current.job().group, current.job().known
    adding = [layer for layer in plan.layers_of_parts() if "add_loss" in keras_private.names_in_own(type(layer))]
    if adding:
        raise ValueError(
            "A layer of a model in parts cannot add a loss of its own where its output is split. Expected a loss in "
            "compile, a layer behind a global pooling or Flatten or marked with keras_hpc.spatial.whole, or "
            f"keras_hpc.partition(model, parts=1). Received: `{adding[0].name}` ({type(adding[0]).__name__})"
        )
    masks = Masks(keras_private.get(keras_private.GET_MASK), keras_private.get(keras_private.SET_MASK))
    runner = Runner(plan, group, seeds.of_part, masks) if plan.is_split else None
    for one in (model, functional_of(model)):
        state = known.model(one)
        state.runner, state.is_planned = runner, True
    _forget_outputs(model)
    for name in ("train_function", "test_function", "predict_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)  # they may have compiled what is not true any more


def _forget_outputs(model: Any) -> None:
    """Let the next step decide whether outputs are needed whole, of losses and metrics that may be others now."""
    runner = runner_of(model)
    if runner is None:
        return
    state = current.job().known.model(functional_of(model))
    alike = {(split, tuple(x.shape[a] for a in sorted(split))) for x, split in outputs_of(runner.plan)}
    state.needs_whole_outputs, state.outputs_are_decided = len(alike) > 1, False


def outputs_of(plan: Plan) -> list[tuple[Any, Split]]:
    """Return the outputs of a plan's model, each with the axes along which it is split."""
    return list(zip(plan.model.outputs, plan.outputs, strict=True))


def _plan_once(model: Any) -> None:
    """Plan a model, unless the user has."""
    job = current.job()
    function = functional_of(model)
    state = job.known.model(function)
    if state.is_planned and job.known.model(model).is_planned:
        return
    if hasattr(function, "_nodes_by_depth"):
        use(model, plan_of(model, job.group.grid, MIN_ROWS))
    elif isinstance(model, keras.Sequential):
        raise ValueError(
            "With init(spatial=) a model is planned when it is compiled. Expected a sequential model that begins with "
            f"keras.Input. Received: `{model.name}`, which is not built"
        )
    else:
        current.notice(f"model `{model.name}` is neither functional nor sequential: each rank computes all of it")


def _compile(original: Method) -> Method:
    @functools.wraps(original)
    def compile_(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not current.is_local():
            _plan_compiled(self)
        return result

    return compile_


def _plan_compiled(model: Any) -> None:
    _plan_once(model)
    _forget_outputs(model)
    if model.jit_compile is True and runner_of(model) is not None and keras.backend.backend() == "torch":
        raise ValueError(
            "PyTorch's compiler cannot see what ranks exchange inside of a model in parts. Expected jit_compile=False. "
            f"Received: jit_compile=True for `{model.name}`"
        )


def _planned(original: Method) -> Method:
    """Plan a model that was compiled before there was a job."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_known = current.is_local() or not self.compiled or current.job().known.model(self).is_planned
        if not is_known and (isinstance(self, keras.Sequential) or hasattr(functional_of(self), "_nodes_by_depth")):
            _plan_compiled(self)
        return original(self, *args, **kwargs)

    return call


def _make_predict_function(original: Method) -> Method:
    """Make it anew where a rank alone follows all ranks, or they follow it: it has compiled what they exchange, or not.

    Those of training and of `evaluate` are made anew in every job (step_functions.py).
    """

    @functools.wraps(original)
    def make(self: Any, force: bool = False) -> Any:
        modes, alone = current.job().known.model(self).step_modes, current.is_local()
        force = force or modes.get("predict", alone) != alone
        modes["predict"] = alone
        return original(self, force=force)

    return make


def runner_of(model: Any) -> Runner | None:
    """Return what computes a model in parts; None: it is computed as ever."""
    if not current.is_initialized() or current.job().group is None:
        return None
    runner: Runner | None = current.job().known.model(functional_of(model)).runner
    return runner


def gives_parts(model: Any) -> bool:
    """Return whether outputs are this rank's parts in the steps of a model, and losses and metrics are of these."""
    runner = runner_of(model)
    if runner is None or current.job().known.model(functional_of(model)).needs_whole_outputs:
        return False
    return any(runner.plan.outputs) and _steps_are_keras_own(model) and _has_keras_call(model)


def _has_keras_call(model: Any) -> bool:
    """Return whether a model's outputs are those of its graph, and nothing of the user's own comes behind it."""
    base = keras.Sequential if isinstance(model, keras.Sequential) else keras_private.get(keras_private.FUNCTIONAL)
    return all(getattr(type(model), name) is getattr(base, name) for name in ("call", "__call__"))


def _steps_are_keras_own(model: Any) -> bool:
    trainer, base = keras_private.backend_trainer(), keras_private.get(keras_private.TRAINER)
    own_test = getattr(model.test_step, "__func__", None) is trainer.test_step  # type: ignore[attr-defined]
    names = ("compute_loss", "compute_metrics")
    return (
        own_steps.is_keras_own(model)
        and own_test
        and all(getattr(getattr(model, name), "__func__", None) is getattr(base, name) for name in names)
    )


# ---- the graph


def communicates() -> bool:
    """Return whether what runs has values, and other ranks take part."""
    in_symbolic_scope = keras_private.get(keras_private.IN_SYMBOLIC_SCOPE)
    return current.active() and not running.building() and not in_symbolic_scope()


def _run_through_graph(original: Method) -> Method:
    @functools.wraps(original)
    def run(self: Any, inputs: Any, operation_fn: Any = lambda op: op, call_fn: Any = None) -> Any:
        runner = runner_of(self)
        symbolic = any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(inputs))
        if runner is None or call_fn is not None or symbolic or not communicates():
            return original(self, inputs, operation_fn, call_fn)
        step = running.step()
        model = None if step is None else step.model
        whole = model is None or functional_of(model) is not self or not gives_parts(model)
        # Named here, where all ranks are: a model that one rank alone has compiled must not count.
        name = current.job().known.key_of(self, "model")
        _check_first_samples(self, inputs)
        return runner.run(inputs, operation_fn, whole, name, Order() if step is None else step.order)

    return run


def _input_spec(original: Any) -> Any:
    """Let inputs have a part's rows."""

    def input_spec(self: Any) -> Any:
        spec = original.fget(self)
        runner = runner_of(self)
        if runner is None or not isinstance(spec, list):
            return spec
        relaxed = []
        for one, tensor in zip(spec, self.inputs, strict=True):
            split = runner.plan.splits[id(tensor)]
            shape = tuple(None if axis in split else rows for axis, rows in enumerate(one.shape))
            relaxed.append(
                keras.InputSpec(
                    shape=shape,
                    name=one.name,
                    optional=getattr(one, "optional", False),
                    allow_last_axis_squeeze=one.allow_last_axis_squeeze,
                )
            )
        return relaxed

    return property(input_spec, original.fset)


def as_whole(model: Any, batch: Any) -> Any:
    """Return a batch whose tensors have the shapes of whole samples where they have those of a part."""
    runner = runner_of(model)
    if runner is None or batch is None:
        return batch
    wholes: dict[int, Any] = {}
    for _, leaf, tensor, split in _pairs(runner.plan, batch):
        wholes.setdefault(id(leaf), _whole(leaf, tensor.shape, split))
    return keras.tree.map_structure(lambda leaf: wholes.get(id(leaf), leaf), batch)


def _pairs(plan: Plan, batch: Any) -> list[tuple[str, Any, Any, Split]]:
    """Return what each tensor of a batch is, the tensor, that of the model that it is for, and how that is split."""
    x, *others = keras.utils.unpack_x_y_sample_weight(batch)
    inputs = [(tensor, plan.splits[id(tensor)]) for tensor in plan.model.inputs]
    leaves = _in_order(x, plan.model.inputs, plan.model._inputs_struct)
    pairs = [("inputs", leaf, *of) for leaf, of in zip(leaves, inputs, strict=False)]
    outputs = outputs_of(plan)
    for what, other in zip(("targets", "sample weights"), others, strict=True):
        leaves = _in_order(other, plan.model.outputs, plan.model._outputs_struct)
        each = outputs if len(leaves) == len(outputs) else outputs[:1] * len(leaves)
        pairs += [(what, leaf, *of) for leaf, of in zip(leaves, each, strict=True)]
    return pairs


def fault_of_extents(model: Any, batch: Any) -> str | None:
    """Return which tensor of a batch does not fit the model's, of which it has neither all nor this rank's part."""
    runner = runner_of(model)
    for what, leaf, tensor, split in [] if runner is None or batch is None else _pairs(runner.plan, batch):
        shape = getattr(leaf, "shape", ())
        axes = [axis for axis in range(1, min(len(shape), len(tensor.shape) - 1)) if shape[axis] != 1]
        split = split if what == "inputs" or gives_parts(model) else frozenset()
        if reason := extents.fault_of(shape, tensor.shape, split, current.job().group.part, axes):
            return f"The {what} of model `{model.name}` in parts do not fit it. {reason}"
    return None


def _in_order(given: Any, tensors: Any, structure: Any) -> list[Any]:
    """Return what is given for the inputs or outputs of a model in their order, where it may be given by their names.

    Args:
        given: of a batch.
        tensors: the inputs, or outputs.
        structure: in which the model has them.
    """
    if isinstance(given, dict) and not isinstance(structure, dict):
        names = [x._keras_history.operation.name for x in tensors]
        if set(names) == set(given):
            return [given[name] for name in names]
    found: list[Any] = keras.tree.flatten(given)
    return found


def _whole(leaf: Any, shape: Any, split: Split) -> Any:
    found = list(getattr(leaf, "shape", None) or ())
    group = current.job().group
    for axis in split:
        if axis < len(found):
            begin, end = group.part(shape[axis], axis - 1)
            found[axis] = shape[axis] if found[axis] == end - begin else found[axis]
    if not found or found == list(leaf.shape):
        return leaf
    return keras.KerasTensor(tuple(found), keras.backend.standardize_dtype(leaf.dtype))


def check_same_samples(model: Any, batch: Any) -> None:
    """Raise on all ranks of a group unless they are given the same samples. Collective on the group.

    Of what is split already, a rank cannot know the others' rows: there only the number of samples is compared.
    """
    runner = runner_of(model)
    if runner is None:
        return
    group = current.job().group
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    mine = [
        [int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)],
        [None if _may_be_part(leaf, runner) else digest(leaf) for leaf in leaves],
    ]
    everyone = group.team.allgather_object(mine, "samples of a group")
    rows, digests = zip(*everyone, strict=True)
    # Extents tell little: a whole tensor may have as many rows as one rank's part of another tensor.
    wholes = [{one for one in of_leaf if one is not None} for of_leaf in zip(*digests, strict=False)]
    if any(theirs != rows[0] for theirs in rows) or any(len(one) > 1 for one in wholes):
        # A list has what a pipeline begins with, and no batch.
        if isinstance(batch, tuple) and (reason := fault_of_extents(model, batch)):
            raise ValueError(reason)
        raise ValueError(
            "The ranks of a group compute the same samples, each a part of them. Expected the same batch on all ranks "
            f"of group {group.index}. Received: {list(rows)} rows on them, of different contents where these are equal"
        )


def _check_first_samples(model: Any, inputs: Any) -> None:
    """Do the same in the first calls of a model that have values, as in a loop of the user's own. Collective."""
    state = current.job().known.model(model)
    traced = any(backends.current().is_traced(leaf) for leaf in keras.tree.flatten(inputs))
    if state.checked_calls < CHECKED_CALLS and not traced:
        state.checked_calls += 1
        check_same_samples(model, (inputs,))


def _may_be_part(leaf: Any, runner: Runner) -> bool:
    tensors = [(x, runner.plan.splits[id(x)]) for x in runner.plan.model.inputs] + outputs_of(runner.plan)
    return any(_whole(leaf, x.shape, split) is not leaf for x, split in tensors)
