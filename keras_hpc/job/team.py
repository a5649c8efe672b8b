# SPDX-License-Identifier: Apache-2.0
"""Teams: ranks that reduce together, each with communicators, communication threads and memory of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_hpc import _native
from keras_hpc.job import objects, tuning_cache
from keras_hpc.job.device_plans import open_device
from keras_hpc.job.plan import Plan, TensorSpec, bytes_of, name_of
from keras_hpc.job.schedule import Schedule


class Team:
    """Ranks that reduce together. Made by `keras_hpc.init`.

    Attributes:
        index: number of the team.
        native: the engine's team.
        rank: this process' rank in the team.
        size: number of ranks.
        ranks: the ranks of the job that belong to it.
        node_count: number of nodes.
        adds_in_tree: whether each node has a branch of a tree over the ranks, so that plans can add up in its order.
        options: what it was made with: `threads`, `timeout_seconds`, `stall_seconds`.
        comm: the communicator of a team of some of the ranks, else None.
        world: its ranks and their nodes.
        peers: of GPUs, what reduces between nodes: the ranks with this one's number on all nodes; None: not needed yet.
        wire_dtype: "float16" or "bfloat16" if gradients of float32 are rounded to it on their way between nodes.
        bucket_bytes: gradients are reduced in buckets of at most so many bytes; None: what fits the nodes.
        schedule: when it applies which gradients.
        report_every: steps after which rank 0 prints what reductions cost; None: never.
        selection_key: under which measured choices are kept; empty with one rank.
        lacks_ways: those from GPU to GPU that were tried and failed.
        device: the GPU that has the tensors of plans of which nothing else is said; None: they are on the host.
        parts: so many neighbouring ranks compute each sample together.
        untold: a call that this rank has left by an exception, of which others are told in the next one.
        settle: waits for the calls of compiled programs that still run beside Python; None where there are none.
        after_meeting: called when all ranks have come to a call, with whatever they did before it; None: nothing.
        has_joined_values: whether values of its ranks were reduced or gathered, or are to be.
    """

    def __init__(self, index: int, native: _native.Team, ranks: Sequence[int]) -> None:
        self.index = index
        self.native = native
        self.id: int = native.id
        self.rank: int = native.rank
        self.size: int = native.size
        self.node_count: int = native.node_count
        self.adds_in_tree: bool = native.nodes_are_branches
        self.ranks = tuple(ranks)
        self.options: dict[str, Any] = {}
        self.comm: Any = None
        self.world: Any = None
        self.peers: Any = None
        self.wire_dtype: str | None = None
        self.bucket_bytes: int | None = None
        self.schedule = Schedule()
        self.report_every: int | None = None
        self.selection_key = ""
        self.settle: Callable[[], object] | None = None
        self.after_meeting: Callable[[], object] | None = None
        self.lacks_ways: set[str] = set()
        self.device: int | None = None
        self.parts = 1
        self.has_joined_values = False
        self.untold: tuple[str, Exception] | None = None
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def plan(
        self,
        key: str,
        tensors: Sequence[TensorSpec],
        op: str = "mean",
        weighted: bool = True,
        wire_dtype: str | None = None,
        in_segment: bool = False,
        pipelined: bool = False,
        device: int | None = None,
        in_tree: bool = False,
    ) -> Plan:
        """Return the plan for these tensors. Collective at the first call with these arguments.

        Args:
            key: a name, the same on all ranks. Two plans that may be in use at once need different keys.
            tensors: what to reduce, in the order in which the values become known.
            op: "mean", "sum", "min", "max" or "product".
            weighted: with "mean", weight each rank by the number of samples it gives with each step.
            wire_dtype: "float16" or "bfloat16": round float32 to it between nodes; sums are taken in float32, and all
                ranks get the same bits.
            in_segment: the tensors live in memory that the ranks of a node share (`Plan.array`).
            pipelined: steps may get the average of the step before; see native/engine/pipeline.hpp.
            device: of a plan in the segment or pipelined, the number of the GPU that has the tensors; -1: none has all.
            in_tree: of a sum of float32 and float64, multiply each rank's values by its weight, and add them in the
                order of a tree over the ranks (job/virtual.py). Where `adds_in_tree`.

        Raises:
            PlanMismatchError: ranks ask for different tensors, or some have them on a GPU and some on the host.
        """
        device = self.device if device is None else device
        in_segment = in_segment or (self.device is not None and not pipelined)
        signature = (key, tuple(tensors), op, weighted, wire_dtype, in_segment, pipelined, in_tree)
        if signature not in self._plans:
            self._settle()
            self.has_joined_values = True
            plan = self._plans[signature] = Plan(self, *signature)
            if device is not None:
                open_device(plan, device)
        return self._plans[signature]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those that have not ended."""
        return tuple(self._plans.values())

    def allreduce(self, array: np.ndarray, op: str = "sum", what: str = "") -> None:
        """Reduce a contiguous array over all ranks, in place. Collective.

        Args:
            array: float16, bfloat16, float32, float64, int32 or int64; same shape and dtype on all ranks.
            op: "sum", "mean" (floats only), "min", "max" or "product".
            what: a name of this call, the same on all ranks.

        Raises:
            PlanMismatchError: ranks make other calls, or with other shapes, dtypes or operations.
        """
        self._settle()
        self.has_joined_values = True
        self.native.allreduce(bytes_of(array), name_of(array.dtype), op, what=what, shape=array.shape)
        self._have_met()

    def allreduce_on(
        self, device: int, address: int, shape: Sequence[int], dtype: str, op: str, what: str, stream: int
    ) -> None:
        """Reduce contiguous memory of a GPU over all ranks, in place, after what a stream has been given. Collective.

        Blocks the host until the result is on its way back; what the stream is given from then on finds it.

        Args:
            device: the GPU's number among those that this process sees.
            address: of the array, of `shape` and `dtype`, as for `allreduce`.
            shape: of the array.
            dtype: its name.
            op: as for `allreduce`.
            what: a name of this call, the same on all ranks.
            stream: the handle of a stream of the framework.
        """
        self._settle()
        self.has_joined_values = True
        _native.allreduce_on(self.native, device, address, dtype, op, what, list(shape), stream)

    def broadcast(self, array: np.ndarray, root: int = 0, what: str = "broadcast") -> None:
        """Copy the root's array to all ranks, in place. Collective.

        Args:
            array: contiguous, of any dtype; same shape and dtype on all ranks.
            root: the rank in the team whose array it is; the same on all ranks.
            what: a name of this call, the same on all ranks.

        Raises:
            PlanMismatchError: ranks make other calls, or with other shapes, dtypes or roots.
        """
        self.meet(what, f"{array.dtype.name} of shape {array.shape} from rank {root}")
        if array.size:
            self.native.broadcast(bytes_of(array), root)

    def allgather(self, array: np.ndarray, what: str = "allgather") -> np.ndarray:
        """Return the arrays of all ranks, concatenated along axis 0 in rank order. Collective.

        Args:
            array: same dtype and shape on all ranks, except that the lengths of axis 0 may differ.
            what: a name of this call, the same on all ranks.

        Raises:
            PlanMismatchError: ranks make other calls, or with other shapes or dtypes.
        """
        array = np.ascontiguousarray(array)
        self.meet(what, f"{array.dtype.name} rows of shape {array.shape[1:]}")
        self.has_joined_values = True
        row = array.dtype.itemsize * math.prod(array.shape[1:])
        lengths = self.native.allgather_count(len(array))
        out = np.empty((sum(lengths), *array.shape[1:]), array.dtype)
        self.native.allgather(bytes_of(array), bytes_of(out), [row * length for length in lengths])
        return out

    def alltoall(self, array: np.ndarray, splits: Sequence[int], what: str = "alltoall") -> np.ndarray:
        """Send rows to each rank, and return the rows received, in rank order. Collective.

        Args:
            array: same dtype and shape on all ranks, except that the lengths of axis 0 may differ.
            splits: how many rows each rank gets, one rank's after the other's.
            what: a name of this call, the same on all ranks.

        Raises:
            PlanMismatchError: ranks make other calls, or with other shapes or dtypes.
        """
        array = np.ascontiguousarray(array)
        self.meet(what, f"{array.dtype.name} rows of shape {array.shape[1:]}")
        self.has_joined_values = True
        row = array.dtype.itemsize * math.prod(array.shape[1:])
        everyone = np.empty((self.size, self.size), np.int64)  # [from, to]
        mine = np.array(splits, np.int64)
        self.native.allgather(bytes_of(mine), bytes_of(everyone), [mine.nbytes] * self.size)
        received = everyone[:, self.rank]
        out = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
        to, from_ = ([row * int(length) for length in lengths] for lengths in (splits, received))
        self.native.alltoall(bytes_of(array), to, bytes_of(out), from_)
        return out

    def allgather_object(self, value: Any, what: str = "allgather_object") -> list[Any]:
        """Return the values of all ranks, in rank order. Collective. For small control data.

        Args:
            value: what `keras_hpc.job.objects.encode` takes.
            what: a name of this call, the same on all ranks.

        Raises:
            TypeError: `value` is something else.
            PlanMismatchError: ranks make other calls, or one met an error.
        """
        with self.telling(what):
            text = np.frombuffer(objects.encode(value), dtype=np.uint8)
        self.meet(what, "values of all ranks")
        lengths = self.native.allgather_count(len(text))
        everyone = np.empty(sum(lengths), np.uint8)
        self.native.allgather(text, everyone, lengths)
        ends = np.cumsum(lengths)
        return [
            objects.decode(everyone[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)
        ]

    def broadcast_object(self, value: Any, root: int = 0, what: str = "broadcast_object") -> Any:
        """Return the root's value. Collective. For small control data.

        Args:
            value: what `keras_hpc.job.objects.encode` takes; not looked at on other ranks.
            root: the rank in the team whose value it is; the same on all ranks.
            what: a name of this call, the same on all ranks.

        Raises:
            TypeError: `value` is something else, on the root.
            PlanMismatchError: ranks make other calls, or the root met an error.
        """
        with self.telling(what):
            text = np.frombuffer(objects.encode(value if self.rank == root else None), dtype=np.uint8).copy()
        self.meet(what, f"the value of rank {root}")
        length = np.array([len(text)])
        self.native.broadcast(bytes_of(length), root)
        if self.rank != root:
            text = np.empty(length[0], np.uint8)
        self.native.broadcast(text, root)
        return objects.decode(text.tobytes())

    def meet(self, what: str, details: str = "") -> None:
        """Make sure that all ranks make the same call, before they communicate in it. Collective.

        Args:
            what: a name of the call.
            details: what else must be the same.

        Raises:
            PlanMismatchError: on all ranks, saying what each of them wants.
        """
        self._settle()
        self.native.agree("", [_line(f"{what}: {details}" if details else what)])
        self._have_met()

    @contextlib.contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Tell the other ranks of an exception in the block: they raise in their call, and do not wait for this one."""
        try:
            yield
        except Exception as error:
            self.refuse(what, error)
            raise

    def refuse(self, what: str, error: Exception) -> None:
        """Tell the ranks that make a call, that this one cannot: they raise a PlanMismatchError. Collective.

        Returns without one: the caller raises its own error, which says more.
        """
        if not isinstance(error, _native.Error):  # those are raised on all ranks
            with contextlib.suppress(_native.Error):
                self.meet(what, f"{type(error).__name__}: {str(error)[:400]}")
            error._keras_hpc_is_told = True  # type: ignore[attr-defined]

    def tell_later(self, what: str, error: Exception | None) -> None:
        """Tell the other ranks at this rank's next call, as in `refuse`, that it has left a call by an exception."""
        self.untold = None if error is None else (what, error)

    def agree(self, what: str, items: Sequence[str]) -> None:
        """Raise PlanMismatchError on all ranks unless all make this call and pass equal lists. Collective.

        The message begins with `what` and names the first item that differs, and on which ranks.
        """
        self._settle()
        self.native.agree(_line(what), [_line(item) for item in items])

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        self._settle()
        self.native.barrier()
        self._have_met()

    def retire(self, gone: Sequence[str]) -> None:
        """Frees the plans of models and optimizers that are gone on all ranks. Collective.

        Args:
            gone: what `plan` got as `key`, up to its first "/", of those that are gone on this rank.
        """
        mine = sorted({key.split("/")[0] for key, *_ in self._plans} & set(gone))
        everyone = [set(theirs) for theirs in self.allgather_object(mine, "Model.fit()")]
        everywhere = set.intersection(*everyone)
        for signature in [signature for signature in self._plans if signature[0].split("/")[0] in everywhere]:
            self._plans.pop(signature).end()

    def _settle(self) -> None:
        if self.settle is not None:
            self.settle()
        if self.untold is not None:
            untold, self.untold = self.untold, None
            self.refuse(*untold)

    def _have_met(self) -> None:
        if self.after_meeting is not None:
            self.after_meeting()

    @property
    def replica(self) -> int:
        """Which of the replicas that train on samples of their own this rank belongs to."""
        return self.rank // self.parts

    @property
    def replicas(self) -> int:
        """How many there are."""
        return self.size // self.parts

    @property
    def has_gradients(self) -> bool:
        """Whether it has made a plan for the gradients of an optimizer."""
        return any(key.startswith("optimizer") for key, *_ in self._plans)

    def report(self) -> dict[str, Any]:
        """Return what the team did so far and the memory it holds: steps, bytes, seconds."""
        return dict(self.native.report())

    def leave(self) -> None:
        """Tells the other ranks that this one will not take part any more."""
        self.native.leave()

    def close(self) -> None:
        """Frees communicators, threads and memory. Collective."""
        self.untold = None  # that it leaves tells the others enough
        self._settle()
        if self.selection_key:
            tuning_cache.save(self.native, self.rank, self.selection_key)
        self.native.close()
        if self.peers is not None:
            self.peers.close()
        for plan in self._plans.values():
            plan.kept = None  # it may hold the plan, and what the engine was still reading
        self._plans.clear()
        if self.comm is not None:
            self.comm.Free()


class NonMemberTeam(Team):
    """A team that this rank does not belong to: using it is an error here."""

    def __init__(self, index: int, rank: int, ranks: Sequence[int]) -> None:
        self.index, self.rank, self.ranks = index, -1, tuple(ranks)
        self.schedule, self.report_every, self._rank = Schedule(), None, rank
        self.has_joined_values = False

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"Only the ranks of team {self.index} can use it, and the models assigned to it. Expected one of the ranks "
            f"{', '.join(map(str, self.ranks))}. Received: rank {self._rank}"
        )

    def leave(self) -> None:
        """Do nothing: this rank takes no part."""

    def close(self) -> None:
        """Do nothing: this rank holds nothing."""


def _line(text: str) -> str:
    """Return text as the engine compares it, one line for an item."""
    return text.replace("\n", " ")
