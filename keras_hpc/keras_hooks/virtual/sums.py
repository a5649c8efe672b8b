# SPDX-License-Identifier: Apache-2.0
"""Sums of the gradients of all parts, in the order of the tree that `job.virtual` describes.

Where each rank has one part, a plan adds them up while others are still computed. Elsewhere NumPy adds what a rank has
of whole branches, behind the last part's program, and ranks exchange the sums. Both have the same bits, and the program
of a part asks for the plan on any number of ranks, so that compilers see the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job import current
from keras_hpc.job.plan import TensorSpec, dtype_of
from keras_hpc.job.virtual import ALIGNMENT, TreeSum, Virtual, allreduce
from keras_hpc.keras_hooks.gradients import plans
from keras_hpc.keras_hooks.running import plain_name
from keras_hpc.keras_hooks.state.variables import standard_dtype


def is_sparse(gradient: Any) -> bool:
    """Return whether a gradient is TensorFlow's, of some rows."""
    return hasattr(gradient, "dense_shape")


def are_early(model: Any) -> bool:
    """Return whether a plan adds up a model's gradients, the same on all ranks."""
    virtual, team = current.job().virtual, current.team_of(model)
    return (
        virtual is not None
        and virtual.count == virtual.size > 1
        and team.adds_in_tree
        and all(standard_dtype(variable) in ("float32", "float64") for variable in model.trainable_variables)
    )


def early(model: Any, gradients: Sequence[Any], share: Any, is_summed: Any) -> list[Any]:
    """Return a part's gradients, or if `is_summed` those of all parts. Collective then.

    Args:
        model: whose they are.
        gradients: one for each trainable variable, or None. Sparse ones stay as they are.
        share: the part's, of all samples, a number or a scalar tensor.
        is_summed: a bool or a scalar tensor.
    """
    variables, result = model.trainable_variables, list(gradients)
    # Backward computes the last variable's gradient first.
    order = [i for i in reversed(range(len(result))) if result[i] is not None and not is_sparse(result[i])]
    found: Sequence[Any] = [result[i] for i in order]
    if keras.backend.backend() == "torch":
        if is_summed:
            team = current.team_of(model.optimizer)
            plan, order = plans.in_segment(team, model.optimizer, gradients, variables)
            found = backends.current().gradients_of(plan).reduce([gradients[i] for i in order], share)
    elif order:
        dtypes = {i: keras.backend.standardize_dtype(gradients[i].dtype) for i in order}
        specs = [TensorSpec(f"{i}: {plain_name(variables[i])}", tuple(variables[i].shape), dtypes[i]) for i in order]
        key = f"{plans.key_of(model.optimizer)}/tree"
        plan = current.team_of(model).plan(key, specs, op="sum", in_tree=are_early(model))
        found = backends.current().reduce(plan, found, share, is_summed)
    for index, value in zip(order, found, strict=True):
        result[index] = value
    return result


class Gradients:
    """The mean of all parts' gradients, weighted by their samples.

    Sums of 16-bit types are in float32. Behind them travels for each gradient how many parts have it: one that no part
    has is none.

    Args:
        virtual: the parts.
        variables: whose gradients they are.
        is_summed: whether those that are not sparse are those of all parts already; see `early`.
    """

    def __init__(self, virtual: Virtual, variables: Sequence[Any], is_summed: bool) -> None:
        self._virtual, self._variables, self._is_summed = virtual, variables, is_summed
        self._means: Sequence[Any] = [None] * len(variables)
        self._sparse: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # rows and values of each part
        self._places: dict[str, list[tuple[int, int, int]]] = {}  # by dtype: variables, and where their gradients are
        self._sizes: dict[str, int] = {}
        self._sums: dict[str, TreeSum] = {}

    def _begin(self, gradients: Sequence[Any]) -> None:
        self._sparse = {i: [] for i, gradient in enumerate(gradients) if is_sparse(gradient)}
        if self._is_summed:
            return
        self._places, self._sizes = {"float32": []}, {"float32": 0}
        for index, variable in enumerate(self._variables):
            if index in self._sparse:
                continue
            dtype = "float64" if standard_dtype(variable) == "float64" else "float32"
            start = self._sizes.get(dtype, 0)
            end = start + int(np.prod(variable.shape))
            self._places.setdefault(dtype, []).append((index, start, end))
            self._sizes[dtype] = end + -end % (ALIGNMENT // np.dtype(dtype).itemsize)
        self._sizes["float32"] += len(self._variables)
        self._sums = {dtype: TreeSum(self._virtual.count) for dtype in self._sizes}

    def add(self, part: int, gradients: Sequence[Any], share: float) -> None:
        """Add a part's gradients. In the order of the parts.

        Args:
            part: its number.
            gradients: one for each variable, or None.
            share: the part's, of all samples.
        """
        if not self._sums:
            self._begin(gradients)
        if self._is_summed:
            self._means = gradients
        view = backends.current().view
        for dtype, fold in self._sums.items():
            leaf = fold.begin(part, self._sizes[dtype], dtype)
            for index, start, end in self._places[dtype]:
                leaf.clear(end, end + -end % (ALIGNMENT // leaf.array.itemsize))
                if share == 0 or gradients[index] is None:
                    leaf.clear(start, end)
                else:
                    leaf.write(start, view(gradients[index]).reshape(-1), share)
            if dtype == "float32":
                there = np.array([share > 0 and gradient is not None for gradient in gradients], dtype)
                leaf.write(self._sizes[dtype] - len(there), there, 1.0)
            fold.end(part, leaf)
        for index, found in self._sparse.items():
            rows, values = view(gradients[index].indices), view(gradients[index].values)
            kept = len(rows) if share else 0
            found.append((rows[:kept].copy(), values[:kept] * values.dtype.type(share)))

    def mean(self, team: Any) -> list[Any]:
        """Return the means, as the backend's tensors. Collective."""
        adopt = backends.current().adopt
        result = list(self._means)
        flats = {dtype: allreduce(self._virtual, team, fold.sums) for dtype, fold in self._sums.items()}
        there = flats["float32"][-len(self._variables) :] if flats else ()
        for dtype, flat in flats.items():
            for index, start, end in self._places[dtype]:
                if there[index]:
                    variable = self._variables[index]
                    array = flat[start:end].reshape(tuple(variable.shape))
                    array = array.astype(dtype_of(standard_dtype(variable)), copy=False)
                    result[index] = adopt(array)
        for index, found in self._sparse.items():
            result[index] = self._gathered(team, self._variables[index], found)
        return result

    def _gathered(self, team: Any, variable: Any, found: list[tuple[np.ndarray, np.ndarray]]) -> Any:
        """Return a sparse gradient with the rows of all parts, in their order."""
        import tensorflow as tf

        rows, values = (np.concatenate([part[which] for part in found]) for which in (0, 1))
        if team.size > 1:
            rows, values = (team.allgather(a, "sparse gradients of virtual ranks") for a in (rows, values))
        return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant(list(variable.shape), tf.int64))
