# SPDX-License-Identifier: Apache-2.0
"""What recording costs a training step: a job with `init(trace=)` records some steps, and then some not, in turns.

`mpiexec -n 2 python -m benchmarks.traced --model lenet` prints what rank 0 has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def measure(network: str, batch_size: int, steps: int, rounds: int) -> dict[str, Any]:
    """Train a network of examples.cnn on noise. Collective.

    Args:
        network: its name.
        batch_size: of each rank.
        steps: of each turn.
        rounds: turns of each kind.

    Returns:
        Milliseconds of a step without recording and with it, the median of their differences from turn to turn, the
        least and the greatest of these, and bytes that a rank wrote for each recorded step.
    """
    import keras

    import keras_hpc
    from examples.cnn import networks
    from keras_hpc.job import trace

    class _Turns(keras.callbacks.Callback):  # type: ignore[misc]
        """Records in every other turn, and notes the mean seconds of a step in each."""

        def __init__(self, record: Callable[[bool], None], steps: int, taken: dict[bool, list[float]]) -> None:
            super().__init__()
            self.record, self.steps, self.taken, self.on = record, steps, taken, False

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            if batch % self.steps == 0:
                self.on = batch // self.steps % 2 == 1
                self.record(self.on)
                self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch % self.steps == self.steps - 1:
                self.taken[self.on].append((time.perf_counter() - self.begin) / self.steps)

    found = networks.NETWORKS[network]
    with tempfile.TemporaryDirectory() as folder:
        keras_hpc.init(trace=str(Path(folder) / "trace.json"), trace_from="demand", shard=False)
        writer = trace.recording()
        if writer is None:
            raise RuntimeError("init has opened no trace")
        x, y = networks.data(found.shape, found.classes, batch_size)
        model = found.build(found.shape, found.classes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), loss)
        taken: dict[bool, list[float]] = {False: [], True: []}
        turns = _Turns(writer.record, steps, taken)
        # The first turn of each kind compiles.
        data = (np.concatenate([x] * steps * (2 * rounds + 2)), np.concatenate([y] * steps * (2 * rounds + 2)))
        model.fit(*data, batch_size=batch_size, verbose=0, shuffle=False, callbacks=[turns])
        writer.record(False)
        time.sleep(1)  # what was recorded is written twice a second
        written = writer.part.stat().st_size / (steps * (rounds + 1))
        keras_hpc.finalize()
    seconds = {on: values[1:] for on, values in taken.items()}
    more = [1e6 * (b - a) for a, b in zip(seconds[False], seconds[True], strict=True)]
    return {
        "network": network,
        "batch_size": batch_size,
        "step_ms": round(1e3 * statistics.median(seconds[False]), 3),
        "recorded_ms": round(1e3 * statistics.median(seconds[True]), 3),
        "more_us": round(statistics.median(more), 1),
        "least_us": round(min(more), 1),
        "most_us": round(max(more), 1),
        "bytes": round(written),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", choices=("tensorflow", "jax", "torch"), default="tensorflow", help="(default: tensorflow)"
    )
    parser.add_argument("--model", default="lenet", metavar="NAME", help="of examples.cnn (default: lenet)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="of each rank (default: 8)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of a turn (default: 300)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each kind (default: 7)")
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = arguments.backend
    row: dict[str, Any] = {"backend": arguments.backend}
    row |= measure(arguments.model, arguments.batch_size, arguments.steps, arguments.rounds)
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        sys.stdout.write(json.dumps(row | {"ranks": MPI.COMM_WORLD.size}) + "\n")


if __name__ == "__main__":
    main()
