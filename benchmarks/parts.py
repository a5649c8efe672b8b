# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a training step of a convolutional network on large images, on one rank or in parts.

    python -m benchmarks.parts --size 512
    mpiexec -n 2 python -m benchmarks.parts --size 512 --parts 2
    python -m benchmarks.parts --size 512 --parts 4 --hosts 4 --mbit 2500
    KERAS_BACKEND=jax python -m benchmarks.parts --size 512 --gspmd 2

With --hosts it makes so many hosts of namespaces on this machine, as `make bench-hosts` does, and starts a rank on
each. With --gspmd, one process with so many devices of XLA's on its CPU computes a step of `jax.jit` whose image is
sharded by rows, and XLA's partitioner exchanges the halos. The network is like that for mesh tangling (Dryden et al.,
IPDPS 2019): 18 channels in, 12 convolutions, one number for each of the (size / 64)^2 patches. Each rank computes with
one thread. Memory is what the process needs at most, above what it had when the model and the data were made (and what
making them had freed was given back);
--limit-mib lets it have no more than that. CPU is the time that the process computes in a step, which says more than
the clock where ranks have no cores of their own.
"""

import argparse
import os
import resource
import sys
import time

import numpy as np

from benchmarks import hosted
from keras_hpc.job import launch, resources

os.environ.setdefault("OMP_NUM_THREADS", "1")


def memory(name):
    """A number of this process, in MiB: VmRSS is what it has, VmHWM what it had at most."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def network(size):
    """The model, compiled."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((size, size, 18))
    for stage, filters in enumerate((32, 32, 64, 64, 128, 128)):
        for number in range(2):
            kernel, strides = 5 if stage == 0 else 3, 2 if number == 0 else 1
            x = layers.Conv2D(filters, kernel, strides=strides, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Conv2D(1, 1)(x))
    model.compile(keras.optimizers.SGD(0.01), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def limit_memory(mib):
    """Let this process have so much more memory than it has, and no more."""
    data = int(memory("VmData") * 2**20) + mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))


def sharded_step(model, count, x, y):
    """A training step of `jax.jit` on `count` devices, each with some rows of the image; returns the loss."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:count]), ("rows",))
    everywhere, by_rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), (None, "rows")))
    model.optimizer.build(model.trainable_variables)
    state = [[v.value for v in variables] for variables in (
        model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)]  # fmt: skip

    def loss_of(trainable, non_trainable, x, y):
        outputs, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return model.loss(y, outputs), non_trainable

    @jax.jit
    def step(state, x, y):
        trainable, non_trainable, optimizer = state
        (loss, non_trainable), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, non_trainable, x, y)
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
        return loss, (trainable, non_trainable, optimizer)

    state = jax.device_put(tuple(state), everywhere)
    x, y = jax.device_put(x, by_rows), jax.device_put(y, everywhere)

    def run():
        nonlocal state
        loss, state = step(state, x, y)
        return float(loss)

    return run


def main():
    """Print a line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--parts", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit-mib", type=int)
    parser.add_argument("--keep-memory", action="store_true", help="from step to step, which is faster")
    parser.add_argument("--trace", metavar="FILE", help="for Perfetto, of when which exchange took how long")
    parser.add_argument("--gspmd", type=int, metavar="DEVICES", help="instead of --parts, on JAX")
    parser.add_argument("--hosts", type=int, metavar="N", help="with a rank each (needs root and iproute2)")
    parser.add_argument("--mbit", type=int, default=0, help="bandwidth of a host, each way (default: no limit)")
    arguments = parser.parse_args()
    if arguments.hosts and not launch.ranks_started():
        sys.exit(hosted.start_ranks(1, arguments.hosts, arguments.mbit, sys.argv[1:], "benchmarks.parts"))
    if arguments.gspmd:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.gspmd}"

    import keras

    import keras_hpc

    if not arguments.gspmd:
        keras_hpc.init(spatial=arguments.parts, keep_memory=arguments.keep_memory, trace=arguments.trace)
    model = network(arguments.size)
    part = keras_hpc.part if keras_hpc.is_initialized() else lambda extent, axis=0: (0, extent)
    rows = slice(*part(arguments.size)), slice(*part(arguments.size, axis=1))
    row = (arguments.size, 18)
    x = np.stack([np.random.default_rng(n).random(row, "float32")[rows[1]] for n in range(arguments.size)[rows[0]]])[
        None
    ]
    y = np.ones((1, arguments.size // 64, arguments.size // 64, 1), "float32")
    resources.trim()  # what the data's rows have left would be taken again, and not counted
    before = memory("VmRSS")
    if arguments.limit_mib:
        limit_memory(arguments.limit_mib)
    step = sharded_step(model, arguments.gspmd, x, y) if arguments.gspmd else lambda: float(model.train_on_batch(x, y))
    step()
    seconds, cpu = [], []
    for _ in range(arguments.steps):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = step()
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    sys.stdout.write(  # at once: print writes the end of the line by itself, and lines of ranks mix
        f"{keras.backend.backend()}, {arguments.size} x {arguments.size}, "
        + (f"GSPMD on {arguments.gspmd} devices" if arguments.gspmd else f"parts {arguments.parts}, rank {_rank()}")
        + f": {np.median(seconds):.3f} s a step (least {min(seconds):.3f}; CPU {np.median(cpu):.3f}), "
        f"{memory('VmHWM') - before:.0f} MiB; loss {loss:.5f}\n"
    )
    sys.stdout.flush()


def _rank():
    import keras_hpc

    return keras_hpc.rank()


if __name__ == "__main__":
    main()
