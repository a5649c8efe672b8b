# SPDX-License-Identifier: Apache-2.0
"""Computes a single sample beside one of zeros where PyTorch could not differentiate it alone.

Keras gives PyTorch kernels whose axes are permuted. For one sample PyTorch then takes algorithms that refuse to compute
the gradient of such a kernel ("grad_weight must be contiguous"): in a convolution over images with one filter, if the
sample is small, and in a transposed convolution of one channel. A rank may have a single sample, or zeros in the place
of none, where one rank has more; and a part of a sample is small where all of it is not.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import keras

from keras_hpc.keras_hooks import keras_private

_SMALL = 20480  # elements; of a larger sample PyTorch leaves the convolution to oneDNN


def install(job: Any, patcher: Any) -> None:
    """Wrap the functions behind `keras.ops.conv` and its layers, which PyTorch cannot differentiate for one sample."""
    if keras.backend.backend() == "torch":
        functions = keras_private.module(keras_private.TORCH_FUNCTIONS)
        for name, is_refused in (("conv", _is_refused), ("conv_transpose", _is_refused_transposed)):
            patcher.patch(functions, name, functools.partial(_beside_zeros, is_refused))


def _beside_zeros(is_refused: Any, original: Any) -> Any:
    import torch

    @functools.wraps(original)
    def convolve(inputs: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        alone = isinstance(inputs, torch.Tensor) and inputs.shape[0] == 1 and torch.is_grad_enabled()
        if not alone or not is_refused(inputs, kernel):
            return original(inputs, kernel, *args, **kwargs)
        return original(torch.cat([inputs, torch.zeros_like(inputs)]), kernel, *args, **kwargs)[:1]

    return convolve


def _is_refused(inputs: Any, kernel: Any) -> bool:
    """Return whether PyTorch would refuse the gradient of a kernel, (rows, columns, channels, filters)."""
    return len(inputs.shape) == 4 and kernel.shape[-1] == 1 and math.prod(inputs.shape) <= _SMALL


def _is_refused_transposed(inputs: Any, kernel: Any) -> bool:
    """Return the same of a transposed one's kernel, (..., filters, channels)."""
    return len(inputs.shape) < 5 and kernel.shape[-1] == 1
