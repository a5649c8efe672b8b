# SPDX-License-Identifier: Apache-2.0
"""What a slow network costs a training step: alone, with gradients averaged at every step, and with local steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

_WARM_UP = 2  # steps, at least

Row = dict[str, Any]


def measure(network: str, batch_size: int, every: Sequence[int], overlap: int, steps: int, rounds: int) -> list[Row]:
    """Trains a network of examples.cnn on noise in several ways, in turns. Collective.

    Args:
        network: its name.
        batch_size: of each rank.
        every: periods of local steps.
        overlap: of the longest period, once more, so many steps run while an average is on its way; 0: not.
        steps: timed steps of each way, at least; a whole number of periods.
        rounds: in each of which every way has its turn.

    Returns:
        Of each way, the mean time of a step of the slowest rank, averages included, and by how much more than alone:
        medians of the rounds.
    """
    import keras_hpc

    ways: list[tuple[str, dict[str, Any] | None]] = [("alone", None), ("synchronous", {})]
    ways += [(f"local, every {n}", {"schedule": "local", "every": n}) for n in every]
    if overlap:
        longest = max(every)
        ways.append(
            (f"local, every {longest}, overlapped", {"schedule": "local", "every": longest, "overlap_steps": overlap})
        )
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    for _ in range(rounds):
        for name, schedule in ways:
            keras_hpc.init()
            if schedule:
                keras_hpc.configure_team(0, **schedule)
            period = (schedule or {}).get("every", 1)
            taken, megabytes = _time(network, batch_size, schedule is None, period, -(-steps // period) * period)
            seconds[name].append(taken)
            keras_hpc.finalize()
    alone = statistics.median(seconds["alone"])
    rows: list[Row] = []
    for name, taken_in in seconds.items():
        step = statistics.median(taken_in)
        rows.append({"way": name, "network": network, "batch_size": batch_size, "megabytes": round(megabytes, 2)})
        rows[-1] |= {"step_ms": round(1e3 * step, 1), "over_alone": round(step / alone - 1, 4)}
        rows[-1] |= {"least_ms": round(1e3 * min(taken_in), 1), "most_ms": round(1e3 * max(taken_in), 1)}
    return rows


def table(row: Row) -> str:
    """Returns a row as text."""
    return (
        f"{row['network']}, {row['megabytes']} MB, {row['way']:28} {row['step_ms']:9.1f} ms a step "
        f"({row['least_ms']:.1f} to {row['most_ms']:.1f}), {100 * row['over_alone']:+.1f} %"
    )


def _time(network: str, batch_size: int, alone: bool, period: int, steps: int) -> tuple[float, float]:
    import contextlib

    import keras

    import keras_hpc
    from examples.cnn import networks

    found = networks.NETWORKS[network]
    x, y = networks.data(found.shape, found.classes, batch_size)
    place = keras_hpc.local if alone else contextlib.nullcontext
    with place():
        keras.utils.set_random_seed(1)
        model = found.build(found.shape, found.classes)
        model.compile(
            keras.optimizers.SGD(1e-4, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        for _ in range(-(-_WARM_UP // period) * period):
            model.train_on_batch(x, y)
    keras_hpc.barrier()
    with place():
        begin = time.perf_counter()
        for _ in range(steps):
            model.train_on_batch(x, y)  # returns the loss, so the step is over
        seconds = (time.perf_counter() - begin) / steps
    slowest = float(keras_hpc.allreduce(np.array([seconds]), op="max")[0])
    return slowest, sum(int(np.prod(v.shape)) for v in model.trainable_variables) * 4 / 1e6
