# SPDX-License-Identifier: Apache-2.0
"""PyTorch: tensors are started and awaited where Python is; gradients live in memory that the ranks of a node share."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import torch

from keras_hpc.backends import torch_pieces as pieces
from keras_hpc.backends.torch_exchange import after as after
from keras_hpc.backends.torch_exchange import exchange as exchange
from keras_hpc.backends.torch_gradients import gradients_of as gradients_of
from keras_hpc.backends.torch_tensors import adopt as adopt
from keras_hpc.backends.torch_tensors import bytes_of, dtype_of, number_of, stream_of, tensor_of
from keras_hpc.backends.torch_tensors import device_of as device_of
from keras_hpc.backends.torch_tensors import from_numpy as from_numpy

# Start and wait can do the work themselves.
NEEDS_THREAD = False
# Plans are told whether their tensors are: some are on the host.
PLANS_ON_GPU = False

# Of a plan each of whose tensors one rank gives.
gather = pieces.gather


def load() -> None:
    """Do nothing: PyTorch's tensors lend their memory to NumPy, and so to the engine."""


def sees_gpus() -> bool:
    """Return whether PyTorch can compute on GPUs here."""
    return bool(torch.cuda.is_available())


@contextlib.contextmanager
def use_device(device: Any) -> Iterator[None]:
    """Compute on a GPU, or, with None, on the CPU, also where there are GPUs, until the context is left.

    Args:
        device: the `Device` of this rank, or None. Other threads that compute must choose it themselves.
    """
    if device is None:
        with keras.device("cpu"):
            yield
        return
    before = torch.cuda.current_device()
    torch.cuda.set_device(device.ordinal)  # Keras computes on the current one
    yield
    torch.cuda.set_device(before)


def limit_threads(count: int, teams: int = 1) -> tuple[list[str], list[str]]:
    """Limits the threads that PyTorch computes with, where the user has not set them. Possible at any time.

    Args:
        count: how many threads.
        teams: not needed: each of the user's threads has threads of its own.

    Returns:
        What was set, and what could not be.
    """
    if "OMP_NUM_THREADS" in os.environ:  # PyTorch has read it
        return [], []
    torch.set_num_threads(count)
    return [f"{count} torch threads"], []


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()  # type: ignore[untyped-decorator]
def reduce(plan: Any, tensors: Sequence[Any], weight: Any = None, active: Any = None) -> list[torch.Tensor]:
    """Reduces the tensors of a plan over the ranks of its team.

    Collective. Inside `torch.compile` the compiled program is left for it.

    Args:
        plan: the `Plan` of these tensors.
        tensors: one tensor for each of the plan's, in its order, of the same shape and dtype.
        weight: this rank's weight in a weighted mean, a number or a scalar tensor. Defaults to 1.
        active: `None`, or a scalar bool tensor, the same on all ranks: if false, nothing is communicated and the
            tensors are returned unchanged.

    Returns:
        The reduced tensors, in the plan's order.
    """
    # Nothing is started before everything is checked: a plan that is started in part can never be completed.
    tensors = [_checked(x, spec) for x, spec in zip(tensors, plan.tensors, strict=True)]
    if active is not None and not bool(active):
        return tensors
    weight = number_of(weight)
    if plan.device is not None:
        return list(tensors) if plan.is_idle else _reduce_on(plan, tensors, weight)
    copies = [x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for x in tensors]
    for index, copy in enumerate(copies):
        plan.start_at(index, copy.data_ptr(), copy.nbytes, weight)
    plan.wait_all()
    return [copy.to(x.device) for copy, x in zip(copies, tensors, strict=True)]


def _reduce_on(plan: Any, tensors: Sequence[torch.Tensor], weight: float) -> list[torch.Tensor]:
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
    stream = stream_of(plan.device)
    plan.kept = plan.kept, copies  # an interrupt between two starts leaves them to the engine, until the plan ends
    for index, copy in enumerate(copies):
        plan.start_on(index, copy.data_ptr(), copy.nbytes, weight, stream)
    plan.wait_on(stream)
    plan.kept = None
    return copies


def turn(plan: Any, tensors: Sequence[Any], weight: Any = None, active: Any = None) -> tuple[list[torch.Tensor], int]:
    """The same for a pipelined plan.

    Returns:
        What the first update of this step applies, and how many updates it makes: 0, 1 or 2; 0 too if `active` is
        false.
    """
    reduced = reduce(plan, tensors, weight, active)
    return reduced, plan.updates() if active is None or bool(active) else 0


