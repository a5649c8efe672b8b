# SPDX-License-Identifier: Apache-2.0
"""TensorFlow: pieces of variables, which each rank updates in variables of their own."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Calls are made whether or not something needs their results.
LEAVES_OUT_UNUSED = False


def _elements(variable: Any, piece: Any) -> tf.Tensor:
    whole = tf.convert_to_tensor(variable)
    if tuple(whole.shape) == piece.shape:
        return whole
    return tf.reshape(tf.reshape(whole, [-1])[piece.start : piece.stop], piece.shape)


def load_piece(stand_in: Any, variable: Any, piece: Any) -> None:
    """Give a stand-in the values of a piece of a variable."""
    value = tf.ensure_shape(_elements(variable, piece), piece.shape)
    # It may hold nothing, as `let_go` leaves it.
    tf.raw_ops.AssignVariableOp(resource=stand_in.value.handle, value=value, validate_shape=False)


def let_go(stand_in: Any) -> None:
    """Free the memory of a stand-in, until `load_piece`."""
    variable = stand_in.value
    if 0 in variable.shape:
        return
    # Of a shape that is not known where a program is made: the variable's is fixed there, though not where it runs.
    axes = len(variable.shape)
    empty = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0] * axes, variable.dtype), shape=[None] * axes)
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty, validate_shape=False)


def piece_to_give(variable: Any, stand_in: Any, piece: Any) -> tf.Tensor:
    """Return a piece that this rank has updated."""
    return tf.convert_to_tensor(stand_in)


def piece_to_get(variable: Any, piece: Any, kept: bool) -> tf.Tensor:
    """Return memory for a piece that another rank has updated; with `kept`, it holds what the variable does."""
    if kept:
        return _elements(variable, piece)
    return tf.raw_ops.Empty(shape=piece.shape, dtype=variable.dtype)


def put_pieces(variable: Any, pieces: Sequence[tf.Tensor]) -> None:
    """Give a variable the values of all its pieces."""
    value = pieces[0]
    if len(pieces) > 1:
        value = tf.concat([tf.reshape(piece, [-1]) for piece in pieces], axis=0)
    variable.assign(tf.reshape(value, variable.shape))


def rows_of_sparse(gradient: tf.IndexedSlices, piece: Any) -> tf.IndexedSlices:
    """Return the rows of a sparse gradient that lie in a piece of whole rows, or no row without one."""
    if piece is None:
        return tf.zeros([0], gradient.values.dtype)
    row = (piece.stop - piece.start) // piece.shape[0]
    first = tf.cast(piece.start // row, gradient.indices.dtype)
    inside = tf.logical_and(gradient.indices >= first, gradient.indices < first + piece.shape[0])
    return tf.IndexedSlices(
        tf.boolean_mask(gradient.values, inside),
        tf.boolean_mask(gradient.indices, inside) - first,
        tf.constant(piece.shape, gradient.dense_shape.dtype),
    )


def opaque(tensor: Any) -> Any:
    """Return a tensor of which the optimizer of TensorFlow's graphs does not know how it was computed."""
    if hasattr(tensor, "dense_shape"):
        return tf.IndexedSlices(opaque(tensor.values), tensor.indices, tensor.dense_shape)
    tensor = tf.convert_to_tensor(tensor)
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)
