# SPDX-License-Identifier: Apache-2.0
"""What sharding an optimizer costs and saves: steps of a dense network, whole and sharded, in turns.

`mpiexec -n 2 python -m benchmarks.sharded --backend torch` prints medians of the slowest rank, and bytes of each rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import turns

_BATCH = 32
_LAYERS = 4


def measure(optimizer: str, parameters: int, steps: int, rounds: int) -> dict[str, Any]:
    """Trains a network whole and sharded, in turns, each in a job of its own. Collective.

    Args:
        optimizer: its name, or momentum: SGD with momentum.
        parameters: of the network, about.
        steps: timed ones of each turn; three come before.
        rounds: turns of each.

    Returns:
        Milliseconds of a step, medians over all turns, of the slowest rank; bytes that the optimizer keeps on the rank
        that keeps the most.
    """
    found = turns.in_turns(lambda shard: _train(shard, optimizer, parameters, steps), rounds)
    whole, sharded = (
        1e3 * statistics.median(time for taken, *_ in found[shard] for time in taken) for shard in (False, True)
    )
    (_, whole_bytes, count), (_, sharded_bytes, _) = found[False][-1], found[True][-1]
    return {
        "parameters": count,
        "whole_ms": round(whole, 2),
        "sharded_ms": round(sharded, 2),
        "ratio": round(sharded / whole, 3),
        "whole_bytes": whole_bytes,
        "sharded_bytes": sharded_bytes,
        "kept": round(sharded_bytes / max(whole_bytes, 1), 4),
    }


def _train(shard: bool, optimizer: str, parameters: int, steps: int) -> tuple[list[float], int, int]:
    import keras

    import keras_hpc

    keras_hpc.init(shard_optimizer=shard)
    keras.utils.set_random_seed(1)
    width = round((parameters / _LAYERS) ** 0.5)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(_LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
    model.compile(_optimizer(optimizer), "mse")
    x, y = np.random.default_rng(keras_hpc.rank()).normal(size=(_BATCH, width)), np.zeros(_BATCH)
    for _ in range(3):
        model.train_on_batch(x, y)
    taken = []
    for _ in range(steps):
        keras_hpc.barrier()
        begin = time.perf_counter()
        model.train_on_batch(x, y)
        taken.append(float(keras_hpc.allreduce(time.perf_counter() - begin, op="max")))
    mine = sum(int(np.prod(v.shape)) * 4 for v in model.optimizer.variables)
    kept = int(keras_hpc.allreduce(np.array([mine]), op="max")[0])
    count = model.count_params()
    keras_hpc.finalize()
    return taken, kept, count


def _optimizer(name: str) -> Any:
    import keras

    return keras.optimizers.SGD(0.01, momentum=0.9) if name == "momentum" else name


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"), default="torch", help="(default: torch)")
    parser.add_argument("--optimizer", default="adam", help="its name, or momentum (SGD; default: adam)")
    parser.add_argument("--parameters", type=int, default=50_000_000, metavar="N", help="(default: 50,000,000)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed ones of a turn (default: 10)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="turns of each kind (default: 2)")
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = arguments.backend
    row: dict[str, Any] = {"backend": arguments.backend, "optimizer": arguments.optimizer}
    turns.write(row | measure(arguments.optimizer, arguments.parameters, arguments.steps, arguments.rounds))


if __name__ == "__main__":
    main()
