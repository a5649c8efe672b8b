# SPDX-License-Identifier: Apache-2.0
"""Collectives that hand values from rank to rank as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_hpc import backends
from keras_hpc.api import values
from keras_hpc.api.collectives import _plain
from keras_hpc.job import current
from keras_hpc.job.current import team_number
from keras_hpc.job.team import Team

_CHUNK_BYTES = 64 << 20


def broadcast(x: Any, root: int = 0, team: int = 0) -> Any:
    """Give every rank the root's value. Collective. Without a gradient, and not inside compiled functions.

    Args:
        x: a NumPy array or tensor, of the same shape and dtype on all ranks; a number, text or None, of any kind on
            other ranks than the root; or a structure of them, of the same shape on all ranks: dictionaries, lists and
            tuples, a `state_dict`, trees of JAX. Or something with variables (a variable, layer, model, optimizer, a
            list of them, or a module of PyTorch), which is then changed in place: use it before a training loop of your
            own.
        root: rank in the team whose value is taken, the same on all ranks.
        team: number of the team whose ranks take part.

    Returns:
        The root's value, of the kind of `x`: array for array, tensor for tensor, the same structure; for numbers, text
        and None, of the root's kind. For things with variables: `x`.

    Raises:
        ValueError: `root` is no rank of the team.
        TypeError: unsupported values.
        PlanMismatchError: shapes, dtypes, structures or roots differ between ranks; on all ranks, and the job can go
            on.

    Example, on two ranks:

    >>> keras_hpc.broadcast(np.array([rank, 10 * rank]), root=1)
    array([ 1, 10])
    """
    return _plain(_broadcast)(team_number(team), x, root)


def broadcast_object(value: Any, root: int = 0, team: int = 0) -> Any:
    """Give every rank the root's value, whatever it is. Collective. For control data, such as names and epochs.

    Args:
        value: None, bools, numbers, text, bytes, NumPy arrays, and lists, tuples and dictionaries of them; not looked
            at on other ranks. It travels as JSON and memory, never as pickled code.
        root: rank in the team whose value is taken, the same on all ranks.
        team: number of the team whose ranks take part.

    Raises:
        ValueError: `root` is no rank of the team.
        TypeError: the value is something else; on the root. Other ranks raise a PlanMismatchError, which says so.
        PlanMismatchError: roots differ between ranks, or ranks make other calls.

    Example, on two ranks:

    >>> keras_hpc.broadcast_object({"run": f"of rank {rank}"})
    {'run': 'of rank 0'}
    """
    members = team_number(team)
    what = "keras_hpc.broadcast_object"
    with members.telling(what):
        root = _checked_root(members, root)
    return members.broadcast_object(value, root, what)


def allgather(x: Any, team: int = 0) -> Any:
    """Return the arrays of all ranks as one, concatenated along axis 0 in rank order. Collective.

    Without a gradient, and not inside compiled functions.

    Args:
        x: NumPy array or tensor of any dtype, with at least one axis; same dtype on all ranks, and same shape except
            for the length of axis 0.
        team: number of the team whose ranks take part.

    Returns:
        An array for an array, a tensor for a tensor.

    Raises:
        ValueError: `x` has no axis.
        TypeError: `x` is no array, or a tensor of a compiled function.
        PlanMismatchError: shapes or dtypes differ between ranks; on all ranks, and the job can go on.

    Example, on two ranks: one row from rank 0, two from rank 1.

    >>> keras_hpc.allgather(np.full((1 + rank, 2), rank))
    array([[0, 0],
           [1, 1],
           [1, 1]])
    """
    return _plain(_allgather)(team_number(team), x)


def allgather_object(value: Any, team: int = 0) -> list[Any]:
    """Return the values of all ranks, in rank order. Collective. For control data.

    Args:
        value: as of `broadcast_object`; may be something else on each rank.
        team: number of the team whose ranks take part.

    Raises:
        TypeError: the value is something else; on that rank. Other ranks raise a PlanMismatchError, which says so.
        PlanMismatchError: ranks make other calls.

    Example, on two ranks:

    >>> keras_hpc.allgather_object(f"rank {rank} of {size}")
    ['rank 0 of 2', 'rank 1 of 2']
    """
    return team_number(team).allgather_object(value, "keras_hpc.allgather_object")


def alltoall(x: Any, team: int = 0, splits: Sequence[int] | None = None) -> Any:
    """Send rows to every rank, and return the rows received from every rank, in rank order. Collective.

    Without a gradient, and not inside compiled functions.

    Args:
        x: NumPy array or tensor of any dtype, with at least one axis; same dtype on all ranks, and same shape except
            for the length of axis 0.
        team: number of the team whose ranks take part.
        splits: how many rows each rank gets, one number for each rank: the first rows go to rank 0. Defaults to parts
            as even as possible: of n rows, rank r of N gets rows ceil(r n / N) to ceil((r + 1) n / N).

    Returns:
        An array for an array, a tensor for a tensor.

    Raises:
        ValueError: `x` has no axis; `splits` does not fit it.
        TypeError, PlanMismatchError: as `allgather`.

    Example, on two ranks: each sends its first row to rank 0, and two rows to rank 1.

    >>> rows = keras_hpc.alltoall(np.arange(3) + 10 * rank, splits=[1, 2])
    >>> keras_hpc.allgather_object(rows.tolist())
    [[0, 10], [1, 2, 11, 12]]
    """
    return _plain(_alltoall)(team_number(team), x, splits)


def _checked_root(members: Team, root: Any) -> int:
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < members.size:
        raise ValueError(f"`root` is a rank. Expected a number from 0 to {members.size - 1}. Received: root={root!r}")
    return int(root)


def _rows(x: Any, what: str) -> np.ndarray:
    array = values.array_of(x)
    if array.ndim == 0:
        raise ValueError(f"`x` is {what} along axis 0. Expected at least one axis. Received: x={x!r}")
    return array


def _allgather(members: Team, x: Any) -> Any:
    what = "keras_hpc.allgather"
    with members.telling(what):
        array = _rows(x, "concatenated")
    return _as(x, members.allgather(array, what))


def _alltoall(members: Team, x: Any, splits: Sequence[int] | None) -> Any:
    what = "keras_hpc.alltoall"
    with members.telling(what):
        array = _rows(x, "cut")
        if splits is None:
            bounds = [-(-len(array) * rank // members.size) for rank in range(members.size + 1)]
            splits = np.diff(bounds).tolist()
        counts = [int(count) for count in np.asarray(splits).reshape(-1)]
        if len(counts) != members.size or min(counts) < 0 or sum(counts) != len(array):
            raise ValueError(
                f"`splits` says how many rows each rank gets. Expected {members.size} numbers with the sum "
                f"{len(array)}. Received: splits={splits!r}"
            )
    return _as(x, members.alltoall(array, counts, what))


def _as(x: Any, array: np.ndarray) -> Any:
    return values.like(x, array) if values.is_tensor(x) else array


def _broadcast(members: Team, x: Any, root: Any) -> Any:
    what = "keras_hpc.broadcast"
    with members.telling(what):
        root = _checked_root(members, root)
        variables = _variables(x)
        module = [] if variables else _state_of_module(x)
        places, leaves, rebuild = ([""], [x], None) if module or not values.is_structure(x) else values.flatten(x)
        if module:
            places, leaves = [f"[{i}]" for i in range(len(module))], module
        objects = [i for i, leaf in enumerate(leaves) if leaf is None or isinstance(leaf, (str, bytes))]
        objects += [i for i, leaf in enumerate(leaves) if values.is_number(leaf)]
        arrays = {} if variables else {i: values.array_of(leaves[i]) for i in set(range(len(leaves))) - set(objects)}
    if variables:
        from keras_hpc.keras_hooks.state import replicas
        from keras_hpc.keras_hooks.state.variables import broadcast_variables

        broadcast_variables(members, variables, root)
        for item in x if isinstance(x, (list, tuple)) else [x]:
            if hasattr(item, "_flatten_layers"):
                replicas.derive(item)
        if hasattr(x, "train_on_batch"):  # its optimizer follows with the next step, on all ranks
            current.job().known.model(x).synchronized = None
        return x
    texts = [
        f"{place}: {values.name_of(arrays[i]) if i in arrays else 'a number, text or None'}".removeprefix(": ")
        for i, place in enumerate(places)
    ]
    if rebuild is None and not module:
        members.meet(what, f"{texts[0]} from rank {root}")
    else:
        members.agree("The values given to keras_hpc.broadcast", [f"from rank {root}", *texts])
    results: list[Any] = list(leaves)
    if objects:
        for i, value in zip(objects, members.broadcast_object([leaves[i] for i in objects], root, what), strict=True):
            results[i] = value
    for chunk in _chunks(arrays):
        buffer = np.concatenate([arrays[i].reshape(-1).view(np.uint8) for i in chunk])
        members.broadcast(buffer, root, what)
        begin = 0
        for i in chunk:
            size = arrays[i].nbytes
            received = buffer[begin : begin + size].copy().view(arrays[i].dtype).reshape(arrays[i].shape)
            begin += size
            if module:
                backends.current().copy_to(module[i], received)
            else:
                results[i] = _as(leaves[i], received)
    if module:
        return x
    return results[0] if rebuild is None else rebuild(results)


def _chunks(arrays: dict[int, np.ndarray]) -> list[list[int]]:
    """Return the numbers of arrays that go in one message."""
    chunks: list[list[int]] = []
    size = math.inf
    for i in sorted(arrays):
        if size + arrays[i].nbytes > _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(i)
        size += arrays[i].nbytes
    return chunks


def _variables(x: Any) -> list[Any]:
    """Return the variables of what has variables."""
    if isinstance(x, (list, tuple)):
        found = [_variables(item) for item in x]
        return [variable for variables in found for variable in variables] if all(found) else []
    if isinstance(x, (np.ndarray, dict)) or values.is_number(x):
        return []
    import keras

    if isinstance(x, keras.Variable):
        return [x]
    if isinstance(x, keras.Layer):
        from keras_hpc.keras_hooks.state.variables import buffers

        return [*x.variables, *buffers(x)]
    if isinstance(x, keras.optimizers.Optimizer):
        return list(x.variables)
    return []


def _state_of_module(x: Any) -> list[Any]:
    import keras

    if keras.backend.backend() != "torch" or isinstance(x, (np.ndarray, dict, list, tuple)) or values.is_number(x):
        return []
    return list(backends.current().state_of(x))
