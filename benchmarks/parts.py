# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a training step of a convolutional network on large images, on one rank or in parts.

    python -m benchmarks.parts --size 512
    mpiexec -n 2 python -m benchmarks.parts --size 512 --parts 2

The network is like that for mesh tangling (Dryden et al., IPDPS 2019): 18 channels in, 12 convolutions, one number for
each of the (size / 64)^2 patches. Each rank computes with one thread. Memory is what the process needs at most, above
what it had when the model and the data were made.
"""

import argparse
import os
import time

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


def main():
    """Print a line for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--parts", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    import keras
    import numpy as np

    import keras_hpc

    keras_hpc.init(spatial=arguments.parts, keep_memory=False)
    model = network(arguments.size)
    rows = slice(*keras_hpc.part(arguments.size)), slice(*keras_hpc.part(arguments.size, axis=1))
    row = (arguments.size, 18)
    x = np.stack([np.random.default_rng(n).random(row, "float32")[rows[1]] for n in range(arguments.size)[rows[0]]])[
        None
    ]
    y = np.ones((1, arguments.size // 64, arguments.size // 64, 1), "float32")
    before = memory("VmRSS")
    model.train_on_batch(x, y)
    seconds = []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        loss = float(model.train_on_batch(x, y))
        seconds.append(time.perf_counter() - begin)
    print(
        f"{keras.backend.backend()}, {arguments.size} x {arguments.size}, parts {arguments.parts}, rank "
        f"{keras_hpc.rank()}: {np.median(seconds):.3f} s a step (least {min(seconds):.3f}), "
        f"{memory('VmHWM') - before:.0f} MiB; loss {loss:.5f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
