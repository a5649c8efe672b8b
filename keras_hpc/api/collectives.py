# SPDX-License-Identifier: Apache-2.0
"""Collectives on arrays and tensors, for what `fit` does not do by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_hpc import backends
from keras_hpc.job.current import team_number
from keras_hpc.job.plan import TensorSpec

_OPS = ("mean", "sum", "min", "max")


def empty(shape: int | tuple[int, ...], dtype: Any = "float32", team: int = 0) -> np.ndarray:
    """Returns an array of zeros that the other ranks of the node can reach. Collective.

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
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    kind = np.dtype(dtype)
    members = team_number(team)
    members.agree("The shapes and dtypes for keras_hpc.empty", [f"{shape} {kind}"])
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, kind)
    array: np.ndarray = members.native.empty(count * kind.itemsize).view(kind).reshape(shape)
    return array


def allreduce(x: Any, op: str = "mean", team: int = 0, out: np.ndarray | None = None) -> Any:
    """Reduces a value over all ranks. Collective.

    Args:
        x: a number, NumPy array or tensor of the Keras backend; the same shape and dtype on all ranks: float16,
            bfloat16, float32, float64, int32 or int64. Inside `tf.function` and `jax.jit` too; there, two calls with
            equal shape, dtype and op must not run at the same time.
        op: "mean" (of floats), "sum", "min" or "max".
        team: number of the team whose ranks take part.
        out: a contiguous array of the shape and dtype of `x` for the result; `x` itself reduces in place.

    Returns:
        `out` if given. Else the result, of the kind of `x`: a number for a number, an array for an array, a tensor for
        a tensor. Sums are taken in rank order, so all ranks get the same bits.

    Raises:
        ValueError: unknown `op` or `team`.
        TypeError: unsupported dtype.
        PlanMismatchError: ranks call with different shapes, dtypes or operations.
    """
    if op not in _OPS:
        raise ValueError(f"`op` is the operation. Expected one of {', '.join(_OPS)}. Received: op={op!r}")
    members = team_number(team)
    backend = backends.current()
    if backend.is_traced(x):
        dtype = np.dtype(x.dtype.name if hasattr(x.dtype, "name") else x.dtype).name
        spec = TensorSpec("x", tuple(x.shape), dtype)
        plan = members.plan(f"allreduce {op} {spec.shape} {spec.dtype}", [spec], op=op, weighted=False)
        return backend.reduce(plan, [x])[0]
    array = _array(x, copy=True) if out is None else _given(x, out)
    if op == "mean" and array.dtype.kind in "iu":
        if not isinstance(x, int):
            _check_dtype(array)
            members.allreduce(array.copy(), "sum")  # where other ranks gave something else, all are told so
            raise TypeError(
                f"The mean of integers is not an integer. Expected floats, or op='sum', 'min' or 'max'. Received: {x!r}"
            )
        array = array.astype(np.float64)
    _check_dtype(array)
    members.allreduce(array, op)
    return _like(x, array) if out is None else out


def broadcast(x: Any, root: int = 0, team: int = 0) -> Any:
    """Gives every rank the root's value. Collective.

    Args:
        x: a number, NumPy array or tensor, of the same shape and dtype on all ranks; or something with variables (a
            variable, layer, model, optimizer, or a list of them), which is then changed in place: use it before a
            training loop of your own.
        root: rank in the team whose value is taken.
        team: number of the team whose ranks take part.

    Returns:
        The root's value, of the kind of `x`. For things with variables: `x`.
    """
    members = team_number(team)
    if not isinstance(root, int) or not 0 <= root < members.size:
        raise ValueError(f"`root` is a rank. Expected a number from 0 to {members.size - 1}. Received: root={root!r}")
    variables = _variables(x)
    if variables:
        from keras_hpc.keras_hooks import variables as hooks

        hooks.broadcast_variables(members, variables, root)
        return x
    array = _array(x, copy=True)
    if array.size:
        members.broadcast(array, root)
    return _like(x, array)


