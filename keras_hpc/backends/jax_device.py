# SPDX-License-Identifier: Apache-2.0
"""JAX on a GPU: which one, and how calls of the engine become part of what XLA queues on it.

XLA:GPU has one order of all that it queues, made when a program is compiled. By default it saves memory, and may put
all starts last. So a start asks to come right behind its gradient, and the wait right before what needs the means.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src import xla_bridge  # the only way to ask whether JAX has started
from jaxlib.mlir import ir

EARLIEST, LATEST = "EARLIEST", "LATEST"
_TYPED_HANDLER = 4  # API_VERSION_TYPED_FFI


_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_number: int | None = None


def number_of_gpu() -> int | None:
    """Return the number of the GPU on which JAX computes, among those that this process sees; None: the CPU."""
    return _number


def sees_gpus() -> bool:
    """Return whether JAX can compute on GPUs here: whether it has its plugin for CUDA, and may use it."""
    platforms = jax.config.jax_platforms or "cuda"
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(map(importlib.util.find_spec, plugins)) and bool({"cuda", "gpu"} & set(platforms.split(",")))


@contextlib.contextmanager
def use_device(device: Any) -> Iterator[None]:
    """Compute on one GPU, or, with None, on the CPU, also where there are GPUs. Before JAX starts its backends.

    Args:
        device: the `Device` of this rank, or None.
    """
    global _number
    limited = False
    if not xla_bridge.backends_are_initialized():  # else `load` looks at what JAX has
        if device is None:
            jax.config.update("jax_platforms", "cpu")
        else:
            jax.config.update("jax_cuda_visible_devices", str(device.ordinal))
            limited = device.ranks > 1 and _MEMORY not in os.environ  # else the first one takes three quarters of it
    if limited:
        os.environ[_MEMORY] = f"{0.8 / device.ranks:.2f}"
    _number = None if device is None else device.ordinal
    yield
    _number = None
    if limited:
        os.environ.pop(_MEMORY, None)


def scheduled(results: Sequence[Any], when: str) -> Sequence[Any]:
    """Return the results of a call of a handler, which XLA is to schedule early or late.

    Only MLIR's dialect `mhlo` can say so: the call is made anew in it, and the one that was made is removed.

    Args:
        results: of a `stablehlo.custom_call` that changes its first operands in place, just made.
        when: `EARLIEST` or `LATEST`.
    """
    call = results[0].owner
    operation = getattr(call, "operation", call)
    names = [getattr(named, "name", named) for named in operation.attributes]  # older ones are pairs
    attributes = {name: operation.attributes[name] for name in names}
    if "mhlo.backend_config" in attributes:  # how `stablehlo` says that it is a call of a typed handler
        attributes["backend_config"] = attributes.pop("mhlo.backend_config")
        attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _TYPED_HANDLER)
    single = len(operation.results) == 1
    changed = len(ir.ArrayAttr(attributes["output_operand_aliases"]))
    aliases = [
        ir.Attribute.parse(
            f"#mhlo.output_operand_alias<output_tuple_indices = [{'' if single else index}], operand_index = {index}, "
            "operand_tuple_indices = []>"
        )
        for index in range(changed)
    ]
    attributes["output_operand_aliases"] = ir.ArrayAttr.get(aliases)
    attributes["custom_call_schedule"] = ir.Attribute.parse(f"#mhlo<custom_call_schedule {when}>")
    made = ir.Operation.create(
        "mhlo.custom_call",
        results=[result.type for result in operation.results],
        operands=list(operation.operands),
        attributes=attributes,
    )
    operation.erase()
    return list(made.results)
