# SPDX-License-Identifier: Apache-2.0
"""Teams: ranks that reduce together, each with communicators, communication threads and memory of its own."""

from __future__ import annotations

import dataclasses
import json
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_hpc import _native, selection

if TYPE_CHECKING:
    from keras_hpc.launch import World


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of a plan: its name, shape and dtype ("float32", ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Plan:
    """A fixed list of tensors that a team reduces together, once per step.

    Attributes:
        id: number of the plan, for the native operations of the frameworks.
        tensors: the tensors, in the order in which backward makes them.
        op: "mean", "sum", "min" or "max".
        weighted: whether a mean is weighted by the ranks' numbers of samples.
        team: the team that reduces it.
    """

    def __init__(
        self,
        team: Team,
        key: str,
        tensors: Sequence[TensorSpec],
        op: str,
        weighted: bool,
        wire_dtype: str | None,
        in_segment: bool,
    ) -> None:
        specs = [(t.name, t.dtype, math.prod(t.shape)) for t in tensors]
        self._native = team.native.plan(key, specs, op, weighted, wire_dtype or "", in_segment)
        self.id: int = self._native.id
        self.tensors = tuple(tensors)
        self.op = op
        self.weighted = weighted
        self.team = team

    def start(self, tensor: int, array: np.ndarray, weight: float = 1.0) -> None:
        """Starts the reduction of a contiguous array, in place. `wait` ends it."""
        self._native.start(tensor, _bytes(array), weight)

    def wait(self, tensor: int) -> None:
        """Blocks until the array given to `start` holds the result."""
        self._native.wait(tensor)

    def array(self, tensor: int) -> np.ndarray:
        """Returns the memory of a tensor of a plan made with `in_segment=True`: what `start` takes."""
        spec = self.tensors[tensor]
        array: np.ndarray = self._native.memory(tensor).view(dtype_of(spec.dtype)).reshape(spec.shape)
        return array


class Team:
    """Ranks that reduce together. Made by `keras_hpc.init`.

    Attributes:
        index: number of the team.
        native: the engine's team.
        rank: this process' rank in the team.
        size: number of ranks.
        ranks: the ranks of the job that belong to it.
        node_count: number of nodes.
        wire_dtype: "float16" or "bfloat16" if gradients of float32 are rounded to it on their way between nodes.
        selection_key: under which measured choices are kept; empty with one rank.
    """

    def __init__(self, index: int, native: _native.Team, ranks: Sequence[int]) -> None:
        self.index = index
        self.native = native
        self.id: int = native.id
        self.rank: int = native.rank
        self.size: int = native.size
        self.node_count: int = native.node_count
        self.ranks = tuple(ranks)
        self.wire_dtype: str | None = None
        self.selection_key = ""
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def plan(
        self,
        key: str,
        tensors: Sequence[TensorSpec],
        op: str = "mean",
        weighted: bool = True,
        wire_dtype: str | None = None,
        in_segment: bool = False,
    ) -> Plan:
        """Returns the plan for these tensors. Collective at the first call with these arguments.

        Args:
            key: a name, the same on all ranks. Two plans that may be in use at once need different keys.
            tensors: what to reduce, in the order in which the values become known.
            op: "mean", "sum", "min" or "max".
            weighted: with "mean", weight each rank by the number of samples it gives with each step.
            wire_dtype: "float16" or "bfloat16": round float32 to it between nodes; sums are taken in float32, and all
                ranks get the same bits.
            in_segment: the tensors live in memory that the ranks of a node share (`Plan.array`), and nothing is copied.

        Raises:
            PlanMismatchError: ranks ask for different tensors.
        """
        signature = (key, tuple(tensors), op, weighted, wire_dtype, in_segment)
        if signature not in self._plans:
            self._plans[signature] = Plan(self, key, tensors, op, weighted, wire_dtype, in_segment)
        return self._plans[signature]

    def allreduce(self, array: np.ndarray, op: str = "sum") -> None:
        """Reduces a contiguous array over all ranks, in place. Collective.

        Args:
            array: float16, bfloat16, float32, float64, int32 or int64; same shape and dtype on all ranks.
            op: "sum", "mean" (floats only), "min" or "max".

        Raises:
            PlanMismatchError: ranks call with different shapes, dtypes or operations.
        """
        self.native.allreduce(_bytes(array), array.dtype.name, op)

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Copies the root's array to all ranks, in place. Collective. Any dtype; same shape on all ranks."""
        self.native.broadcast(_bytes(array), root)

    def allgather(self, array: np.ndarray) -> np.ndarray:
        """Returns the arrays of all ranks, concatenated along axis 0 in rank order. Collective.

        Args:
            array: same dtype and shape on all ranks, except that the lengths of axis 0 may differ.
        """
        array = np.ascontiguousarray(array)
        row = array.dtype.itemsize * math.prod(array.shape[1:])
        lengths = self.native.allgather_count(len(array))
        out = np.empty((sum(lengths), *array.shape[1:]), array.dtype)
        self.native.allgather(_bytes(array), _bytes(out), [row * length for length in lengths])
        return out

    def allgather_object(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order. Collective. For small control data that JSON can hold."""
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        lengths = self.native.allgather_count(len(text))
        everyone = self.allgather(text).tobytes()
        ends = np.cumsum(lengths)
        return [json.loads(everyone[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def agree(self, what: str, items: Sequence[str]) -> None:
        """Raises PlanMismatchError on all ranks unless all pass equal lists. Collective.

        The message begins with `what` and names the first item that differs, and on which ranks.
        """
        self.native.agree(what, [item.replace("\n", " ") for item in items])

    def barrier(self) -> None:
        """Waits until all ranks are here. Collective."""
        self.native.barrier()

    def report(self) -> dict[str, Any]:
        """Returns what the team did so far and the memory it holds: steps, bytes, seconds."""
        return dict(self.native.report())

    def leave(self) -> None:
        """Tells the other ranks that this one will not take part any more."""
        self.native.leave()

    def close(self) -> None:
        """Frees communicators, threads and memory. Collective."""
        if self.selection_key:
            selection.keep(self, self.selection_key)
        self._plans.clear()
        self.native.close()


def make_team(
    world: World, index: int, threads: int, timeout_seconds: float, stall_seconds: float, waiting: str = "auto"
) -> Team:
    """Makes a team of all ranks. Collective.

    Args:
        world: the ranks.
        index: number of the team.
        threads: communication threads on each rank.
        timeout_seconds: a wait that takes longer is an error.
        stall_seconds: a wait that takes longer is reported.
        waiting: "spin", "yield" or "sleep", for measuring; "auto" does what fits the ranks and cores of the node.

    Raises:
        ValueError: the environment asks for ways of an allreduce that do not exist.
    """
    native = _native.Team(world.transport(), index, threads, timeout_seconds, stall_seconds, waiting)
    team = Team(index, native, range(world.size))
    if world.size > 1:
        team.selection_key = selection.key_of(world)
        selection.restore(team, team.selection_key)
    return team


_assigned: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def assign_team(model_or_optimizer: Any, team: int) -> None:
    """Lets a model train on a team of its own; team 0 is the default. Call it right after `compile`.

    Args:
        model_or_optimizer: a compiled model, or an optimizer that a custom training step owns.
        team: number of a team, 0 to `teams - 1` of `keras_hpc.init(teams=...)`. The same on all ranks.

    Raises:
        ValueError: there is no such team.
        TypeError: neither a compiled model nor an optimizer.
    """
    from keras_hpc.runtime import job

    teams = job().teams
    if not isinstance(team, int) or not 0 <= team < len(teams):
        raise ValueError(
            f"There is no such team. Expected a number from 0 to {len(teams) - 1}; keras_hpc.init(teams=...) sets how "
            f"many there are. Received: team={team!r}"
        )
    optimizer = getattr(model_or_optimizer, "optimizer", model_or_optimizer)
    if not hasattr(optimizer, "apply"):
        raise TypeError(f"Expected a compiled model or an optimizer. Received: {model_or_optimizer!r}")
    _assigned[optimizer] = team
    _assigned[model_or_optimizer] = team


def team_of(model_or_optimizer: Any) -> Team:
    """Returns the team of a model or optimizer: as assigned, else team 0."""
    from keras_hpc.runtime import job

    optimizer = getattr(model_or_optimizer, "optimizer", None)
    number = _assigned.get(model_or_optimizer)
    if number is None and optimizer is not None:
        number = _assigned.get(optimizer)
    return job().teams[number or 0]


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of a name; "bfloat16" is not one of its own."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def _bytes(array: np.ndarray) -> np.ndarray:
    """The array's memory as bytes, not a copy."""
    if not array.flags.c_contiguous:
        raise TypeError(
            "Expected a C-contiguous array. Received: an array with strides; np.ascontiguousarray copies it"
        )
    return array.reshape(-1).view(np.uint8)
