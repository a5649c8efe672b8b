# SPDX-License-Identifier: Apache-2.0
"""Reductions over ranks, for what `fit` does not do by itself."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_hpc import backends
from keras_hpc.api import values
from keras_hpc.errors import ReplicaMismatchError
from keras_hpc.job.current import team_number
from keras_hpc.job.team import Team

_OPS = ("mean", "sum", "min", "max", "product")
_ALLREDUCE = "keras_hpc.allreduce"


def empty(shape: int | tuple[int, ...], dtype: Any = "float32", team: int = 0) -> np.ndarray:
    """Return an array of zeros that the other ranks of the node can reach. Collective.

    `allreduce(x, out=x)` of such an array, or of a part of it that begins and ends at the same elements on every rank,
    needs no copy: each rank reduces a part of all arrays in place. The memory is freed with the array.

    Args:
        shape: the same on all ranks.
        dtype: any dtype, the same on all ranks.
        team: number of the team that will reduce it.

    Raises:
        PlanMismatchError: ranks call with different shapes or dtypes.
        CommunicationError: the memory cannot be had.
    """
    members = team_number(team)
    with members.telling("keras_hpc.empty"):
        shape = (shape,) if isinstance(shape, (int, np.integer)) else shape
        shape = tuple(operator.index(length) for length in shape)
        if min(shape, default=0) < 0:
            raise ValueError(f"`shape` is a shape. Expected no negative numbers. Received: shape={shape}")
        kind = np.dtype(dtype)
    members.agree("The shapes and dtypes for keras_hpc.empty", [f"{shape} {kind}"])
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, kind)
    array: np.ndarray = members.native.empty(count * kind.itemsize).view(kind).reshape(shape)
    return array


def allreduce(x: Any, op: str = "mean", team: int = 0, out: np.ndarray | None = None) -> Any:
    """Reduce a value over all ranks, element by element. Collective.

    Inside `tf.function`, `jax.jit` and `torch.compile` too: all ranks then make the calls in program order. Tensors of
    floats have a gradient there and elsewhere, which is a collective call, too, on every rank: of a sum, the sum of the
    ranks' gradients; of a mean, their mean; of "min" and "max", their sum, shared out among the ranks that hold the
    value. "product" has none.

    Args:
        x: a number, NumPy array or tensor of the Keras backend; the same shape and dtype on all ranks: floats of 16, 32
            or 64 bits, bfloat16, integers of 8 to 64 bits, bool. Or a structure of them, dictionaries, lists and
            tuples, reduced in one communication for each dtype. Inside a compiled function, numbers and NumPy arrays
            are reduced when it is traced.
        op: "mean", "sum", "min", "max" or "product". Sums and products of integers wrap around. The mean of integers is
            a float: float64 for numbers and arrays, Keras' `floatx` for tensors. Of bools, "min" says whether all are
            true, "max" whether any is; "sum" counts.
        team: number of the team whose ranks take part.
        out: a contiguous array of the shape and dtype of the result; `x` itself reduces in place.

    Returns:
        `out` if given. Else the result, of the kind of `x`: a number for a number, an array for an array, a tensor for
        a tensor, the same structure for a structure. Sums are taken in rank order, so all ranks get the same bits.

    Raises:
        ValueError: unknown `op` or `team`.
        TypeError: unsupported dtype; a gradient of "product".
        PlanMismatchError: ranks call with different shapes, dtypes or operations, make other calls, or one met an
            error; on all other ranks, and the job can go on. Inside a compiled function it is the framework's own
            error, with the same text.

    Example, on two ranks:

    >>> keras_hpc.allreduce(float(rank))
    0.5
    >>> keras_hpc.allreduce(np.array([1, 10]) * (rank + 1), op="sum")
    array([ 3, 30])
    >>> keras_hpc.allreduce({"all": rank == 0, "any": [rank == 0]}, op="max")
    {'all': True, 'any': [True]}
    """
    members = team_number(team)
    from keras_hpc.keras_hooks import running

    if (trial := running.trial()) is not None:
        trial.communicates = True
        trial.takes_means |= op == "mean"
    return _plain(_allreduce)(members, x, op, out)


def reduce_scatter(x: Any, op: str = "sum", team: int = 0) -> Any:
    """Reduce an array over all ranks and return this rank's part of the result. Collective.

    Axis 0 is cut as evenly as possible: rank r of N gets rows ceil(r n / N) to ceil((r + 1) n / N) of n. Costs as much
    as an allreduce, and has a gradient as that has.

    Args:
        x: an array or a tensor with at least one axis; the same shape and dtype on all ranks.
        op: as of `allreduce`.
        team: number of the team whose ranks take part.

    Raises:
        ValueError: `x` has no axis; unknown `op` or `team`.
        TypeError, PlanMismatchError: as `allreduce`.

    Example, on two ranks: rows 0 and 1 go to rank 0, row 2 to rank 1.

    >>> keras_hpc.allgather_object(keras_hpc.reduce_scatter(np.array([1, 2, 3])).tolist())
    [[2, 4], [6]]
    """
    return _plain(_reduce_scatter)(team_number(team), x, op)


def average(logs: Mapping[str, float], team: int = 0) -> dict[str, float]:
    """Return the mean over all ranks of every value of a dictionary. Collective. Same keys on all ranks.

    Raises:
        PlanMismatchError: ranks have different keys.

    Example, on two ranks:

    >>> keras_hpc.average({"loss": 1.0 + rank})
    {'loss': 1.5}
    """
    members = team_number(team)
    with members.telling("keras_hpc.average"):
        keys = sorted(logs)
        numbers = np.array([float(logs[key]) for key in keys], dtype=np.float64)
    members.agree("The keys given to keras_hpc.average()", keys)
    if keys:
        members.allreduce(numbers, "mean", "keras_hpc.average")
    means = dict(zip(keys, numbers.tolist(), strict=True))
    return {key: means[key] for key in logs}


def barrier(team: int = 0) -> None:
    """Wait until all ranks of the team are here. Collective."""
    team_number(team).barrier()


def check_replicas(model: Any, team: int = 0) -> None:
    """Check that all ranks hold the same model and optimizer state, bit for bit. Collective.

    What must differ or may is left out: the state of random number generators and of metrics. Statistics that each
    rank takes from its own data (BatchNormalization) are the same after each epoch of `fit` and after `evaluate`.
    Embeddings that TensorFlow trains on GPUs drift apart by rounding; here and after each epoch they become the root's.

    Raises:
        ReplicaMismatchError: on all ranks, naming the first variable that differs, and the ranks; or one of them alone
            has loaded or set the state of a sharded optimizer.
    """
    from keras_hpc.keras_hooks.sharded import whole
    from keras_hpc.keras_hooks.state import replicas, rows, variables

    members = team_number(team)
    whole.check_loaded_alike(model, ReplicaMismatchError)
    rows.align(model, members, "keras_hpc.check_replicas()")
    own = [*variables.replicated_variables(model), *variables.common_buffers(model)]
    variables.check_same(members, own)
    replicas.compare(members, own, [variable.value for variable in own])


def _plain(function: Any) -> Any:
    """Return a function as compilers of code should take it: one that they call and do not look into."""
    backend = backends.current()
    return backend.uncompiled(function) if backend.code_is_compiled() else function


def _allreduce(members: Team, x: Any, op: str, out: np.ndarray | None) -> Any:
    try:
        _check_op(op)
        if out is not None:
            return _into(members, x, op, out)
        if values.is_structure(x):
            return _allreduce_structure(members, x, op)
        return _allreduce_one(members, x, op, "")
    except Exception as error:
        members.refuse(_ALLREDUCE, error)
        raise


def _reduce_scatter(members: Team, x: Any, op: str) -> Any:
    what = "keras_hpc.reduce_scatter"
    with members.telling(what):
        _check_op(op)
        if not getattr(x, "shape", ()):
            raise ValueError(f"`x` is cut along axis 0. Expected an array with at least one axis. Received: x={x!r}")
        reduced = _allreduce_one(members, x, op, what)
    begin, end = (-(-reduced.shape[0] * rank // members.size) for rank in (members.rank, members.rank + 1))
    return reduced[begin:end]


def _check_op(op: str) -> None:
    if op not in _OPS:
        raise ValueError(f"`op` is the operation. Expected one of {', '.join(_OPS)}. Received: op={op!r}")


def _into(members: Team, x: Any, op: str, out: Any) -> Any:
    """Reduce `x` into `out`."""
    if not isinstance(out, np.ndarray) or not out.flags.c_contiguous or not out.flags.writeable:
        raise TypeError(f"`out` takes the result. Expected a writeable C-contiguous NumPy array. Received: {type(out)}")
    if not out.dtype.isnative:
        raise TypeError(f"`out` takes the result. Expected this machine's byte order. Received: dtype {out.dtype}")
    given = x if x is out else values.array_of(x)
    work, result_of = values.reducible(given, op)
    result = given.dtype if work is given else result_of(np.empty(0, work.dtype)).dtype
    if given.shape != out.shape or result != out.dtype:
        raise ValueError(
            f"`out` takes the result. Expected shape {given.shape} and dtype {result}. "
            f"Received: shape {out.shape} and dtype {out.dtype}"
        )
    if work is not given:
        out[...] = _reduce_arrays(members, [given], op, "")[0]
        return out
    if x is not out:
        out[...] = given
    members.allreduce(out, op)
    return out


def _allreduce_one(members: Team, x: Any, op: str, what: str) -> Any:
    if values.is_tensor(x):
        return _reduce_tensor(members, values.tensor_of(x), op, what)
    return values.like(x, _reduce_arrays(members, [values.array_of(x)], op, what)[0])


def _reduce_arrays(members: Team, arrays: list[np.ndarray], op: str, what: str) -> list[np.ndarray]:
    """Reduce arrays of one dtype."""
    dtype = arrays[0].dtype
    pairs = [values.reducible(array, op) for array in arrays]
    work = pairs[0][0].copy() if len(pairs) == 1 else np.concatenate([part.reshape(-1) for part, _ in pairs])
    if dtype != work.dtype:
        what = f"{what or _ALLREDUCE}, {op} of {dtype}"  # which the engine does not see
    members.allreduce(work, op, what)
    if len(pairs) == 1:
        return [pairs[0][1](work)]
    results, begin = [], 0
    for part, result_of in pairs:
        results.append(result_of(work[begin : begin + part.size]).reshape(part.shape))
        begin += part.size
    return results


def _allreduce_structure(members: Team, x: Any, op: str) -> Any:
    """Reduce a structure, in one communication for each dtype."""
    from keras import ops

    places, leaves, rebuild = values.flatten(x)
    in_program = backends.current().in_program()
    leaves = [values.tensor_of(leaf) if values.is_tensor(leaf) else leaf for leaf in leaves]
    groups: dict[tuple[bool, str], list[int]] = {}
    texts = []
    host: dict[int, np.ndarray] = {}
    for index, (place, leaf) in enumerate(zip(places, leaves, strict=True)):
        tensor = values.is_tensor(leaf) and (in_program or _is_float(leaf))
        if not tensor:
            host[index] = values.array_of(leaf)
        value = leaf if tensor else host[index]
        name = values.name_of(value)
        # Tensors of unknown shape cannot be taken apart again: each is a group of its own.
        alone = f" {index}" if tensor and None in tuple(value.shape) else ""
        groups.setdefault((tensor, name.split()[0] + alone), []).append(index)
        texts.append(f"{place}: {name}")
    what = f"{_ALLREDUCE} of {'; '.join(texts)}"
    if not groups:
        members.meet(what)
    results: list[Any] = [None] * len(leaves)
    for (tensor, _), indices in sorted(groups.items(), key=lambda item: item[1]):
        if not tensor:
            for index, array in zip(
                indices, _reduce_arrays(members, [host[i] for i in indices], op, what), strict=True
            ):
                results[index] = values.like(leaves[index], array)
        elif len(indices) == 1:
            results[indices[0]] = _reduce_tensor(members, leaves[indices[0]], op, what)
        else:
            parts = [leaves[i] for i in indices]
            flat = _reduce_tensor(members, ops.concatenate([ops.reshape(p, (-1,)) for p in parts]), op, what)
            begin = 0
            for index, part in zip(indices, parts, strict=True):
                count = math.prod(part.shape)
                results[index] = ops.reshape(flat[begin : begin + count], tuple(part.shape))
                begin += count
    return rebuild(results)


def _is_float(x: Any) -> bool:
    from keras import backend

    return bool(backend.is_float_dtype(backend.standardize_dtype(x.dtype)))


def _reduce_tensor(members: Team, x: Any, op: str, what: str) -> Any:
    """Reduce a tensor, of a compiled function or with a value."""
    import keras

    backend = backends.current()
    if _is_float(x):
        return _differentiable(members, x, op, what) if backend.wants_gradient(x) else _call(members, x, op, what)
    dtype = keras.backend.standardize_dtype(x.dtype)
    if not backend.in_program():
        array = _reduce_arrays(members, [values.array_of(x)], op, what)[0]
        if op == "mean":
            array = array.astype(keras.config.floatx())
        elif dtype == "bool" and op in ("sum", "product"):
            array = array.astype(np.int32)
        return backend.from_numpy(array, x)
    if op == "mean":
        return _call(members, keras.ops.cast(x, keras.config.floatx()), op, f"{what or _ALLREDUCE}, {op} of {dtype}")
    if dtype in values.REDUCIBLE:
        return _call(members, x, op, what)
    if dtype not in ("bool", "int8", "int16", "uint8", "uint16"):
        raise TypeError(
            "Unsupported dtype inside a compiled function. Expected bool, integers of 8 and 16 bits, or one of "
            f"{', '.join(values.REDUCIBLE)}. Received: {dtype}"
        )
    result = _call(members, keras.ops.cast(x, "int32"), op, f"{what or _ALLREDUCE}, {op} of {dtype}")
    return result if dtype == "bool" and op in ("sum", "product") else keras.ops.cast(result, dtype)


def _call(members: Team, x: Any, op: str, what: str) -> Any:
    return backends.current().allreduce(members, x, op, what)


def _differentiable(members: Team, x: Any, op: str, what: str) -> Any:
    """Reduce a tensor of floats so that the result has a gradient.

    With y = sum_s x_s on every rank and g_r the gradient on rank r of its own loss by y, the gradient of all ranks'
    losses together by x_s is sum_r g_r: the same reduction of the gradients. So it is for the mean, with 1/N on both
    sides. Of a minimum or maximum, each rank that holds the value moves it as much as the next one does.
    """
    from keras import ops

    def again(gradient: Any, op: str) -> Any:
        return _reduce_tensor(members, gradient, op, f"the gradient of {what or _ALLREDUCE}")

    def gradient(upstream: Any, kept: Any) -> Any:
        upstream = ops.convert_to_tensor(upstream)
        if op in ("sum", "mean"):
            return again(upstream, op)
        if op == "product":
            raise TypeError(
                "keras_hpc.allreduce has no gradient of a product. Expected op='mean', 'sum', 'min' or 'max', or "
                "keras.ops.stop_gradient around it. Received: op='product'"
            )
        x, y = kept
        mine = ops.cast(ops.equal(x, y), x.dtype)
        return again(upstream, "sum") * mine / ops.maximum(again(mine, "sum"), 1)

    return backends.current().differentiable(lambda x: _call(members, x, op, what), gradient, op in ("min", "max"), x)
