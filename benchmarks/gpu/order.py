# SPDX-License-Identifier: Apache-2.0
"""J1: how early XLA schedules the starts of reductions: `python -m benchmarks.gpu.order [mlp] [resnet50]`.

A training step is compiled for an H100, which need not be here: JAX's plugin for CUDA and `ptxas` are enough. A
scheduled program lists its instructions in the order in which they are queued. Of the starts, those before the last
gradient's kernel are the ones that overlap with backward.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import say

_START = "khpc_jax_start_on"


def early(program: str) -> tuple[int, int]:
    """Return how many starts of a scheduled program come before what the last of them reduces exists, and of how many.

    The last start itself is not counted.
    """
    entry = program[program.index("\nENTRY ") :]
    lines = re.findall(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$", entry, re.M)
    place = {name: number for number, (name, _) in enumerate(lines)}
    starts = [number for number, (_, text) in enumerate(lines) if f'custom_call_target="{_START}"' in text]
    if len(starts) < 2:
        return 0, 0
    operands = re.findall(r"%?([\w.-]+)", lines[starts[-1]][1].split("custom-call(")[1].split(")")[0])
    # What gives it a value, behind renamings.
    last = max(_kernel(lines, place, name) for name in operands if name in place)
    return sum(number < last for number in starts[:-1]), len(starts) - 1


def _kernel(lines: list[tuple[str, str]], place: dict[str, int], name: str) -> int:
    while found := re.search(r"\s(?:bitcast|get-tuple-element|copy)\([^%)]*%?([\w.-]+)", lines[place[name]][1]):
        if found[1] not in place:
            break
        name = found[1]
    return place[name]


def need_no_gpu() -> None:
    """Let JAX use its compiler for GPUs without one. Before it starts its backends."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # else the plugin is refused without a driver
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # which would run kernels


def compiled(step: Callable[..., Any], *arguments: Any) -> str:
    """Return the scheduled program that XLA makes of a function for an H100, which need not be here.

    Args:
        step: calls the engine's handlers as on a GPU.
        arguments: their shapes and dtypes.
    """
    import jax
    from jax.experimental import topologies

    from keras_hpc.backends import jax as backend
    from keras_hpc.backends import jax_device, library_path

    library = ctypes.CDLL(library_path("keras_hpc_jax"))
    for name in backend.ON_GPU:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA")
    jax_device._number = 0
    config = Path(__file__).with_name("h100.txtpb").read_text()
    topology = topologies.get_topology_desc("h100", "cuda", target_config=config, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    text: str = jax.jit(step, in_shardings=place, out_shardings=place).lower(*arguments).compile().as_text()
    return text


def step_of(name: str, batch: int = 64) -> tuple[Callable[..., Any], list[Any]]:
    """Return a training step of one of the networks of `fit`, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    from benchmarks.gpu.fit import network
    from keras_hpc.backends import jax as backend

    model, x, _ = network(name, 1)

    def loss(weights: Any, state: Any, x: Any) -> Any:
        outputs, state = model.stateless_call(weights, state, x, training=True)
        return jnp.mean(outputs**2), state

    def step(weights: Any, state: Any, x: Any) -> Any:
        gradients, state = jax.grad(loss, has_aux=True)(weights, state, x)
        means = backend._start_and_done(0, gradients, jnp.float32(len(x)), None)
        return [weight - 0.1 * mean for weight, mean in zip(weights, means, strict=True)], state

    def shapes(arrays: Any) -> list[Any]:
        return [jax.ShapeDtypeStruct(array.shape, "float32") for array in arrays]

    variables = [shapes(model.trainable_variables), shapes(model.non_trainable_variables)]
    return step, [*variables, jax.ShapeDtypeStruct((batch, *x.shape[1:]), "float32")]


def main() -> None:
    """Compile steps, and print what their programs say."""
    need_no_gpu()
    for name in sys.argv[1:] or ["mlp", "resnet50"]:
        step, arguments = step_of(name)
        before, total = early(compiled(step, *arguments))
        part = before / total if total else -0.01
        what = f"{name}: starts before the last gradient's kernel, of {total}"
        say("J1", what, 100 * part, "%", ">= 80", holds=part >= 0.8)


if __name__ == "__main__":
    main()
