# SPDX-License-Identifier: Apache-2.0
"""JAX: exchanges of rows with other ranks, one call of the engine each, with gradients.

Calls block, so all ranks must make them in one order, and XLA knows none but that of data. So each takes a token of the
one before, and backward the gradient of the token of the one after, which is a zero that only the engine knows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from keras_hpc.backends import shapes_of

_Zero = jax.custom_derivatives.SymbolicZero

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
    shapes = shapes_of(exchange, x.shape, axis)

    def run(x: Any, token: Any, adjoint: int) -> tuple[Any, Any]:
        return _run(call, exchange, shapes[0 if adjoint else 1], axis, adjoint, x, token)

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
    y: jax.Array
    y, order.token = result(x, _token(order))
    return y


def _token(order: Any) -> Any:
    return jnp.zeros((), jnp.float32) if order.token is None else order.token


def _run(
    call: Any, exchange: Any, shape: Any, axis: int, adjoint: int, x: Any, token: Any, before: Sequence[Any] = ()
) -> tuple[Any, Any]:
    """Return the result of an exchange, and its token; `before` is what is computed before it."""
    results = [core.ShapedArray(shape, x.dtype), core.ShapedArray((), jnp.float32)]
    y, after = call(TARGET, [], [x, token, *before], results, exchange=exchange.id, axis=axis, adjoint=adjoint)
    return y, after


def with_borders(
    call: Any, made: Any, axis: int, blocks: Any, order: Any, x: Any, kernel: Any, own: Any, others: Any, begins: Any
) -> jax.Array:
    """Return a convolution of this rank's rows, with what rows of other ranks add to it. Collective, as its gradient.

    What is computed between two exchanges is the same on all ranks: XLA orders programs that differ a little in its own
    way, and ranks would wait for each other in turns. So own rows come before an exchange, forward and backward.

    Args:
        call: calls a handler of the engine.
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
    sent = list(x.shape)
    sent[axis] = sum(end - begin for begin, end in blocks)
    shapes = shapes_of(made, sent, axis)

    def computed(x: Any, kernel: Any, token: Any) -> tuple[Any, Any, Any]:
        y = own(x, kernel)
        rows = jnp.concatenate([jax.lax.slice_in_dim(x, *rows, axis=axis) for rows in blocks or [(0, 0)]], axis)
        received, after = _run(call, made, shapes[1], axis, 0, rows, token, [y])
        for begin, added in zip(begins, others(received, kernel), strict=True):
            y = _added(y, added, begin, axis)
        return y, after, received

    @jax.custom_vjp  # type: ignore[untyped-decorator]
    def result(x: Any, kernel: Any, token: Any) -> Any:
        return computed(x, kernel, token)[:2]

    def forward(x: Any, kernel: Any, token: Any) -> Any:
        y, after, received = computed(x.value, kernel.value, token.value)
        # What is no array tells backward by its structure alone which gradients are wanted.
        wanted = {"x": () if x.perturbed else None, "kernel": () if kernel.perturbed else None}
        return (y, after), (x.value, kernel.value, received, after, wanted)

    def backward(saved: Any, upstream: Any) -> Any:
        x, kernel, received, after, wanted = saved
        gradient, token = (jnp.zeros(g.shape, g.dtype) if isinstance(g, _Zero) else g for g in upstream)
        _, of_others = jax.vjp(others, received, kernel)
        sizes = (rows.shape[axis] for rows in jax.eval_shape(others, received, kernel))
        rows = [jax.lax.slice_in_dim(gradient, b, b + n, axis=axis) for b, n in zip(begins, sizes, strict=True)]
        of_received, more = of_others(rows)
        of_x, of_kernel = jax.vjp(own, x, kernel)[1](gradient)
        if wanted["x"] is None:  # on all ranks
            return None, of_kernel + more, token
        before = [of_x] if wanted["kernel"] is None else [of_x, of_kernel]
        of_sent, token = _run(call, made, shapes[0], axis, 1, of_received, token + after, before)
        at = 0
        for begin, end in blocks:
            block = jax.lax.slice_in_dim(of_sent, at, at + end - begin, axis=axis)
            of_x, at = _added(of_x, block, begin, axis), at + end - begin
        if not blocks:  # nothing came, and a call that gives nothing would be left out, on this rank alone
            if wanted["kernel"] is None:
                of_x = _behind(of_x, token)
            else:
                of_kernel = _behind(of_kernel, token)
        return of_x, of_kernel + more, token

    result.defvjp(forward, backward, symbolic_zeros=True)
    y: jax.Array
    y, order.token = result(x, kernel, _token(order))
    return y


def _added(y: Any, rows: Any, begin: int, axis: int) -> Any:
    there = jax.lax.slice_in_dim(y, begin, begin + rows.shape[axis], axis=axis)
    return jax.lax.dynamic_update_slice_in_dim(y, there + rows, begin, axis)


def after(y: jax.Array, order: Any) -> jax.Array:
    """Return an array that cannot be had before all exchanges so far: so what is backward comes after them, too."""
    return y if order.token is None else _behind(y, order.token)


def _behind(y: Any, token: Any) -> Any:
    """Return an array that needs the exchange which gave a token: XLA cannot know that tokens are zeros."""
    return jnp.where(token < 1, y, jnp.zeros((), y.dtype))
