# SPDX-License-Identifier: Apache-2.0
"""What checkpoints cost training: how long a save blocks it, and how much steps slow down while one is written."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_BATCH = 32
_WIDTH = 2048


def measure(nbytes: int, saves: int, folder: Path | None) -> dict[str, Any]:
    """Trains a dense network on noise, saves it the old way and by `callbacks.Checkpoint`, in turns. Collective.

    The old way: the first rank writes all with `numpy.savez` and flushes it to the disk while the others wait.

    Args:
        nbytes: of weights and optimizer together, about.
        saves: of each kind; one more of each comes before, whose times do not count.
        folder: where to write, on a disk; None: the folder for temporary files.

    Returns:
        seconds: medians over the saves, of the slowest rank.
    """
    import keras

    import keras_hpc

    keras.utils.set_random_seed(1)
    per_layer = 3 * 4 * _WIDTH * (_WIDTH + 1)  # float32: weights, and two moments of Adam
    layers = [keras.layers.Dense(_WIDTH, activation="relu") for _ in range(max(1, nbytes // per_layer))]
    model = keras.Sequential([keras.Input((_WIDTH,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = np.random.default_rng(keras_hpc.rank()).normal(size=(_BATCH, _WIDTH)), np.zeros(_BATCH)

    def step() -> None:
        model.train_on_batch(x, y)

    for _ in range(3):
        step()
    variables = [*model.variables, *model.optimizer.variables]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        shared = Path(keras_hpc.broadcast_object(own))
        checkpoint = keras_hpc.callbacks.Checkpoint(shared / "new", keep=1)
        checkpoint.restore(model)  # nothing; as loops begin
        rows = []
        for turn in range(saves + 1):
            begin = time.perf_counter()
            _old_way(variables, shared / "old.npz")
            old = _slowest(time.perf_counter() - begin)
            alone = _steps(step, lambda passed: passed >= 4)
            begin = time.perf_counter()
            checkpoint.save(model, step=turn)
            blocking = _slowest(time.perf_counter() - begin)
            written = shared / "new" / f"step-{turn:09d}"
            begin = time.perf_counter()
            beside = _steps(step, lambda _, path=written: path.exists())
            writing = _slowest(time.perf_counter() - begin)
            rows.append((old, blocking, writing, alone, beside))
        checkpoint.wait()
        keras_hpc.barrier()
    first = rows.pop(0)
    old, blocking, writing, alone, beside = (statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "megabytes": round(sum(int(np.prod(v.shape)) * 4 for v in variables) / 1e6),
        "old_ms": round(1e3 * old, 1),
        "first_blocking_ms": round(1e3 * first[1], 1),
        "blocking_ms": round(1e3 * blocking, 1),
        "of_old": round(blocking / old, 4),
        "writing_ms": round(1e3 * writing, 1),
        "step_ms": round(1e3 * alone, 1),
        "step_while_writing_ms": round(1e3 * beside, 1),
        "slow_down": round(beside / alone - 1, 4),
    }


def table(row: dict[str, Any]) -> str:
    """Returns lines for people."""
    return (
        f"{row['megabytes']} MB. The first rank writes, all wait: {row['old_ms']} ms. Checkpoint blocks "
        f"{row['blocking_ms']} ms, {100 * row['of_old']:.1f} % of that (the first time {row['first_blocking_ms']} ms), "
        f"and is written {row['writing_ms']} ms later. A step takes {row['step_ms']} ms, meanwhile "
        f"{row['step_while_writing_ms']} ms: {100 * row['slow_down']:+.1f} %."
    )


def _old_way(variables: list[Any], path: Path) -> None:
    import keras

    import keras_hpc

    if keras_hpc.rank() == 0:
        with path.open("wb") as file:
            arrays = {f"variable{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(variables)}
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
    keras_hpc.barrier()


def _steps(step: Callable[[], None], enough: Callable[[float], bool]) -> float:
    """Makes steps until the first rank has seen enough of them. Returns the mean time of one, of the slowest rank."""
    import keras_hpc

    count, begin = 0, time.perf_counter()
    while True:
        step()
        count += 1
        if keras_hpc.broadcast_object(enough(time.perf_counter() - begin)):
            return _slowest((time.perf_counter() - begin) / count)


def _slowest(seconds: float) -> float:
    import keras_hpc

    return float(keras_hpc.allreduce(seconds, op="max"))
