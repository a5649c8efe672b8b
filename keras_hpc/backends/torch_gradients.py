# SPDX-License-Identifier: Apache-2.0
"""PyTorch: the gradients of a plan, which come one by one, on the host or on a GPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from keras_hpc.backends.torch_tensors import (
    dtype_of,
    from_numpy,
    gpu,
    number_of,
    stream_of,
    tensor_of,
    use_on_this_stream,
)


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
        self._expected = [(dtype_of(spec.dtype), torch.Size(spec.shape)) for spec in gradients]
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
        self._given[index] = given = self._start(index, gradient, number_of(weight))
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
        missing = {i: tensor_of(g) for i, g in enumerate(gradients) if g is not None and i not in self._given}
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
        return [
            None if came == 0 else self._mean(index, given.get(index)) for index, came in enumerate(self._came.tolist())
        ]

    def abandon(self, weight: Any) -> None:
        """Completes a step that failed after some gradients were given, so that the next one can begin. Collective.

        Ranks whose own step has not failed raise an error in `reduce`.
        """
        self._complete(weight, float("nan"))

    def _complete(self, weight: Any, flag: float) -> dict[int, torch.Tensor]:
        given, self._given = self._given, {}
        self._came[:] = 0.0
        self._came[list(given)] = flag
        weight = number_of(weight)
        for index in range(len(self._views)) if len(given) < len(self._views) else ():
            if index not in given:
                self._start_zeros(index, weight)
        self._start_flags(weight)
        self._wait()
        return given

    def _check(self, index: int, gradient: torch.Tensor) -> None:
        if (gradient.dtype, gradient.shape) != self._expected[index]:
            raise self.plan.tensors[index].misfit(gradient.shape, str(gradient.dtype).removeprefix("torch."))

    def _start(self, index: int, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        view = self._views[index]
        memory = view
        if gradient.is_cpu and gradient.layout is torch.strided and gradient.is_contiguous():
            memory = gradient  # the engine copies large ones faster than PyTorch
        else:
            with torch.no_grad():
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self.plan.start_at(index, memory.data_ptr(), memory.nbytes, weight)
        return view if gradient.is_cpu else gradient

    def _start_zeros(self, index: int, weight: float) -> None:
        view = self._views[index].zero_()
        self.plan.start_at(index, view.data_ptr(), view.nbytes, weight)

    def _start_flags(self, weight: float) -> None:
        self.plan.start(len(self._views), self._came, weight)

    def _wait(self) -> None:
        self.plan.wait_all()

    def _mean(self, index: int, given: torch.Tensor | None) -> torch.Tensor:
        view = self._views[index]
        return view if given is None or given is view else given.copy_(view)


class DeviceGradients(Gradients):
    """Gradients on a GPU, reduced from there: hooks only queue what is to be done, and means come back in their place.

    A gradient is copied to the host after what its stream has been given so far, while backward goes on. Its tensor is
    held here until the wait: the engine's own streams, of which PyTorch's allocator does not know, read and write it.
    After an error the engine has waited for them, so that it may go.
    """

    def __init__(self, plan: Any) -> None:
        super().__init__(plan)
        self._started_on: dict[int, int] = {}

    def _start(self, index: int, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        with torch.no_grad():
            own = (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()
        # In a hook this is the stream of the gradient's own backward operation.
        self._started_on[index] = stream = stream_of(self.plan.device)
        self.plan.start_on(index, own.data_ptr(), own.nbytes, weight, stream)
        return own

    def _complete(self, weight: Any, flag: float) -> dict[int, torch.Tensor]:
        given, started_on = self._given, self._started_on
        self._started_on = {}
        super()._complete(weight, flag)
        # Now only this thread's stream waits for the copies back. What was made on another one would, once nobody holds
        # it any more, be memory for the next tensor of that other stream at once, which waits for nothing.
        stream = stream_of(self.plan.device)
        for index, own in given.items():
            if started_on[index] != stream:
                use_on_this_stream(own)
        return given

    def _start_zeros(self, index: int, weight: float) -> None:
        self.plan.start_zeros(index, weight)

    def _start_flags(self, weight: float) -> None:
        self.plan.start_beside(len(self._views), self._came, weight)

    def _wait(self) -> None:
        self.plan.wait_on(stream_of(self.plan.device))

    def _mean(self, index: int, given: torch.Tensor | None) -> torch.Tensor:
        return given if given is not None else self._views[index].to(gpu(self.plan.device))


class OwnGradients(Gradients):
    """Gradients of the only rank of a team, on a GPU: they are the means."""

    def _start(self, index: int, gradient: torch.Tensor, weight: float) -> torch.Tensor:
        return gradient

    def _start_zeros(self, index: int, weight: float) -> None:
        pass

    def _start_flags(self, weight: float) -> None:
        pass

    def _wait(self) -> None:
        pass

    def _mean(self, index: int, given: torch.Tensor | None) -> torch.Tensor:
        return self._views[index] if given is None else given


def gradients_of(plan: Any) -> Gradients:
    """Return the gradients of a plan: the same object at every call."""
    if plan.kept is None:
        kind = Gradients if plan.device is None else OwnGradients if plan.is_idle else DeviceGradients
        plan.kept = kind(plan)
    gradients: Gradients = plan.kept
    return gradients
