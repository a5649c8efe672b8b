# SPDX-License-Identifier: Apache-2.0
"""What the scripts of all peers share: arguments, who this rank is, and the line that compare.py reads."""

import argparse
import json
import os

from examples.cnn.benchmark_rank import WARM_UP, time_steps
from examples.cnn.networks import NETWORKS, data

# As mpiexec of MPICH and of Open MPI, and compare.py itself, tell a rank.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def arguments(doc):
    """Reads the command line: --model, --batch-size of a rank, --steps to time."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", choices=NETWORKS, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser.parse_args()


def rank_and_size():
    """Returns this rank's number and the number of ranks: 0 and 1 without a launcher."""
    number = [next((int(os.environ[name]) for name in names if name in os.environ), None) for names in (_RANK, _SIZE)]
    return number[0] or 0, number[1] or 1


def batches(args):
    """Returns synthetic samples and labels for the timed steps."""
    network = NETWORKS[args.model]
    return data(network.shape, network.classes, args.steps * args.batch_size)


def keras_model(args):
    """Builds and compiles a network of ours, as benchmark_rank.py does."""
    import keras

    network = NETWORKS[args.model]
    keras.utils.set_random_seed(1)
    model = network.build(network.shape, network.classes)
    model.compile(
        optimizer=keras.optimizers.SGD(1e-3, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() == "jax",
    )
    return model


def fit_and_report(model, args, data=None):
    """Trains a compiled model by `fit`, as benchmark_rank.py does, and reports the times of its steps.

    Args:
        model: it.
        args: of the command line.
        data: a function from a number of steps to the arguments of `fit` that give this rank its batches of them;
            None: NumPy arrays.
    """
    x, y = batches(args)

    def arrays(steps):
        samples = steps * args.batch_size
        return {"x": x[:samples], "y": y[:samples], "batch_size": args.batch_size}

    def fit(steps=args.steps):
        model.fit(**(data or arrays)(steps), shuffle=False, verbose=0)

    fit(min(WARM_UP, args.steps))
    fit()
    report(time_steps(model, fit, model.train_function)[0])


def report(seconds):
    """Prints the times of the steps, a list of seconds, for compare.py."""
    rank, _ = rank_and_size()
    line = f"RESULT {rank} {json.dumps([1e3 * s for s in seconds])}\n"
    print(line, end="", flush=True)  # in one piece: the ranks share a file
