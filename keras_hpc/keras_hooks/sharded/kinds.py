# SPDX-License-Identifier: Apache-2.0
"""Which optimizers can be sharded, and how finely."""

from __future__ import annotations

from typing import Any

import keras

from keras_hpc.keras_hooks import keras_private
from keras_hpc.keras_hooks.state import variables as model_variables

# They update each element by itself, with operations that give the same bits wherever a vector of the processor ends.
# So a variable may be cut anywhere. (Not Ftrl: powers are other bits in vectors than one by one.)
_ELEMENTWISE = {
    getattr(keras.optimizers, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Lion")
}
# What an optimizer of the user's own may not define: it would see some variables only.
_ACROSS_VARIABLES = (
    "apply",
    "apply_gradients",
    "stateless_apply",
    "_backend_apply_gradients",
    "_backend_update_step",
    "_clip_gradients",
)


def cuts(optimizer: Any) -> bool:
    """Return whether an optimizer that `check` has found good updates each element by itself."""
    return _class_of(optimizer) in _ELEMENTWISE


def keeps_nothing(optimizer: Any) -> bool:
    """Return whether an optimizer keeps, or is going to keep, nothing for each variable: SGD without momentum."""
    if _class_of(optimizer) is not keras.optimizers.SGD or optimizer.use_ema:
        return False
    return not (optimizer.momentums if optimizer.built else optimizer.momentum)  # which a callback may change


def check(optimizer: Any) -> None:
    """Raise unless an optimizer can be sharded.

    Raises:
        ValueError: it looks across variables.
    """
    if model_variables.held_optimizers(optimizer) or cuts(optimizer):
        return
    base = keras.optimizers.Optimizer.__mro__
    for cls in type(optimizer).__mro__:
        if cls in base or cls in _ELEMENTWISE or keras_private.is_of_backend(cls):
            continue
        own = [name for name in _ACROSS_VARIABLES if name in vars(cls)]
        if own:
            raise ValueError(
                "init(shard_optimizer=True) updates each variable on one rank. Expected an optimizer that defines "
                f"`update_step` for one variable, and not `{own[0]}`, which sees all of them; or "
                f"init(shard_optimizer=False). Received: {type(optimizer).__name__}"
            )


def _class_of(optimizer: Any) -> type:
    """Return the class that the user has asked for: PyTorch's are subclasses of those."""
    found = (cls for cls in type(optimizer).__mro__ if not keras_private.is_of_backend(cls))
    return next(found)
