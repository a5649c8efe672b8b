# SPDX-License-Identifier: Apache-2.0
"""What benchmark.py starts on each rank: trains a network on synthetic data by `fit`, and times its steps.

Prints one line of JSON on rank 0. Without --distributed it is a plain Keras script, which does not import keras_hpc.
"""

import argparse
import contextlib
import json
import os
import sys
import time

import numpy as np

from examples.cnn.networks import NETWORKS, data

WARM_UP = 3  # steps


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NETWORKS, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--distributed", action="store_true", help="call keras_hpc.init()")
    parser.add_argument("--hooked", action="store_true", help="reduce on one rank, too")
    parser.add_argument("--schedule", choices=["synchronous", "pipelined"], default="synchronous")
    return parser.parse_args(argv)


def time_steps(model, fit, function):
    """Lets `fit` call `function` for each step, and times it.

    Args:
        model: it has been trained before.
        fit: a function without arguments.
        function: in the place of the model's training function.

    Returns:
        seconds of the steps, and between them, two lists.
    """
    begins, ends = [], []

    def timed(*args):
        begins.append(time.perf_counter())
        result = function(*args)
        if "jax" in sys.modules:  # which returns before it has computed
            sys.modules["jax"].block_until_ready(result)
        ends.append(time.perf_counter())
        return result

    original, model.train_function = model.train_function, timed
    fit()
    model.train_function = original
    return np.subtract(ends, begins).tolist(), np.subtract(begins[1:], ends[:-1]).tolist()


def update_seconds(model, repetitions=10):
    """Times the optimizer's update alone, with gradients of zeros, compiled where the backend compiles. Median."""
    import keras

    variables = model.trainable_variables
    backend, optimizer = keras.backend.backend(), model.optimizer
    gradients = [keras.ops.zeros(v.shape, v.dtype) for v in variables]
    if backend == "tensorflow":
        import tensorflow as tf

        run = tf.function(lambda: optimizer.apply(gradients, variables))
    elif backend == "jax":
        import jax

        compiled = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
        state = [[jax.numpy.copy(v.value) for v in some] for some in (optimizer.variables, variables)]

        def run():
            new, state[0] = compiled(state[0], gradients, state[1])
            state[1] = new
            jax.block_until_ready(state)
    else:

        def run():
            optimizer.apply(gradients, variables)

    return _median_seconds(run, repetitions)


def forward_seconds(model, x, y, repetitions=10):
    """Times the forward pass of a training step alone, with its loss, compiled where the backend compiles. Median."""
    import keras

    backend = keras.backend.backend()
    x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)

    def forward(x, y):
        return model.compute_loss(x, y, model(x, training=True), training=True)

    if backend == "tensorflow":
        import tensorflow as tf

        function = tf.function(forward)
    elif backend == "jax":
        import jax

        weights = [[v.value for v in some] for some in (model.trainable_variables, model.non_trainable_variables)]

        @jax.jit
        def compiled(weights, x, y):
            answers, statistics = model.stateless_call(*weights, x, training=True)
            return model.loss(y, answers), statistics

        def function(x, y):
            jax.block_until_ready(compiled(weights, x, y))
    else:
        function = forward
    return _median_seconds(lambda: function(x, y), repetitions)


def _median_seconds(run, repetitions):
    times = []
    for _ in range(repetitions + 2):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]))


def check_seconds(model, repetitions=3):
    """Times a comparison of the ranks' replicas, which `init(check_replicas_every=n)` makes after n steps. Median."""
    import keras_hpc

    times = []
    for _ in range(repetitions + 1):
        keras_hpc.barrier()
        begin = time.perf_counter()
        keras_hpc.check_replicas(model)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))


def measure(args):
    """Returns this rank's measurements, a dictionary of numbers and lists."""
    import keras

    job = None
    if args.distributed:
        import keras_hpc
        from keras_hpc.job import current, meter

        keras_hpc.init(shard=False, teams=1 + args.hooked)  # synthetic: each rank makes its own
        if args.hooked:  # one rank alone reduces only where steps depend on each other: on the team without a model
            keras_hpc.configure_team(1, schedule="pipelined")
        keras_hpc.configure_team(0, schedule=args.schedule)
        job = current.job()
    network = NETWORKS[args.model]
    shape = network.shape_of(args.image_size)
    keras.utils.set_random_seed(1)
    model = network.build(shape, network.classes)
    model.compile(
        optimizer=keras.optimizers.SGD(1e-3, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() == "jax",
    )
    x, y = data(shape, network.classes, args.steps * args.batch_size)

    def fit(samples=None):
        model.fit(x[:samples], y[:samples], batch_size=args.batch_size, shuffle=False, verbose=0)

    fit(WARM_UP * args.batch_size)
    fit()  # as it will be timed: what is still to be compiled or allocated is so now
    team_meter = meter.Meter(job.teams[0]) if job and job.size > 1 else None
    steps, gaps = time_steps(model, fit, model.train_function)
    found = {
        "parameters": int(sum(np.prod(v.shape) for v in model.trainable_variables)),
        "step_ms": [1e3 * s for s in steps],
        "gap_ms": 1e3 * float(np.median(gaps)),
        "draw_ms": 0.0,
        "exposed_ms": 0.0,
        "hidden_ms": 0.0,
    }
    if team_meter is not None:
        figures = team_meter.read()
        found["exposed_ms"] = 1e3 * figures.exposed_seconds / args.steps
        found["hidden_ms"] = max(0.0, 1e3 * figures.wire_seconds / args.steps - found["exposed_ms"])
    if keras.backend.backend() == "tensorflow":  # whose steps draw their batch themselves: once more, without the rest
        drawing, _ = time_steps(model, fit, lambda iterator: (next(iterator), {})[1])
        found["draw_ms"] = 1e3 * float(np.median(drawing))
    batch = x[: args.batch_size], y[: args.batch_size]
    with keras_hpc.local() if job else contextlib.nullcontext():
        found["forward_ms"] = 1e3 * forward_seconds(model, *batch)
        found["update_ms"] = 1e3 * update_seconds(model)
    if job is None:
        return [found]
    found["check_ms"] = 1e3 * check_seconds(model) if job.size > 1 else 0.0
    return job.teams[0].allgather_object(found)


def main(argv=None):
    args = arguments(argv)
    ranks = measure(args)
    import keras

    if not args.distributed or sys.modules["keras_hpc"].rank() == 0:
        package = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}[keras.backend.backend()]
        versions = {"keras": keras.__version__, package: __import__(package).__version__}
        result = {"ranks": ranks, "versions": versions, "pid": os.getpid()}
        print(f"RESULT {json.dumps(result)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