def repeat(plan: Any, updates: int, reduced: Sequence[Any], update: Callable[[list[Any]], None]) -> None:
    """Make the updates of a step: call `update` with what each applies. Collective."""
    for number in range(updates):
        if number > 0 and plan.device is not None:
            reduced = [torch.empty_like(x) for x in reduced]
            plan.second_on([x.data_ptr() for x in reduced], stream_of(plan.device))
        elif number > 0:
            copies = [torch.empty_like(x, device="cpu") for x in reduced]
            for index, copy in enumerate(copies):
                plan.second(index, bytes_of(copy))
            reduced = [copy.to(x.device) for copy, x in zip(copies, reduced, strict=True)]
        update(list(reduced))


@torch.no_grad()  # type: ignore[untyped-decorator]
def allreduce(team: Any, x: Any, op: str, what: str) -> torch.Tensor:
    """Reduce a tensor over the ranks of a team. Collective.

    Args:
        team: the `Team`.
        x: float16, bfloat16, float32, float64, int32 or int64.
        op: "mean", "sum", "min", "max" or "product".
        what: a name of the call, the same on all ranks.
    """
    if (device := device_of([x])) >= 0:
        result = x.detach().clone(memory_format=torch.contiguous_format)
        name = str(x.dtype).removeprefix("torch.")
        team.allreduce_on(device, result.data_ptr(), result.shape, name, op, what, stream_of(device))
        return result
    copy = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    team.allreduce(view(copy), op, what)
    return copy.to(x.device)


def mark(name: str) -> None:
    """Put a name with the time of now into PyTorch's profile, if one is being made."""
    if torch.autograd._profiler_enabled():
        with torch.profiler.record_function(name):
            pass


def in_program() -> bool:
    """Return False: what `torch.compile` compiles is left for every reduction."""
    return False


def code_is_compiled() -> bool:
    """Return whether `torch.compile` reads the code that asks."""
    return bool(torch.compiler.is_compiling())


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs as it is where `torch.compile` compiles its caller."""
    wrapped: Callable[..., Any] = torch.compiler.disable(function)
    return wrapped


class _Differentiable(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, reduced: Callable[[Any], Any], gradient: Any, keeps: bool, x: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        y: torch.Tensor = reduced(x)
        if keeps:
            ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        return None, None, None, ctx.gradient(*upstream, ctx.saved_tensors or None)


def differentiable(
    reduced: Callable[[Any], Any], gradient: Callable[[Any, Any], Any], keeps: bool, x: Any
) -> torch.Tensor:
    """Return `reduced(x)`, with a gradient: `gradient(upstream, values)`, where `values` are x and the result.

    Only if `keeps`, else None.
    """
    y: torch.Tensor = _Differentiable.apply(reduced, gradient, keeps, x)
    return y


def wants_gradient(x: Any) -> bool:
    """Return whether what is computed from `x` is recorded."""
    return torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad


def state_of(x: Any) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module of PyTorch, to be changed in place; empty for something else."""
    return list(x.state_dict(keep_vars=True).values()) if isinstance(x, torch.nn.Module) else []


@torch.no_grad()  # type: ignore[untyped-decorator]
def copy_to(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Give a tensor NumPy's values."""
    tensor.copy_(from_numpy(array, tensor))


def is_traced(x: Any) -> bool:
    """Return False: what `torch.compile` compiles is left for every reduction, which so always sees values."""
    return False


def view(x: Any) -> np.ndarray:
    """Return the value of a tensor or variable, to be read at once."""
    value = torch.as_tensor(getattr(x, "value", x)).detach().to_dense().cpu()
    if value.dtype == torch.bfloat16:
        words: np.ndarray = value.contiguous().view(torch.int16).numpy()
        return words.view(ml_dtypes.bfloat16)
    array: np.ndarray = value.numpy()
    return array


def to_numpy(x: Any) -> np.ndarray:
    """Return a copy of the value of a tensor or variable."""
    return np.array(view(x))


@torch.no_grad()  # type: ignore[untyped-decorator]
def assign(variable: Any, value: np.ndarray) -> None:
    """Set a variable."""
    variable.assign(value)


def _checked(x: Any, spec: Any) -> torch.Tensor:
    x = tensor_of(x)
    if x.dtype != dtype_of(spec.dtype) or tuple(x.shape) != tuple(spec.shape):
        raise spec.misfit(x.shape, str(x.dtype).removeprefix("torch."))
    return x


def outside_programs() -> contextlib.AbstractContextManager[Any]:
    """Return a context without gradients: PyTorch runs what it is given."""
    context: contextlib.AbstractContextManager[Any] = torch.no_grad()
    return context


def check_when_run(check: Callable[..., None], *values: Any) -> None:
    """Call `check` with NumPy arrays of the tensors `values`: PyTorch runs what it is given."""
    check(*map(to_numpy, values))
