# SPDX-License-Identifier: Apache-2.0
"""JAX: the primitive of an allreduce in a program, whose calls keep their order."""

import functools
from typing import Any

import jax
import jax.extend
import numpy as np
from jax._src import core, dispatch, effects  # as JAX's own callbacks have them
from jax.interpreters import batching, mlir

from keras_hpc.backends import jax_chain
from keras_hpc.backends.jax_device import number_of_gpu

# Handlers; of buffers on the host, and on a GPU.
TARGET, TARGET_ON = "khpc_jax_allreduce", "khpc_jax_allreduce_on"


class _Order(effects.Effect):  # type: ignore[misc]
    """What `allreduce` does beside its result, in program order: JAX hands a token from each call to the next.

    So ranks make their calls in one order by construction, whatever XLA may do first, and however often and when each
    rank traces: nothing is communicated at trace time, and calls need no names. What two ranks call together is
    compared when they do. The order holds in and across compiled functions, in loops, and in the branches of `cond`.
    """

    def __str__(self) -> str:
        return "keras_hpc.allreduce"


_ORDER = _Order()
for _kind in ("ordered", "lowerable", "control_flow_allowed", "custom_derivatives_allowed", "remat_allowed"):
    getattr(effects, f"{_kind}_effects").add_type(_Order)

_allreduce_p = jax.extend.core.Primitive("keras_hpc_allreduce")
_allreduce_p.def_impl(functools.partial(dispatch.apply_primitive, _allreduce_p))
_allreduce_p.def_effectful_abstract_eval(lambda x, *_, **__: (core.ShapedArray(x.shape, x.dtype), {_ORDER}))
# Each element is reduced by itself, so an axis more is an axis more.
batching.primitive_batchers[_allreduce_p] = lambda xs, axes, **options: (_allreduce_p.bind(*xs, **options), axes[0])


def _lower(ctx: Any, x: Any, *earlier: Any, team: int, op: str, what: str) -> Any:
    avals = [ctx.avals_in[0], core.abstract_token]
    target = TARGET if number_of_gpu() is None else TARGET_ON
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases={0: 0})
    token = ctx.tokens_in.get(_ORDER)
    known: dict[str, Any] = {"team": np.int32(team), "op": op, "what": what}
    if (device := number_of_gpu()) is not None:
        known["device"] = np.int32(device)
    given = ctx.replace(avals_in=[*ctx.avals_in, core.abstract_token], avals_out=avals)
    y, token = rule(given, x, *earlier, token, **known)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_ORDER: token})))
    return [y]


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_allreduce_p, _lower, platform=_platform)


def allreduce(x: Any, team: int, op: str, what: str) -> jax.Array:
    """Reduce an array where the program runs; what one rank traces is communicated in its order. Collective then.

    So it is beside the plans of the program: this call comes after those before it, and those after it come later.
    """
    reduced: jax.Array = _allreduce_p.bind(x, *jax_chain.before(), team=team, op=op, what=what)
    jax_chain.note([reduced])
    return reduced
