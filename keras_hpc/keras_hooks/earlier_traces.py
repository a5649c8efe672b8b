# SPDX-License-Identifier: Apache-2.0
"""Programs that were traced before `init()` hold training steps that know nothing of other ranks."""

from __future__ import annotations

import gc
import sys
from typing import Any

import keras

from keras_hpc.job import current, log
from keras_hpc.keras_hooks import keras_private


def forget(job: Any) -> None:
    """Lets programs be traced anew where that can be done; else says on rank 0 what may not communicate.

    The steps of `fit` need nothing: models make theirs anew.
    """
    if job.size == 1 and not job.delayed and job.virtual is None:
        return
    if keras.backend.backend() == "jax":
        import jax

        jax.clear_caches()
    elif keras.backend.backend() == "torch":
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
    elif job.rank == 0 and not current.had_job() and (steps := _steps_made()):
        log.warning(
            f"An optimizer has made {steps} steps before keras_hpc.init(). If a tf.function of your own contains them, "
            "it was traced without communication and stays so: replicas will differ. Call keras_hpc.init() first, "
            "right after the imports."
        )


def _steps_made() -> int:
    """Return the most steps that an optimizer of this process has made."""
    base = keras_private.get(keras_private.OPTIMIZER)
    # Of the type, as some modules are loaded when they are asked for their class.
    optimizers = [found for found in gc.get_objects() if issubclass(type(found), base)]
    return max((int(optimizer.iterations) for optimizer in optimizers if optimizer.built), default=0)
