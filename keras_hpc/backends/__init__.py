# SPDX-License-Identifier: Apache-2.0
"""Tensors of the Keras backend on one side, the engine's plans on the other. Nothing about Keras or algorithms.

Every backend is one module with the same functions:

- `load()`: load the native operations. Called once by `keras_hpc.init()`.
- `sees_gpus()`: whether the framework can compute on GPUs here.
- `use_device(device)`: a context in which it computes on that `Device`, or, with None, on the CPU.
- `limit_threads(count, teams)`: compute with so many threads, if the framework has not started yet.
- `device_of(tensors, pipelined=False)`: the number of the GPU whose memory plans of them use, -1 for the host, None:
  no plan does.
- `reduce(plan, tensors, weight=None, active=None)`: reduce the tensors of a plan over the ranks of its team.
- `turn`, `repeat`: the same for pipelined plans, and the updates that follow.
- `allreduce(team, x, op, what)`: reduce one tensor, by a call that needs no plan; its gradient is not known here.
- `gather(plan, pieces, active=None)`: of a plan each of whose tensors one rank gives; `pieces`: a module, of pieces of
  variables before and after it (`keras_hooks.sharded`).
- `exchange(exchange, x, axis, order)`: rows that other ranks of a group have, with its gradient;
  `after(y, order)`: a tensor that cannot be had before all exchanges so far.
- `mark(name)`: put a name with the time of now into the framework's own profile, if one is being made.
- `in_program()`: whether a compiled function is being made, in which tensors stand for values of its own.
- `code_is_compiled()`: whether a compiler reads the code that asks.
- `uncompiled(function)`: a function that runs as it is where compilers of the framework find it.
- `differentiable(reduced, gradient, keeps, x)`: `reduced(x)`, with that gradient.
- `wants_gradient(x)`: whether a gradient may be asked of what is computed from a tensor.
- `from_numpy(array, like)`: a tensor, where `like` is.
- `adopt(array)`: a tensor with the memory of an array on the CPU that nobody will change; a copy where that cannot be.
- `is_traced(x)`: whether `x` stands for a value that a compiled function will compute.
- `view(x)`: the value of a tensor or variable as a NumPy array, to be read at once: without a copy where it can be.
- `to_numpy(x)`: the same as an array of its own.
- `assign(variable, value)`: set a variable from a NumPy array.

TensorFlow and JAX also have `with_borders`, a convolution of a part's own rows with what others add; TensorFlow has
`allgather_rows(team, tensor)`, for sparse gradients; PyTorch has `Gradients`, which takes the gradients of a step one
by one.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SUPPORTED = ("tensorflow", "jax", "torch")


def current() -> ModuleType:
    """Return the module for the Keras backend in use.

    Raises:
        RuntimeError: keras_hpc has no module for this backend.
    """
    import keras

    name = keras.config.backend()
    if name not in _SUPPORTED:
        raise RuntimeError(
            f"keras_hpc does not work with this Keras backend. Expected one of {', '.join(_SUPPORTED)}: set "
            f"the environment variable KERAS_BACKEND before Keras is imported. Received: {name!r}"
        )
    return importlib.import_module(f"{__name__}.{name}")


def shapes_of(exchange: Any, shape: Sequence[int | None], axis: int) -> tuple[tuple[int | None, ...], ...]:
    """Return the shapes of a tensor that is exchanged, before and after.

    Args:
        exchange: the engine's.
        shape: of this rank's rows.
        axis: along which it is split.
    """
    window = list(shape)
    window[axis] = exchange.window
    if exchange.cells:
        window[axis + 1] = (shape[axis + 1] or 0) + exchange.cells
    return tuple(shape), tuple(window)


def local_steps() -> ModuleType:
    """Return the module for local steps with the Keras backend in use.

    Each has the same functions; `mode`, a number or a scalar tensor, is what a step has to do, and `due` says whether:

    - `begin(plan, samples, gradient)`: begin a step; returns a gradient in the place of the one given, and the mode.
    - `set_anchors(plan, mode, due, values)`: give the engine the weights `values()`; returns the mode to go on with.
    - `average(plan, due, variables)`: give variables what a plan makes of their values.
    - `choose(due, average, gradients)`: the gradients, or `average(active)` of them.
    - `update_if(due, update, otherwise, kept)`: an update, or something else that leaves variables as they are.
    """
    return importlib.import_module(f"{current().__name__}_local")


def library_path(name: str) -> str:
    """Return the path of a native library of ours, which lies beside the extension module.

    Raises:
        ImportError: the library is not installed.
    """
    from keras_hpc import _native

    path = Path(_native.__file__).with_name(f"lib{name}.so")
    if not path.is_file():
        raise ImportError(f"keras_hpc is installed without a native library: {path} is missing. Install it again.")
    return str(path)
