# SPDX-License-Identifier: Apache-2.0
"""JAX: exchanges of rows with other ranks, one call of the engine each, with gradients.

Calls block, so all ranks must make them in one order, and XLA knows none but that of data. So each takes a token of the
one before, and backward the gradient of the token of the one after, which is a zero that only the engine knows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from keras_hpc.backends import shapes_of

TARGET = "khpc_jax_exchange"


def exchange(call: Callable[..., Any], exchange: Any, x: jax.Array, axis: int, order: Any) -> jax.Array:
    """Return this rank's window of an array that is split among the ranks of a group. Collective, and its gradient is.

    Args:
        call: calls a handler of the engine.
        exchange: the engine's exchange.
        x: this rank's rows.
        axis: along which it is split.
        order: has the token of the exchange before, and then of this one.
    """
    number, shapes = exchange.id, shapes_of(exchange, x.shape, axis)

    def run(x: Any, token: Any, adjoint: int) -> tuple[Any, Any]:
        shape = shapes[0 if adjoint else 1]
        results = [core.ShapedArray(shape, x.dtype), core.ShapedArray((), jnp.float32)]
        y, after = call(TARGET, [], [x, token], results, exchange=number, axis=axis, adjoint=adjoint)
        return y, after

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def result(x: Any, token: Any) -> Any:
        return run(x, token, 0)

    def forward(x: Any, token: Any) -> Any:
        y, after = run(x, token, 0)
        return (y, after), after

    def backward(after: Any, upstream: Any) -> Any:
        gradient, token = upstream
        return run(gradient, token + after, 1)

    result.defvjp(forward, backward)
    token = order.token
    y: jax.Array
    y, order.token = result(x, jnp.zeros((), jnp.float32) if token is None else token)
    return y


def after(y: jax.Array, order: Any) -> jax.Array:
    """Return an array that cannot be had before all exchanges so far: so what is backward comes after them, too."""
    return y if order.token is None else jnp.where(order.token < 1, y, jnp.zeros((), y.dtype))
