# SPDX-License-Identifier: Apache-2.0
"""Plans: fixed lists of tensors that a team reduces together, once per step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc import _native


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor of a plan.

    Attributes:
        name: the same on all ranks.
        shape: of the tensor.
        dtype: "float32", ...
        giver: which rank alone gives it, if one does.
        takers: which ranks alone need its elements, each up to `(end, rank)`, one after the other, cut at multiples of
            64 bytes. Other ranks find any numbers there. Empty: all ranks need all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    giver: int | None = None
    takers: tuple[tuple[int, int], ...] = ()

    def misfit(self, shape: Sequence[Any], dtype: str) -> ValueError:
        """Return what to raise for a tensor of another shape or dtype."""
        return ValueError(
            f"A tensor does not fit the plan. Expected: {self.name} of shape {self.shape} and dtype {self.dtype}. "
            f"Received: shape {tuple(shape)}, dtype {dtype}"
        )


class Plan:
    """A fixed list of tensors that a team reduces together, once per step.

    Attributes:
        id: number of the plan, for the native operations of the frameworks.
        name: as given.
        tensors: the tensors, in the order in which backward makes them.
        op: "mean", "sum", "min" or "max".
        weighted: whether a mean is weighted by the ranks' numbers of samples.
        wire_dtype: what values are rounded to between nodes; None: nothing.
        team: the `Team` that reduces it.
        pipelined: whether its steps may get the average of the step before.
        device: the number of the GPU that has its tensors, or None.
        kept: what a backend keeps with it.
    """

    def __init__(
        self,
        team: Any,
        key: str,
        tensors: Sequence[TensorSpec],
        op: str,
        weighted: bool,
        wire_dtype: str | None,
        in_segment: bool,
        pipelined: bool,
        in_tree: bool = False,
    ) -> None:
        buckets = team.bucket_bytes or 0
        specs = [(t.name, t.dtype, math.prod(t.shape)) for t in tensors]
        givers = [t.giver for t in tensors if t.giver is not None]
        takers = [list(t.takers) for t in tensors] if any(t.takers for t in tensors) else []
        self._native = team.native.plan(
            key, specs, op, weighted, wire_dtype or "", in_segment, pipelined, buckets, givers, takers, in_tree
        )
        self.name = key
        self.id: int = self._native.id
        self.tensors = tuple(tensors)
        self.op = op
        self.weighted = weighted
        self.wire_dtype = wire_dtype
        self.team = team
        self.pipelined = pipelined
        self.device: int | None = None
        self.kept: Any = None

    @property
    def nbytes(self) -> int:
        """Of all its tensors together."""
        return sum(math.prod(t.shape) * dtype_of(t.dtype).itemsize for t in self.tensors)

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do: the only rank has each result already."""
        return bool(self.team.size == 1 and not self.pipelined)

    def open_device(self, ordinal: int) -> None:
        """From now on its tensors are on a GPU, which this process knows by this number.

        Of a plan made with `in_segment=True` or `pipelined=True`. Each step is `start_on` of each tensor and then
        `wait_on`.

        Raises:
            CommunicationError: the GPU cannot be used, or not enough memory be pinned; on this rank alone.
        """
        self._native.open_device(ordinal)
        self.device = ordinal

    def open_nccl(self, ordinal: int, number: bytes, peers: Any = None) -> None:
        """The same, reduced by NCCL from GPU to GPU. Collective.

        Args:
            ordinal: as for `open_device`.
            number: what `keras_hpc.job.nccl.agree` returned.
            peers: the engine's team that reduces between nodes; None: NCCL does.
        """
        self._native.open_nccl(ordinal, number, peers)
        self.device = ordinal

    def open_peer(self, ordinal: int, compiler: str = "") -> None:
        """The same, reduced by a kernel of ours from GPU to GPU, on one node. Collective.

        Args:
            ordinal: as for `open_device`.
            compiler: where NVRTC is, if the process has not loaded it; see `keras_hpc.job.peer.compiler`.
        """
        self._native.open_peer(ordinal, compiler)
        self.device = ordinal

    def open_mpi(self, ordinal: int, compiler: str = "") -> None:
        """The same, sent from GPU to GPU by MPI, which takes their memory, and added up by a kernel. Collective.

        Args:
            ordinal: as for `open_device`.
            compiler: as for `open_peer`.
        """
        self._native.open_mpi(ordinal, compiler)
        self.device = ordinal

    def close_device(self) -> None:
        """From now on its tensors are on the host again."""
        self._native.close_device()
        self.device = None

    def start_on(self, tensor: int, address: int, nbytes: int, weight: float, stream: int) -> None:
        """Start the reduction of contiguous memory of the GPU, after what a stream has been given so far.

        Args:
            tensor: its number.
            address: where it is. It must live until the stream has come past `wait_on`.
            nbytes: its size.
            weight: this rank's in the mean, the same for all tensors of a step.
            stream: the handle of a stream of the framework.
        """
        self._native.start_on(tensor, address, nbytes, weight, stream)

    def start_beside(self, tensor: int, array: np.ndarray, weight: float) -> None:
        """Start the reduction of an array of the host, whose mean will be where `array` returns it."""
        self._native.start_beside(tensor, bytes_of(array), weight)

    def start_zeros(self, tensor: int, weight: float) -> None:
        """The same for an array of zeros."""
        self._native.start_zeros(tensor, weight)

    def wait_on(self, stream: int) -> None:
        """Block until all tensors are reduced. What the stream is given from then on finds the results."""
        self._native.wait_on(stream)

    def second_on(self, addresses: Sequence[int], stream: int) -> None:
        """Of a pipelined plan: copy what the second of two updates applies, into memory of the GPU."""
        self._native.second_on(addresses, stream)

    def start(self, tensor: int, array: np.ndarray, weight: float = 1.0) -> None:
        """Start the reduction of a contiguous array. `wait` ends it.

        The result replaces it; with `in_segment=True` it replaces what `array` returns, where others are copied to.
        """
        self._native.start(tensor, bytes_of(array), weight)

    def start_at(self, tensor: int, address: int, nbytes: int, weight: float = 1.0) -> None:
        """Start the reduction of contiguous memory, which must live until `wait` returns.

        The same as `start`, for who has no array: making one takes longer than starting a small tensor.
        """
        self._native.start_at(tensor, address, nbytes, weight)

    def wait(self, tensor: int) -> None:
        """Blocks until the array given to `start` holds the result."""
        self._native.wait(tensor)

    def wait_all(self) -> None:
        """Blocks until all arrays given to `start` hold the results."""
        self._native.wait_all()

    def array(self, tensor: int) -> np.ndarray:
        """Return the memory of a tensor of a plan made with `in_segment=True`: where its result will be."""
        spec = self.tensors[tensor]
        array: np.ndarray = self._native.memory(tensor).view(dtype_of(spec.dtype)).reshape(spec.shape)
        return array

    def end(self) -> None:
        """Frees the plan's memory. On every rank, between steps; nobody may start it again."""
        self._native.end()
        self.kept = None  # it may hold the plan, and what the engine was still reading

    def set_schedule(self, synchronous: int, pipelined: int) -> None:
        """Of a pipelined plan: so many steps from now are synchronous, so many then pipelined, the rest synchronous."""
        self._native.set_schedule(synchronous, pipelined)

    def updates(self) -> int:
        """Of a pipelined plan: how many updates the step makes that was waited for: 0, 1 or 2."""
        updates: int = self._native.updates()
        return updates

    def second(self, tensor: int, array: np.ndarray) -> None:
        """Of a pipelined plan: copies what the second of two updates applies."""
        self._native.second(tensor, bytes_of(array))

    def outstanding(self) -> bool:
        """Return whether a pipelined plan holds an average that no step has taken."""
        outstanding: bool = self._native.outstanding()
        return outstanding

    def take(self, *, keep: bool = False) -> list[np.ndarray]:
        """Return the outstanding average of a pipelined plan, one array for each tensor.

        Args:
            keep: leave it outstanding.

        Raises:
            CommunicationError: there is none.
        """
        arrays = [np.empty(t.shape, dtype_of(t.dtype)) for t in self.tensors]
        if not self._native.take([bytes_of(array) for array in arrays], keep):
            raise _native.Error(f"No average of plan '{self.name}' is outstanding.")
        return arrays

    def put(self, arrays: Sequence[np.ndarray]) -> None:
        """Make an average outstanding that `take` gave in an earlier process. Between steps, on every rank.

        Args:
            arrays: one for each tensor.

        Raises:
            ValueError: they are not as the plan's tensors.
            CommunicationError: a step is not over.
        """
        for spec, array in zip(self.tensors, arrays, strict=True):
            if array.shape != spec.shape or array.dtype != dtype_of(spec.dtype):
                raise spec.misfit(array.shape, array.dtype.name)
        self._native.put([bytes_of(array) for array in arrays])


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype. NumPy takes longer to spell it than a small allreduce takes."""
    return dtype.name


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name; "bfloat16" is not one of its own."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The array's memory as bytes, not a copy."""
    if not array.flags.c_contiguous:
        raise TypeError(
            "Expected a C-contiguous array. Received: an array with strides; np.ascontiguousarray copies it"
        )
    return array.reshape(-1).view(np.uint8)
