# SPDX-License-Identifier: Apache-2.0
"""What a slow network costs a training step: alone, with gradients averaged at every step, and with local steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_WARM_UP = 2  # steps, at least

Row = dict[str, Any]


def measure(
    network: str, batch_size: int, every: Sequence[int], overlap: int, steps: int, done: Callable[[Row], None]
) -> list[Row]:
    """Trains a network of examples.cnn on noise in several ways, one after the other. Collective.

    Args:
        network: its name.
        batch_size: of each rank.
        every: periods of local steps.
        overlap: of the longest period, once more, so many steps run while an average is on its way; 0: not.
        steps: timed steps of each way, at least; a whole number of periods.
        done: is given each row.

    Returns:
        Of each way, the mean time of a step of the slowest rank, averages included, and by how much more than alone.
    """
    import keras_hpc

    ways: list[tuple[str, dict[str, Any] | None]] = [("alone", None), ("synchronous", {})]
    ways += [(f"local, every {n}", {"schedule": "local", "every": n}) for n in every]
    if overlap:
        longest = max(every)
        ways.append(
            (f"local, every {longest}, overlapped", {"schedule": "local", "every": longest, "overlap_steps": overlap})
        )
    rows: list[Row] = []
    for name, schedule in ways:
        keras_hpc.init()
        if schedule:
            keras_hpc.configure_team(0, **schedule)
        period = (schedule or {}).get("every", 1)
        seconds, megabytes = _time(network, batch_size, schedule is None, period, -(-steps // period) * period)
        rows.append({"way": name, "network": network, "batch_size": batch_size, "step_ms": round(1e3 * seconds, 1)})
        rows[-1]["megabytes"] = round(megabytes, 2)
        rows[-1]["over_alone"] = round(seconds / (rows[0]["step_ms"] / 1e3) - 1, 4)
        done(rows[-1])
        keras_hpc.finalize()
    return rows


def table(row: Row) -> str:
    """Returns a row as text."""
    return (
        f"{row['network']}, {row['megabytes']} MB, {row['way']:28} {row['step_ms']:9.1f} ms a step, "
        f"{100 * row['over_alone']:+.1f} %"
    )


def _time(network: str, batch_size: int, alone: bool, period: int, steps: int) -> tuple[float, float]:
    import contextlib

    import keras

    import keras_hpc
    from examples.cnn import networks

    found = networks.NETWORKS[network]
    x, y = networks.data(found.shape, found.classes, batch_size)
    context = keras_hpc.local() if alone else contextlib.nullcontext()
    with context:
        keras.utils.set_random_seed(1)
        model = found.build(found.shape, found.classes)
        model.compile(
            keras.optimizers.SGD(1e-4, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        for _ in range(-(-_WARM_UP // period) * period):
            model.train_on_batch(x, y)
    keras_hpc.barrier()
    with context:
        begin = time.perf_counter()
        for _ in range(steps):
            model.train_on_batch(x, y)  # returns the loss, so the step is over
        seconds = (time.perf_counter() - begin) / steps
    slowest = float(keras_hpc.allreduce(np.array([seconds]), op="max")[0])
    return slowest, sum(int(np.prod(v.shape)) for v in model.trainable_variables) * 4 / 1e6
