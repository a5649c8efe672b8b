# SPDX-License-Identifier: Apache-2.0
"""JAX: pieces of variables, which each rank updates in variables of their own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_hpc.backends import jax_chain

# What no result of a program needs JAX leaves out, on this rank alone.
LEAVES_OUT_UNUSED = True


def _elements(variable: Any, piece: Any) -> jax.Array:
    value = jnp.asarray(variable.value)
    if value.shape == piece.shape:
        return value
    return value.reshape(-1)[piece.start : piece.stop].reshape(piece.shape)


def load_piece(stand_in: Any, variable: Any, piece: Any) -> None:
    """Give a stand-in the values of a piece of a variable."""
    stand_in.assign(_elements(variable, piece))


def let_go(stand_in: Any) -> None:
    """Free the memory of a stand-in, until `load_piece`."""
    if 0 not in stand_in.shape:
        stand_in._value, stand_in._initializer = None, keras.initializers.Zeros()


def piece_to_give(variable: Any, stand_in: Any, piece: Any) -> jax.Array:
    """Return a piece that this rank has updated."""
    value: jax.Array = stand_in.value
    return value


def piece_to_get(variable: Any, piece: Any, kept: bool) -> jax.Array:
    """Return memory for a piece that another rank has updated; with `kept`, it holds what the variable does.

    Of a whole variable it is the variable's own: XLA puts the new values there, and has neither to make memory nor to
    copy them.
    """
    whole = tuple(variable.shape) == piece.shape
    return _elements(variable, piece) if kept or whole else jnp.zeros(piece.shape, variable.dtype)


def put_pieces(variable: Any, pieces: Sequence[jax.Array]) -> None:
    """Give a variable the values of all its pieces."""
    value = pieces[0] if len(pieces) == 1 else jnp.concatenate([piece.reshape(-1) for piece in pieces])
    variable.assign(value.reshape(variable.shape))


def opaque(tensor: Any) -> jax.Array:
    """Return a tensor of which XLA does not know how it was computed."""
    found: jax.Array = jax.lax.optimization_barrier(jnp.asarray(tensor))
    return found


def wait_for_branches(values: Sequence[jax.Array]) -> None:
    """Let the next plan of a program wait for a `lax.cond` that has returned these values, of which one is new."""
    jax_chain.note(values, weights=True)
