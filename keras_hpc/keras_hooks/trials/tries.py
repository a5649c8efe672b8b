# SPDX-License-Identifier: Apache-2.0
"""Tries a step of a model on made-up samples, which changes nothing, and looks at what it does with them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.keras_hooks import running
from keras_hpc.keras_hooks.gradients import clipping
from keras_hpc.keras_hooks.state import seeds, variables
from keras_hpc.keras_hooks.trials import made_up, unchanged

_PROJECTIONS = 3  # of gradients, in which those of two steps are compared
_SMALLER = 0.5  # of what they were are numbers of the other samples
_OTHERS = 2  # the seed of the other samples


def joined(samples: Any, others: Any) -> Any:
    """Return the batch of two parts of it."""
    return keras.tree.map_structure(lambda x, y: np.concatenate([x, y]) if np.ndim(x) else x, samples, others)


def tolerance(model: Any) -> float:
    """Return how far numbers of its steps that are equal, but for rounding, are apart, as a part of them."""
    return made_up.tolerance_of(layer.compute_dtype for layer in model._flatten_layers())


def look_at(arguments: tuple[Any, ...]) -> tuple[list[Any], Any, tuple[Any, ...]]:
    """Return the state and a batch, or the specification of one, of what a step function is called with.

    Returns:
        On JAX the state, in a list; the batch; and the arguments, with nothing taken from their batches.
    """
    *rest, batches = arguments
    if keras.backend.backend() == "tensorflow":
        batch = batches.element_spec
    elif keras.backend.backend() == "torch":
        (batch,) = batches
    else:
        batch = next(batches)
        batches = itertools.chain([batch], batches)
    return rest, batch, (*rest, batches)


def twin_step(model: Any) -> running.Step:
    """Return the step of one of two ranks that have the same samples."""
    return running.Step(model, "trial", in_lockstep=True, count=made_up.ROWS, twin=True)


@contextlib.contextmanager
def unchanged_model(model: Any) -> Iterator[None]:
    """Context after which a model's seeds, variables, and numbers and tensors among its attributes are as they were.

    So are those of its layers, and the numbers of its optimizers, as a learning rate that a step lowers; all else there
    only `apply` moves.
    """
    kept = (variable for optimizer in variables.optimizers_of(model) for variable in optimizer.variables)
    of_optimizers = [variable for variable in kept if len(variable.shape) == 0]
    held = variables.unique([*model.variables, *model.metrics_variables, *of_optimizers, *variables.buffers(model)])
    if keras.backend.backend() == "jax":  # which hands values on, and changes none
        held = []
    values = [np.array(backends.current().view(variable)) for variable in held]
    try:
        with seeds.kept(), unchanged.attributes(model._flatten_layers()):  # a step may count
            yield
    finally:
        for variable, value in zip(held, values, strict=True):
            backends.current().assign(variable, value)


class Tries:
    """Tries a step on samples, as often as wanted, and looks at the gradients that each `apply` would get.

    Args:
        model: whose step it is.
        rest: on JAX the state, in a list.
        step: the step of a rank that it is; None: of one rank alone.
        factor: what gradients are multiplied with.
        method: the step of the model.
    """

    def __init__(
        self,
        model: Any,
        rest: list[Any],
        step: running.Step | None,
        factor: float = 1.0,
        method: Literal["train_step", "test_step"] = "train_step",
    ) -> None:
        self.model, self.rest, self.step, self.factor, self.method = model, rest, step, factor, method
        self.communicates = False
        self.moved: dict[int, Any] = {}  # by how much variables of metrics have moved so far, by their `id`
        self.last: dict[int, Any] = {}  # the same, in the last try
        self.program: Callable[..., Any] = self._run
        if keras.backend.backend() == "tensorflow" and not model.run_eagerly:
            import tensorflow as tf

            # A partial of its own: TensorFlow counts traces by code, and would tell users that theirs are too many.
            self.program = tf.function(functools.partial(self._run))
        elif keras.backend.backend() == "jax":
            import jax

            self.program = jax.jit(self._run)

    def norms(self, samples: Any, draws: int) -> np.ndarray:
        """Return, for each draw, the norm of the gradients of each `apply`."""
        return np.array([self._try(samples)[0] for _ in range(draws)])

    def projections(self, samples: Any) -> np.ndarray:
        """Return some projections of the gradients of each `apply`."""
        return np.array(self._try(samples)[1]).reshape(-1, _PROJECTIONS)

    def moved_by(self, samples: Any) -> dict[int, Any]:
        """Return by how much variables of metrics move, by their `id`."""
        self._try(samples)
        return self.last

    def _try(self, samples: Any) -> tuple[list[float], list[list[float]]]:
        data = keras.tree.map_structure(lambda x: None if x is None else keras.ops.convert_to_tensor(x), samples)
        with unchanged.attributes(self.model._flatten_layers()):  # what a try counts there is no noise for the next one
            found, self.rest, moved = _from_the_same_state(self.model, self.program, self.rest, data)
        self.last = dict(zip(map(id, self.model.metrics_variables), moved, strict=True))
        for key, difference in self.last.items():
            self.moved[key] = self.moved.get(key, 0) + difference
        if keras.backend.backend() == "torch":
            self.model.zero_grad()
        norms, projections = keras.tree.map_structure(lambda x: float(backends.current().to_numpy(x)), found)
        return norms, projections

    def _without_gradients(self) -> contextlib.AbstractContextManager[Any]:
        if self.method == "train_step" or keras.backend.backend() != "torch":
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = backends.current().outside_programs()
        return context

    def _run(self, *arguments: Any) -> tuple[Any, list[Any]]:
        variables = self.model.trainable_variables if len(arguments) == 1 else arguments[0][0]
        with (
            self._without_gradients(),
            current.unhooked(),
            running.running_step(self.step),
            running.trying(self.factor) as trial,
            clipping.multiplied(variables),
        ):
            results = getattr(self.model, self.method)(*arguments)
        state = [results[1]] if keras.backend.backend() == "jax" else []  # with it the seeds of the next draw
        self.communicates = trial.communicates
        if self.factor != 1.0 and trial.takes_means:  # it may limit them
            return ([], []), state
        return (
            [_norm(values) for values in trial.gradients],
            [_projected(values) for values in trial.gradients],
        ), state


def _from_the_same_state(
    model: Any, program: Callable[..., Any], rest: list[Any], data: Any
) -> tuple[Any, list[Any], list[np.ndarray]]:
    """Run a trial. The next one begins as this one did, but for the seeds: layers may compute with what they count.

    Returns:
        What the trial has found, with what the next one begins, and by how much variables of metrics have moved.
    """
    seeds_of = {id(generator.state) for generator in variables.seed_generators(model)}
    backend = backends.current()
    if keras.backend.backend() == "jax":
        norms, ((trainable, others, *optimizer, metrics),) = program(*rest, data)
        known = zip(model.non_trainable_variables, others, rest[0][1], strict=True)
        others = [new if id(variable) in seeds_of else old for variable, new, old in known]
        moved = [_difference(new, old) for new, old in zip(metrics, rest[0][-1], strict=True)]
        return norms, [(trainable, others, *optimizer, rest[0][-1])], moved
    held = [v for v in (*model.non_trainable_variables, *model.metrics_variables) if id(v) not in seeds_of]
    if hasattr(program, "get_concrete_function"):
        held += _variables_of_a_script(model, program.get_concrete_function(*rest, data).graph.variables)
    values = [backend.to_numpy(variable) for variable in held]
    norms, rest = program(*rest, data)
    before = {id(variable): value for variable, value in zip(held, values, strict=True)}
    moved = [_difference(variable, before[id(variable)]) for variable in model.metrics_variables]
    for variable, value in zip(held, values, strict=True):
        backend.assign(variable, value)
    return norms, rest, moved


def _variables_of_a_script(model: Any, used: Sequence[Any]) -> list[Any]:
    """Return those of TensorFlow's variables that Keras does not know, wherever a script keeps them.

    Without states of its random generators, which go on from one try to the next, as Keras' do.
    """
    optimizers = variables.optimizers_of(model)
    known = [*model.variables, *model.metrics_variables, *(v for one in optimizers for v in one.variables)]
    held = {id(variable.value) for variable in known}
    others = [variable for variable in used if id(variable) not in held]
    return [v for v in others if v.dtype.is_floating or v.dtype.is_bool or v.shape.rank == 0]


@np.errstate(invalid="ignore")  # made-up samples may give infinities
def _difference(new: Any, old: Any) -> np.ndarray:
    values = [np.array(backends.current().to_numpy(value), np.float64) for value in (new, old)]
    return np.asarray(values[0] - values[1])


def _norm(gradients: list[Any]) -> Any:
    values = [_dense(gradient) for gradient in gradients if gradient is not None]
    squares = [keras.ops.sum(keras.ops.square(keras.ops.cast(value, "float32"))) for value in values]
    return keras.ops.sqrt(sum(squares, start=keras.ops.zeros(())))


def _projected(gradients: list[Any]) -> list[Any]:
    """Return sums of gradients times numbers that look like chance and are the same in every step."""
    sums = [keras.ops.zeros(()) for _ in range(_PROJECTIONS)]
    for gradient in gradients:
        if gradient is not None:
            flat = keras.ops.reshape(keras.ops.cast(_dense(gradient), "float32"), (-1,))
            places = keras.ops.cast(keras.ops.arange(1, keras.ops.size(flat) + 1), "float32")
            sums = [total + keras.ops.sum(flat * keras.ops.sin(k * places)) for k, total in enumerate(sums, 1)]
    return sums


def _dense(gradient: Any) -> Any:
    """Return a gradient as a tensor: rows of an embedding come as often as they were used, and are added up."""
    if hasattr(gradient, "dense_shape"):
        import tensorflow as tf

        return tf.convert_to_tensor(gradient)
    return keras.ops.convert_to_tensor(gradient)


def pairs_of_parts(rank: Tries, samples: Any, batch: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of parts of a batch, of samples that are not alike.

    In those after the first pair numbers have both signs, integers are larger, and targets are large, or have no value.
    A mask of the user's own, which leaves as many samples of each part otherwise, then leaves fewer of one.

    Args:
        rank: that has tried the first samples.
        samples: the first ones.
        batch: what all are made like.
    """
    others = other_samples(rank, samples, batch)
    yield samples, others
    if _divides_alike(rank):
        return

    may_be_any = made_up.may_be_any()
    marks = (0, -1) if may_be_any else ()
    yield (
        keras.tree.map_structure(functools.partial(made_up.multiplied, made_up.SIGNS[0], ()), samples),
        keras.tree.map_structure(functools.partial(made_up.multiplied, made_up.SIGNS[1], marks), others),
    )
    if not may_be_any:
        return
    if any(array is not None and array.dtype.kind in "iu" for array in keras.tree.flatten(others)):
        yield samples, keras.tree.map_structure(made_up.doubled, others)
    if not (isinstance(others, (list, tuple)) and len(others) > 1):
        return
    same: Any = type(others)  # PyTorch's trees tell lists from tuples

    def with_targets(change: Any, part: Any) -> Any:
        x, y, *weights = part
        return same([x, keras.tree.map_structure(change, y), *weights])

    large = [functools.partial(made_up.multiplied, sizes, ()) for sizes in made_up.SIZES]
    yield with_targets(large[0], samples), with_targets(large[1], others)
    for marks_of in made_up.MISSING_OF:
        yield samples, with_targets(functools.partial(made_up.marked, *marks_of), others)


def _divides_alike(rank: Tries) -> bool:
    """Return whether the twin of a step divides by as large a sum of weights or of a mask as the rank itself."""
    return rank.step is not None and rank.step.uses["divisors"] > 0


def other_samples(rank: Tries, samples: Any, batch: Any) -> Any:
    """Return samples that are not like the first ones, for the other rank.

    Args:
        rank: that has tried the first ones.
        samples: the first ones.
        batch: what both are made like.
    """
    alike = _divides_alike(rank)

    def other(mine: Any, numbers: Any) -> Any:
        numbers = mine if alike and mine.dtype.kind != "f" else numbers
        return numbers * numbers.dtype.type(_SMALLER) if numbers.dtype.kind == "f" else numbers

    others = made_up.batch(batch, _OTHERS)
    others = keras.tree.map_structure(lambda x, y: None if x is None else other(x, y), samples, others)
    if isinstance(others, (list, tuple)) and len(others) == 3:
        same: Any = type(others)  # PyTorch's trees tell lists from tuples
        others = same([*others[:2], samples[2]])  # weights of samples
    return others
