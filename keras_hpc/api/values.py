# SPDX-License-Identifier: Apache-2.0
"""What users give to collectives, and what they get back: numbers, arrays, tensors, and structures of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_hpc import backends
from keras_hpc.job import plan

REDUCIBLE = ("float16", "bfloat16", "float32", "float64", "int32", "int64")  # by the engine itself
_NARROW = ("int8", "int16", "uint8", "uint16", "uint32", "uint64", "bool")
_SIGN = np.uint64(1) << np.uint64(63)


def is_number(x: Any) -> bool:
    """Return whether `x` is a number of Python's or NumPy's."""
    return isinstance(x, (bool, int, float, complex, np.generic))


def is_tensor(x: Any) -> bool:
    """Return whether `x` is a tensor or variable of the Keras backend."""
    if isinstance(x, np.ndarray) or is_number(x):
        return False
    import keras

    return isinstance(x, keras.Variable) or bool(keras.ops.is_tensor(x))


def tensor_of(x: Any) -> Any:
    """Return the tensor that a tensor is or a variable holds."""
    import keras

    return keras.ops.convert_to_tensor(x)


def is_structure(x: Any) -> bool:
    """Return whether `x` is a dictionary, list or tuple, or, on JAX, another tree of its own."""
    if isinstance(x, (dict, list, tuple)):
        return True
    if isinstance(x, np.ndarray) or is_number(x) or x is None or isinstance(x, (str, bytes)) or is_tensor(x):
        return False
    jax = _jax()
    return jax is not None and not jax.tree_util.all_leaves([x])


def flatten(x: Any) -> tuple[list[str], list[Any], Callable[[list[Any]], Any]]:
    """Return the places and values of a structure's leaves, and what makes the same structure of other leaves."""
    jax = _jax()
    if jax is not None:
        pairs, tree = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda value: value is None)
        return [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs], tree.unflatten
    import keras

    pairs = keras.tree.flatten_with_path(x)
    places = ["".join(f"[{key!r}]" for key in path) for path, _ in pairs]
    return places, [leaf for _, leaf in pairs], lambda leaves: keras.tree.pack_sequence_as(x, leaves)


def _jax() -> Any:
    import keras

    if keras.backend.backend() != "jax":
        return None
    import jax

    return jax


def array_of(x: Any, *, copy: bool = False) -> np.ndarray:
    """Return the value as a contiguous NumPy array in this machine's byte order.

    Args:
        x: a number, an array or a tensor with a value.
        copy: an array of its own.

    Raises:
        TypeError: `x` is something else, or a tensor of a compiled function.
    """
    if is_tensor(x):
        backend = backends.current()
        if backend.is_traced(x):
            raise TypeError(
                "Only `allreduce` and `reduce_scatter` can be called inside a compiled or differentiated function. "
                f"Expected a tensor with a value. Received: {x}"
            )
        x = backend.view(x)
    array = (np.array if copy else np.asarray)(x, order="C")
    if array.dtype == object:
        raise TypeError(f"Expected a number, an array or a tensor. Received: {x!r} of type {type(x).__name__}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def like(x: Any, array: np.ndarray) -> Any:
    """Return an array as what `x` is: a number, an array or a tensor."""
    if isinstance(x, np.generic):
        return array[()]
    if is_number(x):
        return array.item()
    return backends.current().from_numpy(array, tensor_of(x)) if is_tensor(x) else array


def name_of(x: Any) -> str:
    """Return dtype and shape of an array or a tensor."""
    import keras

    dtype = x.dtype.name if isinstance(x, (np.ndarray, np.generic)) else keras.backend.standardize_dtype(x.dtype)
    return f"{dtype} of shape {tuple(x.shape)}"


def reducible(array: np.ndarray, op: str) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return an array that the engine can reduce, and what makes the result of it.

    Narrow integers are widened, and wrap around when they come back, as NumPy's do.

    Raises:
        TypeError: unsupported dtype.
    """
    dtype = array.dtype
    name = plan.name_of(dtype)
    if name not in REDUCIBLE and name not in _NARROW:
        raise TypeError(f"Unsupported dtype. Expected one of {', '.join((*REDUCIBLE, *_NARROW))}. Received: {name}")
    if op == "mean" and dtype.kind in "biu":
        return array.astype(np.float64), lambda result: result
    if name in REDUCIBLE:
        return array, lambda result: result
    if name == "bool" and op in ("sum", "product"):
        return array.astype(np.int64), lambda result: result
    if name == "uint64":
        # The same sums and products in two's complement; the same order with the first bit the other way round.
        flip = _SIGN if op in ("min", "max") else np.uint64(0)
        return (array ^ flip).view(np.int64), lambda result: result.view(np.uint64) ^ flip
    return array.astype(np.int64 if name == "uint32" else np.int32), lambda result: result.astype(dtype)
