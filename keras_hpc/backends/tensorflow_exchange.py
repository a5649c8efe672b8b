# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: exchanges of rows with other ranks, one operation each, with gradients.

TensorFlow runs stateful operations in the order in which they were made. Backward that is the tape's order, which goes
by the graph: so each exchange takes a token of the one before, and the tape visits them in the reverse order.
"""

from typing import Any

import tensorflow as tf

from keras_hpc.backends import shapes_of


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def exchange(operation: Any, exchange: Any, x: tf.Tensor, axis: int, order: Any) -> tf.Tensor:
    """Return this rank's window of a tensor that is split among the ranks of a group. Collective, and its gradient is.

    Args:
        operation: `KhpcExchange`, as a function.
        exchange: the engine's exchange.
        x: this rank's rows.
        axis: along which it is split.
        order: has the token of the exchange before, and then of this one.
    """
    x = tf.convert_to_tensor(x)
    number, shapes = exchange.id, shapes_of(exchange, x.shape.as_list(), axis)

    def run(x: tf.Tensor, token: tf.Tensor, adjoint: int) -> tuple[tf.Tensor, tf.Tensor]:
        y, after = operation(x, token, exchange=number, axis=axis, adjoint=adjoint)
        y.set_shape(shapes[0 if adjoint else 1])
        after.set_shape([])
        return y, after

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def result(x: tf.Tensor, token: tf.Tensor) -> Any:
        return run(x, token, 0), lambda upstream, after: run(upstream, after, 1)

    token = order.token
    y, order.token = result(x, tf.zeros([]) if token is None else token)
    return y


def after(y: tf.Tensor, order: Any) -> tf.Tensor:
    """Return the tensor: TensorFlow leaves out no stateful operation."""
    return y
