# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: exchanges of rows with other ranks, one operation each, with gradients.

TensorFlow runs stateful operations in the order in which they were made. Backward that is the tape's order, which goes
by the graph: so each exchange takes a token of the one before, and the tape visits them in the reverse order.
"""

from collections.abc import Sequence
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


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def with_borders(
    operation: Any,
    made: Any,
    axis: int,
    blocks: Any,
    order: Any,
    x: Any,
    kernel: Any,
    own: Any,
    others: Any,
    begins: Any,
) -> tf.Tensor:
    """Return a convolution of this rank's rows, with what rows of other ranks add to it. Collective, as its gradient.

    Args:
        operation: `KhpcExchange`, as a function.
        made: the engine's exchange, of only the rows that are sent.
        axis: of the rows.
        blocks: which are sent, [begin, end) for each rank.
        order: has the token of the exchange before, and then of this one.
        x: this rank's rows.
        kernel: of the convolution.
        own: the convolution, `own(x, kernel)`.
        others: `others(received, kernel)` are rows to be added to its output.
        begins: where each of them is added.
    """
    x, sent = _with_rows(x, blocks, axis)
    y = own(x, kernel)
    received = exchange(operation, made, sent, axis, order)
    for begin, rows in zip(begins, others(received, kernel), strict=True):
        y = _add_rows(y, rows, begin, axis)
    return y


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _with_rows(x: tf.Tensor, blocks: Sequence[tuple[int, int]], axis: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a tensor, and blocks of its rows one after the other. Their gradients are added to the tensor's in place.

    Nothing else reads the tensor.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def result(x: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
            at = 0
            for begin, end in blocks:
                block = _rows(rows, at, at + end - begin, axis)
                gradient, at = _added(gradient, block, begin, axis), at + end - begin
            return gradient

        return (tf.identity(x), tf.concat([_rows(x, *rows, axis) for rows in blocks or [(0, 0)]], axis)), backward

    found: tuple[tf.Tensor, tf.Tensor] = result(tf.convert_to_tensor(x))
    return found


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _add_rows(y: tf.Tensor, rows: tf.Tensor, begin: int, axis: int) -> tf.Tensor:
    """Return a tensor to whose rows from `begin` on others are added, in place where nothing else reads it."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def result(y: tf.Tensor, rows: tf.Tensor) -> Any:
        count = rows.shape[axis]
        return _added(y, rows, begin, axis), lambda upstream: (upstream, _rows(upstream, begin, begin + count, axis))

    return result(y, rows)


def _rows(x: tf.Tensor, begin: int, end: int, axis: int) -> tf.Tensor:
    return x[(slice(None),) * axis + (slice(begin, end),)]


def _added(y: tf.Tensor, rows: tf.Tensor, begin: int, axis: int) -> tf.Tensor:
    end = begin + rows.shape[axis]
    value = _rows(y, begin, end, axis) + rows
    others = (1 << axis) - 1  # of these axes everything
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=y, begin=[0] * axis + [begin], end=[0] * axis + [end], strides=[1] * (axis + 1), value=value,
        begin_mask=others, end_mask=others,
    )  # fmt: skip


def after(y: tf.Tensor, order: Any) -> tf.Tensor:
    """Return the tensor: TensorFlow leaves out no stateful operation."""
    return y
