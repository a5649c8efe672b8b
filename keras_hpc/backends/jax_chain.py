# SPDX-License-Identifier: Apache-2.0
"""JAX: the order of the plans in one program.

XLA runs what is independent in an order of its own, mostly one after the other, and in another order where the shapes
are others, as those of a rank that has fewer samples. Two ranks that each wait for a plan that the other one has not
started wait for ever. So plans of a program end in the order in which they were traced, on all ranks alike: each is
complete only after the one before. Starts come when gradients exist, as ever.

A plan that a program has several times, as of a critic that a step updates twice, starts after its own end before: a
gradient that depends on no weight, as that of the last bias in a Wasserstein loss, exists at once. Where that is a
program inside of the program, which is traced once and called several times, it starts after the weights that it
updates, which are made of its own end in the call before.

Where optimizers are sharded, ranks' programs differ: a rank that gives no weights could wait for those of others before
it starts what these wait for. There each plan starts after the one before is complete.

A plan in a program inside of the program, as a branch of `lax.cond`, comes after those before it outside. What is
outside comes after it where it is known to be complete with what that program returns: whoever calls it says so
(`note`). Where weights are gathered, others are refused.
"""

import collections
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import core

from keras_hpc.job import current

_DEPTH = 4  # of programs inside of programs


class _Plan(NamedTuple):
    """The last plan of a program: an element that it has reduced, whether it gathers weights; and all of its plans."""

    trace: Any  # of the program
    result: Any
    weights: bool
    ended: frozenset[int]


class _Last(threading.local):
    def __init__(self) -> None:
        # Of programs that are being made, the one that had a plan last at the end. Nobody says when one is finished.
        self.plans: collections.deque[_Plan] = collections.deque(maxlen=_DEPTH)
        self.weights: tuple[Any, list[jax.Array]] = (None, [])  # the program that updates them, and an element


_last = _Last()


def before() -> list[jax.Array]:
    """Return what the next plan of the program that is being made has to come after: an array, or none.

    Raises:
        RuntimeError: ranks' programs differ, and that is in another program, inside or outside of this one.
    """
    now = core.trace_ctx.trace
    programs = [now, *_around(now)]
    last = _last.plans[-1] if _last.plans else None
    if last is not None and last.weights and last.trace is not now:
        if last.trace in programs or now in _around(last.trace):
            raise RuntimeError(
                "With init(shard_optimizer=True) on JAX the updates of a program have one order on all ranks, which is "
                "not known where one of them is in a branch of lax.cond, a loop or a jax.jit inside of the program, "
                "and another one outside of it. Expected all updates side by side, or "
                "keras.optimizers.LossScaleOptimizer for updates that are skipped; or init(shard_optimizer=False)."
            )
    return [plan.result for plan in reversed(_last.plans) if plan.trace in programs][:1]


def has_ended(plan: int) -> bool:
    """Return whether a plan has been in the program that is being made, or around it, before."""
    now = core.trace_ctx.trace
    programs = [now, *_around(now)]
    return any(plan in last.ended for last in _last.plans if last.trace in programs)


def note(reduced: Sequence[jax.Array], weights: bool = False, plan: int | None = None) -> None:
    """Let the next plan come after the one that has these results.

    Args:
        reduced: of the plan, or of a program with it inside.
        weights: whether it gathers weights.
        plan: its number, where it is one of tensors.
    """
    # XLA forgets where arrays without elements come from. A gradient is not asked for.
    some = next((x for x in reduced if x.size), None)
    if some is None:
        return
    result = jax.lax.stop_gradient(some.reshape(-1)[:1])
    trace = getattr(result, "_trace", core.trace_ctx.trace)  # which of a differentiated program is that around it
    ended = frozenset() if plan is None else frozenset([plan])
    for last in [last for last in _last.plans if last.trace is trace]:
        _last.plans.remove(last)
        ended |= last.ended
    _last.plans.append(_Plan(trace, result, weights and programs_differ(), ended))


def begin_update(weights: Sequence[Any]) -> None:
    """Tell of the weights of an update that is being traced, variables or values, before its gradients are reduced."""
    now = core.trace_ctx.trace
    if any(True for _ in _around(now)):
        some = next((x for x in (getattr(weight, "value", weight) for weight in weights) if x.size), None)
        _last.weights = now, [] if some is None else [jax.lax.stop_gradient(some.reshape(-1)[:1])]


def updated() -> list[jax.Array]:
    """Return what a plan has to start after where its program is inside of another: an array, or none."""
    program, weights = _last.weights
    now = core.trace_ctx.trace
    return weights if program is now or program in _around(now) else []


def programs_differ() -> bool:
    """Return whether ranks have programs of their own."""
    return current.is_initialized() and bool(current.job().shard_optimizer)


def _around(trace: Any) -> Iterator[Any]:
    """Yield the programs inside of which one is made, but for the user's own, which is none."""
    while (trace := getattr(trace, "parent_trace", None)) is not None and not isinstance(trace, core.EvalTrace):
        yield trace