def allgather(x: Any, team: int = 0) -> np.ndarray:
    """Returns the arrays of all ranks as one NumPy array, concatenated along axis 0 in rank order. Collective.

    Args:
        x: NumPy array or tensor with at least one axis. Ranks may differ in the length of axis 0 only.
        team: number of the team whose ranks take part.
    """
    array = _array(x)
    if array.ndim == 0:
        raise ValueError(f"`x` is concatenated along axis 0. Expected at least one axis. Received: x={x!r}")
    return team_number(team).allgather(array)


def average(logs: Mapping[str, float], team: int = 0) -> dict[str, float]:
    """Returns the mean over all ranks of every value of a dictionary. Collective. Same keys on all ranks.

    Raises:
        PlanMismatchError: ranks have different keys.
    """
    members = team_number(team)
    keys = sorted(logs)
    members.agree("The keys given to keras_hpc.average()", keys)
    values = np.array([float(logs[key]) for key in keys], dtype=np.float64)
    if keys:
        members.allreduce(values, "mean")
    means = dict(zip(keys, values.tolist(), strict=True))
    return {key: means[key] for key in logs}


def barrier(team: int = 0) -> None:
    """Waits until all ranks of the team are here. Collective."""
    team_number(team).barrier()


def check_replicas(model: Any, team: int = 0) -> None:
    """Checks that all ranks hold the same model and optimizer state, bit for bit. Collective.

    What must differ or may is left out: the state of random number generators and of metrics. Statistics that each
    rank takes from its own data (BatchNormalization) are the same after each epoch of `fit` and after `evaluate`.

    Raises:
        ReplicaMismatchError: on all ranks, naming the first variable that differs, and the ranks.
    """
    from keras_hpc.keras_hooks import replicas, variables

    members = team_number(team)
    own = variables.replicated_variables(model)
    variables.check_same(members, own)
    replicas.compare(members, own, [variable.value for variable in own])


def _variables(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple)):
        found = [_variables(item) for item in x]
        return [variable for variables in found for variable in variables] if all(found) else []
    import keras

    if isinstance(x, keras.Variable):
        return [x]
    if isinstance(x, (keras.Layer, keras.optimizers.Optimizer)):
        return list(x.variables)
    return []


def _array(x: Any, *, copy: bool = False) -> np.ndarray:
    if isinstance(x, (bool, int, float, complex, list, tuple, np.ndarray, np.generic)):
        return np.array(x, order="C", copy=copy or None)
    array = backends.current().to_numpy(x)
    return np.array(array, order="C", copy=copy or None)


def _given(x: Any, out: Any) -> np.ndarray:
    """Returns `out`, holding `x`."""
    if not isinstance(out, np.ndarray) or not out.flags.c_contiguous or not out.flags.writeable:
        raise TypeError(f"`out` takes the result. Expected a writeable C-contiguous NumPy array. Received: {type(out)}")
    array: np.ndarray = out
    if x is out:
        return array
    given = _array(x)
    if given.shape != array.shape or given.dtype != array.dtype:
        raise ValueError(
            f"`out` takes the result. Expected shape {given.shape} and dtype {given.dtype}. "
            f"Received: shape {array.shape} and dtype {array.dtype}"
        )
    array[...] = given
    return array


def _check_dtype(array: np.ndarray) -> None:
    supported = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
    if array.dtype.name not in supported:
        raise TypeError(f"Unsupported dtype. Expected one of {', '.join(supported)}. Received: {array.dtype.name}")


def _like(x: Any, array: np.ndarray) -> Any:
    if isinstance(x, (bool, int, float, complex)):
        return array.item()
    if isinstance(x, np.generic):
        return array[()]
    if isinstance(x, (list, tuple, np.ndarray)):
        return array
    import keras

    return keras.ops.convert_to_tensor(array)
