# SPDX-License-Identifier: Apache-2.0
"""How many samples a step of the user's own has, for functions that were compiled in an earlier step.

`keras_hpc.step(samples=n)` may stand around a compiled function. That is traced once for many steps: with an
`input_signature`, or where batches are padded to one shape and `n` is what a mask leaves. A number of Python would be
that of the step that traced it, and gradients of later steps would have the wrong weight. So TensorFlow reads a
variable when the function runs; JAX, which has none, traces anew for another number.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from keras_hpc import backends
from keras_hpc.job import current

_MANY = 16  # different numbers, each of which JAX compiles for


@contextlib.contextmanager
def counted(samples: Any) -> Iterator[Any]:
    """Context of a step with so many samples. Gives what compiled functions count it by.

    Args:
        samples: of this rank, a number or a scalar tensor; None if ranks count alike.
    """
    import keras

    backend, name = backends.current(), keras.backend.backend()
    if samples is None or name == "torch" or backend.in_program():  # PyTorch counts outside of what it compiles
        yield samples
    elif name == "tensorflow":
        variable = _variable()
        before = variable.numpy()
        variable.assign(float(samples))
        try:
            yield variable
        finally:
            variable.assign(before)
    elif backend.is_traced(samples):
        yield samples
    else:
        with _traced_for(float(samples)):
            yield samples


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Context of what counts samples itself, as `train_on_batch`: on JAX it is not compiled for those of the step."""
    import keras

    if keras.backend.backend() == "jax" and not backends.current().in_program():
        with _jax_context()(None):
            yield
    else:
        yield


class _Variables(threading.local):
    samples: Any = None


_variables = _Variables()
_all: list[Any] = []  # a function may outlive the thread that traced it


def _variable() -> Any:
    """Return this thread's variable, which is 1 outside of steps. TensorFlow only."""
    if _variables.samples is None:
        import tensorflow as tf

        with tf.device("CPU:0"):
            _variables.samples = tf.Variable(1.0, trainable=False, dtype=tf.float64)
        _all.append(_variables.samples)
    return _variables.samples


@functools.cache
def _jax_context() -> Any:
    """Return the context whose value is a part of what JAX keeps compiled functions by."""
    import jax

    if hasattr(jax, "make_user_context"):
        return jax.make_user_context(None)
    from jax.experimental.xla_metadata import set_xla_metadata

    return lambda value: set_xla_metadata() if value is None else set_xla_metadata(keras_hpc_samples=value)


def _traced_for(samples: float) -> Any:
    known = current.job().known.numbers_of_samples
    is_new = samples not in known
    known.add(samples)
    if is_new and len(known) == _MANY:
        current.notice(
            f"keras_hpc.step(samples=...) had {_MANY} different numbers, and JAX compiles for each what is called "
            "inside. It compiles once if the step stands in the compiled function, with a number that this is given"
        )
    return _jax_context()(samples)
