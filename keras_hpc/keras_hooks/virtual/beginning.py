# SPDX-License-Identifier: Apache-2.0
"""What weights are at the beginning of a step, of those that a layer assigns, as spectral normalization its kernel.

Each part begins with it, and with the same states of random generators that are no layer's, as the global one. On JAX,
Keras forgets what a layer assigns to weights, and what such a generator has drawn.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import xxhash

from keras_hpc import backends
from keras_hpc.job.plan import bytes_of
from keras_hpc.keras_hooks import keras_private, running
from keras_hpc.keras_hooks.state.variables import seed_generators


class Beginning:
    """The values of weights at the beginning of a step.

    Which weights are assigned, by whatever way, shows in the first step; of those that are assigned later only, Keras'
    `assign` tells, when it is called or traced. Of what else changes a weight later PyTorch tells afterwards: too late.
    What nobody tells (`.data` of PyTorch, a raw `tf.Variable`) shows where the number of steps has doubled: then all
    weights are looked at.

    Args:
        weights: all that are trained.
    """

    _watching: ClassVar[Beginning | None] = None

    def __init__(self, weights: Sequence[Any]) -> None:
        all_of_them = list(weights) if keras.backend.backend() != "jax" else []
        self._own = {id(weight): weight for weight in all_of_them}
        self._values: dict[int, np.ndarray] = {}
        self._assigned = set(self._own)
        self._told: set[int] = set()
        self._is_known = False
        self._steps = 0
        if keras.backend.backend() == "tensorflow":  # a variable that is made in a program has no value yet
            state = random.getstate()
            keras_private.get(keras_private.GLOBAL_SEED_GENERATOR_OF)()
            random.setstate(state)
        self._generators: dict[int, Any] = {}
        self._seeds: dict[int, np.ndarray] = {}

    def again(self, part: int, parts: range) -> None:
        """Begin a part of a rank's parts."""
        if len(parts) == 1:
            return
        backend = backends.current()
        if part == parts[0]:
            self._steps += 1
            self._seeds = {key: backend.to_numpy(one.state) for key, one in self._generators.items()}
            self._values = {key: backend.to_numpy(self._own[key]) for key in self._own if key in self._assigned}
            return
        for key, seed in self._seeds.items():
            backend.assign(self._generators[key].state, seed)
        if not self._is_known:
            now = {key: backend.to_numpy(self._own[key]) for key in self._values}
            changed = {key for key in now if now[key].tobytes() != self._values[key].tobytes()}
            self._assigned = changed | self._told
            self._is_known = True
        for key in self._own:
            if key in self._assigned:
                backend.assign(self._own[key], self._values[key])

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context of a part, in which `assign` tells.

        Raises:
            RuntimeError: a weight was changed in another way, and what it was is gone.
        """
        before = self._changes()
        Beginning._watching = self
        try:
            yield
        finally:
            Beginning._watching = None
        after = self._changes()
        for key in before.keys() - self._assigned:
            if before[key] != after[key]:
                raise RuntimeError(
                    "With init(virtual_ranks=) each part of a batch begins with the same weights. Expected `assign` of "
                    "Keras where a layer changes a weight, or a change in the first step, too. Received: a change in "
                    f"place of `{self._own[key].path}`, seen in step {self._steps}"
                )

    def _changes(self) -> dict[int, Any]:
        """Return what tells of changes of each weight that no layer is known to assign, once that is known."""
        if not self._is_known:
            return {}
        rest = {key: weight for key, weight in self._own.items() if key not in self._assigned}
        if self._steps & (self._steps - 1) == 0:
            view = backends.current().view
            arrays = {key: np.asarray(view(weight), order="C") for key, weight in rest.items()}
            return {key: xxhash.xxh3_64_intdigest(bytes_of(array).data) for key, array in arrays.items()}
        if keras.backend.backend() == "torch":  # which counts them
            return {key: weight.value._version for key, weight in rest.items()}
        return {}

    def _before_assign(self, variable: Any) -> None:
        key = id(variable)
        if key not in self._own:
            return
        self._told.add(key)  # which a program that is traced once does in its first step
        if key not in self._assigned:
            self._assigned.add(key)
            self._values[key] = _value_now(variable)

    def _before_draw(self, generator: Any) -> None:
        step = running.step()
        if id(generator) in self._generators or step is None or generator in seed_generators(step.model):
            return
        self._generators[id(generator)] = generator
        self._seeds[id(generator)] = _value_now(generator.state)


def _value_now(variable: Any) -> np.ndarray:
    """Return what a variable holds, also where a program is traced."""
    native = keras.backend.backend() == "tensorflow"
    with backends.current().outside_programs() if native else contextlib.nullcontext():
        found: np.ndarray = backends.current().to_numpy(variable)
    return found


def install(job: Any, patcher: Any) -> None:
    """Hooks how variables are assigned, and generators draw."""
    if job.virtual is not None and keras.backend.backend() != "jax":
        patcher.patch(keras.Variable, "assign", _assign)
        patcher.patch(keras.random.SeedGenerator, "next", _next)


def _assign(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def assign(self: Any, value: Any) -> Any:
        if Beginning._watching is not None:
            Beginning._watching._before_assign(self)
        return original(self, value)

    return assign


def _next(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def next_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if Beginning._watching is not None:
            Beginning._watching._before_draw(self)
        return original(self, *args, **kwargs)

    return next_
