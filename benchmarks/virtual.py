# SPDX-License-Identifier: Apache-2.0
"""What `init(virtual_ranks=)` costs where each rank has one part: steps of `fit` with and without it, in turns.

`OMP_NUM_THREADS=1 mpiexec -n 2 python -m benchmarks.virtual --backend torch` prints medians of the slowest rank. Every
rank has one thread in both cases, as virtual ranks have by default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import turns

MODELS = ("lenet", "resnet50", "mlp")
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "NPROC")


def measure(model: str, steps: int, rounds: int) -> dict[str, Any]:
    """Trains a network plainly and with virtual ranks, in turns, each in a job of its own. Collective.

    Args:
        model: its name in `examples.cnn.networks`.
        steps: of each turn that are timed.
        rounds: turns of each.

    Returns:
        Milliseconds of a step, medians of turns, of the slowest rank, and their ratio.
    """
    found = turns.in_turns(lambda virtual: _train(virtual, model, steps), rounds)
    plain, parts = (1e3 * statistics.median(found[virtual]) for virtual in (False, True))
    return {"plain_ms": round(plain, 2), "virtual_ms": round(parts, 2), "ratio": round(parts / plain, 3)}


def _train(virtual: bool, name: str, steps: int) -> float:
    import keras
    from mpi4py import MPI

    import keras_hpc
    from examples.cnn.networks import NETWORKS

    keras_hpc.init(virtual_ranks=MPI.COMM_WORLD.size if virtual else None)
    keras.utils.set_random_seed(1)
    network = NETWORKS[name]
    model = network.build(network.shape, network.classes)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rng = np.random.default_rng(0)

    def train(steps: int) -> float:
        count = network.batch_size * keras_hpc.size() * steps
        x = rng.normal(size=(count, *network.shape)).astype("float32")
        # Not classes that it learns: PyTorch takes ten times as long for gradients below 2^-126.
        y = rng.integers(0, network.classes, count).astype("int32")
        keras_hpc.barrier()
        begin = time.perf_counter()
        model.fit(x, y, network.batch_size, verbose=0, shuffle=False)
        for variable in model.trainable_variables:  # JAX goes on before they are there
            keras.ops.convert_to_numpy(variable)
        return time.perf_counter() - begin

    train(3)
    # A difference takes away what an epoch costs besides its steps.
    taken = float(keras_hpc.allreduce(train(2 * steps) - train(steps), op="max")) / steps
    keras_hpc.finalize()
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"), default="torch", help="(default: torch)")
    parser.add_argument("--model", choices=MODELS, default="lenet", help="(default: lenet)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed, of a turn (default: 20)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="turns of each kind (default: 4)")
    arguments = parser.parse_args()
    os.environ["KERAS_BACKEND"] = arguments.backend
    for name in _THREADS:
        os.environ.setdefault(name, "1")
    row: dict[str, Any] = {"backend": arguments.backend, "model": arguments.model}
    turns.write(row | measure(arguments.model, arguments.steps, arguments.rounds))


if __name__ == "__main__":
    main()
