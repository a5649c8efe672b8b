# SPDX-License-Identifier: Apache-2.0
"""Computes a single sample beside one of zeros where PyTorch could not differentiate it alone.

Keras gives PyTorch kernels whose axes are permuted. For one sample PyTorch then takes algorithms that refuse to compute
the gradient of such a kernel ("grad_weight must be contiguous"): in a Conv2D with one filter, if the sample is small,
and in a transposed convolution of one channel. A rank may have a single sample, or zeros in the place of none, where
one rank has more; and a part of a sample is small where all of it is not.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import keras
from keras import layers, ops

_SMALL = 20480  # elements; of a larger sample PyTorch leaves the convolution to oneDNN


def install(job: Any, patcher: Any) -> None:
    """Wrap the layers that PyTorch cannot differentiate for a single sample."""
    if keras.backend.backend() == "torch":
        for cls in (layers.Conv2D, layers.Conv1DTranspose, layers.Conv2DTranspose):
            patcher.patch(cls, "call", _beside_zeros)


def _beside_zeros(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, inputs: Any) -> Any:
        if not _is_refused(self, inputs):
            return original(self, inputs)
        return original(self, ops.concatenate([inputs, ops.zeros_like(inputs)]))[:1]

    return call


def _is_refused(layer: Any, inputs: Any) -> bool:
    """Return whether PyTorch would refuse the gradient of a layer's kernel."""
    import torch

    if inputs.shape[0] != 1 or not torch.is_grad_enabled():
        return False
    if isinstance(layer, layers.Conv2D):
        return bool(layer.filters == 1 and math.prod(inputs.shape) <= _SMALL)
    return bool(inputs.shape[1 if layer.data_format == "channels_first" else -1] == 1)
