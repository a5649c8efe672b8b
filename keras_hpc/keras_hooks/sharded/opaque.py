# SPDX-License-Identifier: Apache-2.0
"""What an update computes with, hidden from compilers: sharded or whole, they make the same program of an update.

A compiler makes `(lr * scale) * g` of `lr * (scale * g)`, other bits, where it sees that nobody else needs the product.
A sharded update cuts gradients in between, and has fewer variables, perhaps one, that need the learning rate. So in a
job of several ranks no update, whole ones neither, shows how its gradients and its learning rate came about.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_hpc import backends


def install(job: Any, patcher: Any) -> None:
    """Hooks what optimizers do with clipped gradients."""
    # Virtual ranks cannot be sharded, and compute the same on one rank.
    if job.size > 1 and job.virtual is None and keras.backend.backend() != "torch":
        patcher.patch(keras.optimizers.Optimizer, "_backend_update_step", _hidden)


def _hidden(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> Any:
        opaque = backends.current().pieces.opaque
        hidden = [gradient if gradient is None else opaque(gradient) for gradient in grads]
        return original(self, hidden, trainable_variables, opaque(learning_rate))

    return _backend_update_step
