# SPDX-License-Identifier: Apache-2.0
"""What a gradient costs on its way from a framework to the engine and back: steps of many small ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_hpc import backends
from keras_hpc.job.plan import TensorSpec
from keras_hpc.job.team import Team

BACKENDS = ("tensorflow", "jax", "torch")
Row = dict[str, Any]
Step = Callable[[], object]
_WARM_UP = 10  # steps


def measure(team: Team, backend: str, tensors: int, nbytes: int, steps: int) -> Row:
    """Times a step of the backend that computes small gradients, with and without their reduction. Collective.

    Args:
        team: reduces them.
        backend: of Keras, as KERAS_BACKEND says.
        tensors: gradients of a step.
        nbytes: of each of them.
        steps: timed steps of each kind, in turns.

    Returns:
        `without_us`, a step that only computes them; `step_us`, one that reduces them, too; medians of the slowest
        rank. `per_gradient_us` is their difference by gradient, with what the engine takes.
    """
    specs = [TensorSpec(f"t{i}", (nbytes // 4,), "float32") for i in range(tensors)]
    make = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[backend]
    plain, reducing = make(team, specs)
    together = np.zeros(1, np.float32)
    seconds: dict[Step, list[float]] = {plain: [], reducing: []}
    for number in range(steps + _WARM_UP):
        for step, times in seconds.items():
            team.allreduce(together)
            begin = time.perf_counter()
            step()
            if number >= _WARM_UP:
                times.append(time.perf_counter() - begin)
    medians = np.array([[1e6 * statistics.median(times) for times in seconds.values()]])
    without, whole = team.allgather(medians).max(axis=0).tolist()
    return {
        "backend": backend,
        "tensors": tensors,
        "bytes": nbytes,
        "without_us": round(without, 1),
        "step_us": round(whole, 1),
        "per_gradient_us": round((whole - without) / tensors, 2),
    }


def table(row: Row) -> str:
    """Returns a row as text."""
    return (
        f"{row['backend']}, {row['tensors']} gradients of {row['bytes']:,} bytes: {row['without_us']:.0f} us without "
        f"their reduction, {row['step_us']:.0f} us with it, {row['per_gradient_us']:.2f} us per gradient"
    )


def _tensorflow(team: Team, specs: Sequence[TensorSpec]) -> tuple[Step, Step]:
    import tensorflow as tf

    plan = team.plan("gradients", specs)
    values = [tf.ones(spec.shape) for spec in specs]
    plain = tf.function(lambda: [2.0 * value for value in values])
    reducing = tf.function(lambda: backends.current().reduce(plan, [2.0 * value for value in values]))
    return lambda: plain()[-1].numpy(), lambda: reducing()[-1].numpy()


def _jax(team: Team, specs: Sequence[TensorSpec]) -> tuple[Step, Step]:
    import jax

    plan = team.plan("gradients", specs)
    values = [jax.numpy.ones(spec.shape) for spec in specs]
    plain = jax.jit(lambda values: [2.0 * value for value in values])
    reducing = jax.jit(lambda values: backends.current().reduce(plan, [2.0 * value for value in values]))
    return lambda: jax.block_until_ready(plain(values)), lambda: jax.block_until_ready(reducing(values))


def _torch(team: Team, specs: Sequence[TensorSpec]) -> tuple[Step, Step]:
    import torch

    values = [torch.ones(spec.shape) for spec in specs]
    which = TensorSpec("which came", (len(specs),), "float32")  # as every optimizer's plan has it
    gradients = backends.current().gradients_of(team.plan("gradients", [*specs, which], in_segment=True))

    def reducing() -> None:
        given = [gradients.give(i, 2.0 * value, None) for i, value in enumerate(values)]
        gradients.reduce(given, None)

    return lambda: [2.0 * value for value in values], reducing
