# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch: their values, memory, devices and streams."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def device_of(tensors: Sequence[Any], pipelined: bool = False) -> int:
    """Return the number of the GPU that has all of these tensors or variables; -1 if there is no such GPU."""
    devices = {tensor_of(x).device for x in tensors if x is not None}
    device = devices.pop() if len(devices) == 1 else None
    return device.index or 0 if device is not None and device.type == "cuda" else -1


def gpu(number: int) -> torch.device:
    """Return a GPU by its number."""
    return torch.device("cuda", number)


def stream_of(device: int) -> int:
    """Return the handle of the stream on which this thread computes on a GPU."""
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


def use_on_this_stream(x: torch.Tensor) -> None:
    """Let PyTorch keep a tensor's memory, when it is freed, until this thread's stream has come to its end of now."""
    x.record_stream(torch.cuda.current_stream(x.device))


def from_numpy(array: np.ndarray, like: Any) -> torch.Tensor:
    """Return a tensor with NumPy's memory where that is possible, on the device of `like`."""
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    return tensor.to(like.device)


def adopt(array: np.ndarray) -> torch.Tensor:
    """Return a tensor with NumPy's memory."""
    return from_numpy(array, torch.empty(0, device="cpu"))


def tensor_of(x: Any) -> torch.Tensor:
    """Return the tensor of a variable, or what is one."""
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(getattr(x, "value", x))


def number_of(weight: Any) -> float:
    """Return a rank's weight as the engine takes it: None is 1."""
    return 1.0 if weight is None else float(weight)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def bytes_of(x: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor, not a copy."""
    flat = x.as_strided((x.numel(),), (1,))  # a single element may have any stride
    memory: np.ndarray = flat.view(torch.uint8).numpy()
    return memory
