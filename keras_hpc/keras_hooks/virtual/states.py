# SPDX-License-Identifier: Apache-2.0
"""What each part of a global batch has of its own: running metrics and the statistics that layers take from data.

A variable's value is that of all parts, unless a part has another one since its last step. So whoever changes a
variable for all parts forgets what they had. Of what a callback assigns between steps nobody is told: each step leaves
a value, and looks whether it is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_hpc import backends
from keras_hpc.job.virtual import Virtual


class States:
    """The values that the parts of this rank have of their own.

    Args:
        virtual: the parts.

    Attributes:
        parts: those of this rank.
    """

    def __init__(self, virtual: Virtual) -> None:
        self.parts = virtual.mine
        self._values: dict[int, dict[int, Any]] = {part: {} for part in self.parts}
        self._variables: dict[int, Any] = {}  # held, so that no other one gets its id
        self._left: dict[int, Any] = {}  # the value with which a step has left a variable

    def get(self, part: int, variable: Any, default: Any) -> Any:
        """Return a part's value of a variable, by default that of all."""
        return self._values[part].get(id(variable), default)

    def put(self, part: int, variables: Iterable[Any], values: Iterable[Any]) -> None:
        """Give a part values of its own."""
        for variable, value in zip(variables, values, strict=True):
            self._variables[id(variable)] = variable
            self._values[part][id(variable)] = value

    def forget(self, variables: Iterable[Any]) -> None:
        """Let all parts have the variables' values again."""
        for variable in variables:
            self._variables.pop(id(variable), None)
            self._left.pop(id(variable), None)
            for values in self._values.values():
                values.pop(id(variable), None)

    def clear(self) -> None:
        """Let all parts have the values of all variables again."""
        self.forget(list(self._variables.values()))

    def has(self, variable: Any) -> bool:
        """Return whether parts have values of their own; the same on all ranks."""
        return id(variable) in self._variables

    def leave(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        """Note with which values a step leaves variables."""
        for variable, value in zip(variables, values, strict=True):
            if self.has(variable):
                self._left[id(variable)] = value

    def was_assigned(self, variable: Any, value: Any) -> bool:
        """Return whether a variable has another value than a step has left it with."""
        left = self._left.get(id(variable), value)
        if left is value:
            return False
        view = backends.current().view
        return np.asarray(view(left)).tobytes() != np.asarray(view(value)).tobytes()

    def gather(self, team: Any, variables: Sequence[Any]) -> list[np.ndarray]:
        """Return the values of all parts, `(parts, *shape)` for each variable, in the order of the parts. Collective.

        Args:
            team: of all ranks.
            variables: the same, in the same order, on all ranks.
        """
        if not variables:
            return []
        to_numpy = backends.current().to_numpy
        # On JAX a variable has no value of its own while a step runs.
        held = [[v if (own := self.get(part, v, None)) is None else own for v in variables] for part in self.parts]
        own = [[to_numpy(value) for value in values] for values in held]
        rows = [np.concatenate([np.ravel(a).view(np.uint8) for a in arrays]) for arrays in own]
        everyone = team.allgather(np.stack(rows), "the states of virtual ranks")
        found, start = [], 0
        for array in own[0]:
            part = np.ascontiguousarray(everyone[:, start : start + array.nbytes])
            found.append(part.view(array.dtype).reshape(len(everyone), *array.shape))
            start += array.nbytes
        return found

    def average(self, team: Any, variables: Sequence[Any]) -> None:
        """Give variables the mean over all parts. Collective.

        Sums are in float64, in the order of the parts. What is no float, or says `"only_first_replica"`, gets the value
        of the first part.
        """
        own = [variable for variable in variables if self.has(variable)]
        for variable, values in zip(own, self.gather(team, own), strict=True):
            value = values[0]
            if keras.backend.is_float_dtype(variable.dtype) and variable.aggregation != "only_first_replica":
                value = (np.sum(values.astype(np.float64), axis=0) / len(values)).astype(values.dtype)
            backends.current().assign(variable, value)
        self.forget(own)
