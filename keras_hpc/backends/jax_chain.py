# SPDX-License-Identifier: Apache-2.0
"""JAX: the order of the plans in one program, where ranks have programs of their own.

XLA runs what is independent in an order of its own, mostly one after the other. Where optimizers are sharded, ranks'
programs differ: a rank that gives no weights could wait for those of others before it starts what these wait for. So
there each plan of a program starts after the one before is complete. Weights that a branch of `lax.cond` has gathered
are complete with what the `cond` returns: whoever calls it says so (`note`). Other programs inside of programs are
refused where they gather weights, because their caller is not known.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import core

from keras_hpc.job import current


class _Last(threading.local):
    trace: Any = None  # of the program that is being made
    result: Any = None  # an element that its last plan has reduced
    weights: bool = False  # whether that plan gathers weights


_last = _Last()


def before() -> list[jax.Array]:
    """Return what the next plan of the program that is being made has to wait for: an array, or none.

    Raises:
        RuntimeError: that is in another program, inside or outside of this one.
    """
    trace = core.trace_ctx.trace
    if _last.trace is trace:
        return [_last.result]
    if _last.weights and (trace in _around(_last.trace) or _last.trace in _around(trace)):
        raise RuntimeError(
            "With init(shard_optimizer=True) on JAX the updates of a program have one order on all ranks, which is not "
            "known where one of them is in a branch of lax.cond, a loop or a jax.jit inside of the program, and "
            "another one outside of it. Expected all updates side by side, or keras.optimizers.LossScaleOptimizer for "
            "updates that are skipped; or init(shard_optimizer=False)."
        )
    return []


def note(reduced: Sequence[jax.Array], weights: bool = False) -> None:
    """Let the next plan wait for the one that has these results. Does nothing where ranks' programs are alike.

    Args:
        reduced: of the plan, or of a `lax.cond` with it inside.
        weights: whether it gathers weights.
    """
    if not current.is_initialized() or not current.job().shard_optimizer:
        _last.trace, _last.result, _last.weights = None, None, False
        return
    # XLA forgets where arrays without elements come from.
    some = next((x for x in reduced if x.size), None)
    if some is not None:
        _last.trace, _last.result, _last.weights = core.trace_ctx.trace, some.reshape(-1)[:1], weights


def _around(trace: Any) -> Iterator[Any]:
    """Yield the programs inside of which one is made, but for the user's own, which is none."""
    while (trace := getattr(trace, "parent_trace", None)) is not None and not isinstance(trace, core.EvalTrace):
        yield trace
