# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: local steps. What a step has to do is known when it runs, so everything but its beginning is a branch."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_hpc.backends import tensorflow as backend


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def begin(plan: Any, samples: Any, gradient: Any) -> tuple[Any, tf.Tensor]:
    """Begin a step of a plan with local steps; see `local_steps`."""
    mode = backend._ops.khpc_local_begin(tf.cast(samples, tf.float64), plan=plan.id)
    mode.set_shape(())
    return gradient, mode


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def set_anchors(plan: Any, mode: Any, due: Any, values: Callable[[], Sequence[Any]]) -> Any:
    """Give the engine the weights before a step's update, if it is due."""

    def take() -> tf.Operation:
        for number, value in enumerate(values()):
            backend._ops.khpc_local_anchor(tf.convert_to_tensor(value), plan=plan.id, tensor=number)
        return tf.no_op()

    tf.cond(due, take, tf.no_op)
    return mode


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def average(plan: Any, due: Any, variables: Sequence[Any]) -> None:
    """Give variables what a plan makes of them, if it is due."""

    def averaged() -> tf.Operation:
        for variable, value in zip(variables, backend.reduce(plan, [v.value for v in variables]), strict=True):
            variable.assign(value)
        return tf.no_op()

    tf.cond(due, averaged, tf.no_op)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def choose(due: Any, average: Callable[[Any], Sequence[Any]], gradients: Sequence[Any]) -> Sequence[Any]:
    """Return the average of gradients, if it is due, or the gradients."""
    kept = [number for number, gradient in enumerate(gradients) if gradient is not None]

    def averaged() -> list[Any]:
        found = average(None)
        return [found[number] for number in kept]

    chosen = list(gradients)
    for number, value in zip(kept, tf.cond(due, averaged, lambda: [gradients[n] for n in kept]), strict=True):
        chosen[number] = value
    return chosen


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def update_if(due: Any, update: Callable[[], None], otherwise: Callable[[], None], kept: Sequence[Any]) -> None:
    """Make an update, if it is due; or `otherwise` something else, which leaves the variables `kept` as they were."""

    def branch(work: Callable[[], None]) -> Callable[[], tf.Operation]:
        def run() -> tf.Operation:
            work()
            return tf.no_op()

        return run

    tf.cond(due, branch(update), branch(otherwise))
