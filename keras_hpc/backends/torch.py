# SPDX-License-Identifier: Apache-2.0
"""PyTorch: tensors are started and awaited where Python is; gradients live in memory that the ranks of a node share."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

# Start and wait can do the work themselves.
NEEDS_THREAD = False


def load() -> None:
    """Do nothing: PyTorch's tensors lend their memory to NumPy, and so to the engine."""


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
    weight = _number(weight)
    copies = [x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for x in tensors]
    for index, copy in enumerate(copies):
        plan.start_at(index, copy.data_ptr(), copy.nbytes, weight)
    plan.wait_all()
    return [copy.to(x.device) for copy, x in zip(copies, tensors, strict=True)]


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
        if number > 0:
            copies = [torch.empty_like(x, device="cpu") for x in reduced]
            for index, copy in enumerate(copies):
                plan.second(index, _bytes(copy))
            reduced = [copy.to(x.device) for copy, x in zip(copies, reduced, strict=True)]
        update(list(reduced))


class Gradients:
    """The gradients of a plan made with `in_segment=True`: each comes as soon as it is known, or not at all.

    The plan's last tensor says which of the others a rank gave. So all ranks learn what none of them has, and what only
    some have is zero on the others, as on one rank that computes the batches of all.

    Args:
        plan: one tensor for each gradient, and one of float32 with a number for each gradient.
    """

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        gradients = plan.tensors[:-1]
        self._expected = [(_dtype(spec.dtype), torch.Size(spec.shape)) for spec in gradients]
        self._views = [from_numpy(plan.array(index), torch.empty(0)) for index in range(len(gradients))]
        self._came = plan.array(len(gradients))
        self._given: dict[int, torch.Tensor] = {}

    @property
    def begun(self) -> bool:
        """Whether some of a step's gradients were given and not reduced."""
        return bool(self._given)

    def give(self, index: int, gradient: torch.Tensor, weight: Any) -> torch.Tensor:
        """Start the reduction of a gradient.

        Args:
            index: its number in the plan.
            gradient: this rank's.
            weight: this rank's in the mean, the same for all gradients of a step; None if every rank counts alike.

        Returns:
            The tensor that will hold the mean: in the plan's memory, or, on another device, `gradient` itself.

        Raises:
            RuntimeError: it was given in this step already.
            ValueError: it does not fit the plan.
        """
        if index in self._given:
            raise RuntimeError(
                "A gradient came twice in one step, while the first was being averaged. Expected one backward pass in "
                "Keras' own train_step; with several, write a train_step of your own. Received: "
                f"`{self.plan.tensors[index].name}`"
            )
        self._check(index, gradient)
        view = self._views[index]
        memory = view
        if gradient.is_cpu and gradient.layout is torch.strided and gradient.is_contiguous():
            memory = gradient  # the engine copies large ones faster than PyTorch
        else:
            with torch.no_grad():
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self._given[index] = given = view if gradient.is_cpu else gradient
        self._start(index, weight, memory)
        return given

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def reduce(self, gradients: Sequence[torch.Tensor | None], weight: Any) -> list[torch.Tensor | None]:
        """Give the gradients that were not given yet, and wait for all means. Collective.

        Args:
            gradients: one for each of the plan's, in its order, or None.
            weight: as in `give`.

        Returns:
            For each gradient its mean, or None if no rank has it. On a CPU they lie in the plan's memory, until the
            next step's gradients come.

        Raises:
            RuntimeError: another rank's step has failed.
        """
        missing = {i: _tensor(g) for i, g in enumerate(gradients) if g is not None and i not in self._given}
        for index, gradient in missing.items():  # before any is started
            self._check(index, gradient)
        for index, gradient in missing.items():
            self.give(index, gradient, weight)
        given = self._complete(weight, 1.0)
        if np.isnan(self._came).any():
            raise RuntimeError(
                "Another rank has left this training step with an exception, so its gradients are not known. That "
                "rank's own message says why."
            )
        means: list[torch.Tensor | None] = []
        for index, (view, came) in enumerate(zip(self._views, self._came.tolist(), strict=True)):
            own = given.get(index, view)
            means.append(None if came == 0 else own if own is view else own.copy_(view))
        return means

    def abandon(self, weight: Any) -> None:
        """Completes a step that failed after some gradients were given, so that the next one can begin. Collective.

        Ranks whose own step has not failed raise an error in `reduce`.
        """
        self._complete(weight, float("nan"))

    def _complete(self, weight: Any, flag: float) -> dict[int, torch.Tensor]:
        given, self._given = self._given, {}
        self._came[:] = 0.0
        self._came[list(given)] = flag
        if len(given) < len(self._views):
            for index, view in enumerate(self._views):
                if index not in given:
                    view.zero_()
                    self._start(index, weight, view)
        self.plan.start(len(self._views), self._came, _number(weight))
        self.plan.wait_all()
        return given

    def _check(self, index: int, gradient: torch.Tensor) -> None:
        if (gradient.dtype, gradient.shape) != self._expected[index]:
            raise self.plan.tensors[index].misfit(gradient.shape, str(gradient.dtype).removeprefix("torch."))

    def _start(self, index: int, weight: Any, memory: torch.Tensor) -> None:
        self.plan.start_at(index, memory.data_ptr(), memory.nbytes, _number(weight))


def gradients_of(plan: Any) -> Gradients:
    """Return the gradients of a plan: the same object at every call."""
    if plan.kept is None:
        plan.kept = Gradients(plan)
    gradients: Gradients = plan.kept
    return gradients


@torch.no_grad()  # type: ignore[untyped-decorator]
def allreduce(team: Any, x: Any, op: str, what: str) -> torch.Tensor:
    """Reduce a tensor over the ranks of a team. Collective.

    Args:
        team: the `Team`.
        x: float16, bfloat16, float32, float64, int32 or int64.
        op: "mean", "sum", "min", "max" or "product".
        what: a name of the call, the same on all ranks.
    """
    copy = x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    team.allreduce(view(copy), op, what)
    return copy.to(x.device)


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


def from_numpy(array: np.ndarray, like: Any) -> torch.Tensor:
    """Return a tensor with NumPy's memory where that is possible, on the device of `like`."""
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    return tensor.to(like.device)


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
    value = torch.as_tensor(getattr(x, "value", x)).detach().cpu()
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


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(getattr(x, "value", x))


def _number(weight: Any) -> float:
    return 1.0 if weight is None else float(weight)


def _checked(x: Any, spec: Any) -> torch.Tensor:
    x = _tensor(x)
    if x.dtype != _dtype(spec.dtype) or tuple(x.shape) != tuple(spec.shape):
        raise spec.misfit(x.shape, str(x.dtype).removeprefix("torch."))
    return x


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _bytes(x: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor, not a copy."""
    flat = x.as_strided((x.numel(),), (1,))  # a single element may have any stride
    memory: np.ndarray = flat.view(torch.uint8).numpy()
    return memory


def check_when_run(check: Callable[..., None], *values: Any) -> None:
    """Call `check` with NumPy arrays of the tensors `values`: PyTorch runs what it is given."""
    check(*map(to_numpy, values))
