# SPDX-License-Identifier: Apache-2.0
"""A network learns which cells of a mesh a flow will turn over, each sample on one rank or on several together.

python -m examples.mesh.train
mpiexec -n 2 python -m examples.mesh.train --parts 2
mpiexec -n 4 python -m examples.mesh.train --parts 2 --network unet

The default is a stack of convolutions with strides, as that for mesh tangling of Dryden et al. (IPDPS 2019), with an
answer for each patch of 4 x 4 cells: is one of them going to be tangled? `--network unet` has an answer for each cell.
Each rank reads its rows of the meshes that meshes.py has written, which the first one calls for if they are missing.
The folder of --out then holds history.csv, summary.json and answers.npz, of some test meshes.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers

import keras_hpc
from examples import tables
from examples.mesh import meshes

TEST = 0.25  # of the meshes


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["stack", "unet"], default="stack")
    parser.add_argument("--parts", type=int, nargs="+", default=[1], help="along rows, and columns (default: 1)")
    parser.add_argument("--size", type=int, default=64, help="cells along each side (default: 64)")
    parser.add_argument("--count", type=int, default=120, help="meshes, a quarter of them for tests (default: 120)")
    parser.add_argument("--filters", type=int, help="of the first convolution (default: 16; unet: 8)")
    parser.add_argument("--depth", type=int, default=2, help="how often the extents are halved (default: 2)")
    parser.add_argument("--batch-size", type=int, default=2, help="meshes of a step of each group (default: 2)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="at first (default: 0.01)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, help="folder of meshes (default: in results/mesh, by size and count)")
    parser.add_argument("--out", type=Path, default=Path("results") / "mesh" / "run")
    return parser.parse_args(argv)


def convolved(x, filters, kernel=3, strides=1):
    """Returns a convolution with BatchNormalization over all ranks' samples, and ReLU."""
    x = layers.Conv2D(filters, kernel, strides=strides, padding="same", use_bias=False)(x)
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9, synchronized=True)(x))


def stack(size, filters, depth):
    """Returns strided stages of two convolutions each, and a probability for each patch of 2^depth x 2^depth cells."""
    inputs = x = keras.Input((size, size, meshes.CHANNELS))
    for stage in range(depth):
        x = convolved(x, filters << stage, 5 if stage == 0 else 3, strides=2)
        x = convolved(x, filters << stage)
    x = convolved(x, filters << depth)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid", dtype="float32")(x))


def unet(size, filters, depth):
    """Returns a UNet, whose way down and way up are joined at each extent: a probability for each cell."""
    inputs = x = keras.Input((size, size, meshes.CHANNELS))
    skips = []
    for stage in range(depth):
        x = convolved(x, filters << stage)
        skips.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = convolved(x, filters << depth)
    for stage in reversed(range(depth)):
        if stage:
            x = layers.Conv2DTranspose(filters << stage, 2, strides=2, padding="same")(x)
        else:
            x = layers.UpSampling2D(2, interpolation="bilinear")(x)
        x = convolved(layers.Concatenate()([skips.pop(), x]), filters << stage)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid", dtype="float32")(x))


class Meshes(keras.utils.PyDataset):
    """This rank's rows of meshes. An epoch takes them in an order that all ranks draw alike.

    Args:
        folder: of images.npy and targets.npy.
        numbers: of the meshes.
        patch: cells along each side of what has one answer.
        batch_size: meshes of a step of one group.
        seed: of the order; None: as they are.
    """

    def __init__(self, folder, numbers, patch, batch_size, seed=None):
        super().__init__()
        self._files = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "targets")]
        self._numbers, self._batch_size, self._seed, self._patch = np.array(numbers), batch_size, seed, patch
        self._epoch = 0
        self._order = self._numbers
        self.on_epoch_end()

    def __len__(self):
        return -(-len(self._numbers) // self._batch_size)

    def __getitem__(self, index):
        numbers = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        images, targets = self._files
        patch, size = self._patch, images.shape[1]
        rows = [slice(*keras_hpc.part(size, axis)) for axis in (0, 1)]
        x = np.stack([images[n, rows[0], rows[1]] for n in numbers])
        begin, end = zip(*(keras_hpc.part(size // patch, axis) for axis in (0, 1)), strict=True)
        rows = [slice(b * patch, e * patch) for b, e in zip(begin, end, strict=True)]
        y = np.stack([targets[n, rows[0], rows[1]] for n in numbers])
        return x, meshes.patches(y, patch).astype("float32")

    def on_epoch_end(self):
        if self._seed is not None:
            self._order = np.random.default_rng([self._seed, self._epoch]).permutation(self._numbers)
            self._epoch += 1


def memory(name):
    """Returns a number of this process, in MiB: VmRSS is what it has, VmHWM what it had at most."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


class Clock(keras.callbacks.Callback):
    """Takes the time of each step of training."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._begin)


def main(argv=None):
    args = arguments(argv)
    keras_hpc.init(spatial=args.parts, keep_memory=False)
    keras.utils.set_random_seed(args.seed)
    folder = args.data or Path("results") / "mesh" / f"{args.count}-of-{args.size}"
    if keras_hpc.rank() == 0 and not (folder / "targets.npy").exists():
        meshes.main(["--size", str(args.size), "--count", str(args.count), "--out", str(folder)])
    keras_hpc.barrier()
    tested = round(TEST * args.count)
    patch = 1 << args.depth if args.network == "stack" else 1
    training = Meshes(folder, range(tested, args.count), patch, args.batch_size, args.seed)
    test = Meshes(folder, range(tested), patch, args.batch_size)

    make, filters = (stack, 16) if args.network == "stack" else (unet, 8)
    model = make(args.size, args.filters or filters, args.depth)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(args.learning_rate, args.epochs * len(training))),
        "binary_crossentropy",
        metrics=["binary_accuracy", keras.metrics.BinaryIoU([1], threshold=0.5, name="iou")],
    )
    if keras_hpc.rank() == 0 and keras_hpc.size() > 1:
        print(keras_hpc.partition(model))
    clock, before = Clock(), memory("VmRSS")
    history = model.fit(training, validation_data=test, epochs=args.epochs, callbacks=[clock], verbose=2).history
    needed = keras_hpc.allgather(np.array([memory("VmHWM") - before]))
    answers = model.predict(test, verbose=0)
    keras_hpc.check_replicas(model)
    summary = {
        "network": args.network,
        "backend": keras.backend.backend(),
        "ranks": keras_hpc.size(),
        "parts": args.parts,
        "size": args.size,
        "seed": args.seed,
        "loss": history["val_loss"][-1],
        "accuracy": history["val_binary_accuracy"][-1],
        "iou": history["val_iou"][-1],
        "seconds of a step": float(np.median(clock.seconds[1:])),
        "MiB": float(needed.max()),
    }
    if keras_hpc.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        epochs = [dict(zip(history, values, strict=True)) for values in zip(*history.values(), strict=True)]
        tables.write(args.out / "history.csv", [{"epoch": i, **line} for i, line in enumerate(epochs, 1)])
        np.savez_compressed(args.out / "answers.npz", answers=answers[:4])
        print(f"{args.network} on {keras_hpc.size()} ranks: test IoU {summary['iou']:.3f}, "
              f"{summary['seconds of a step']:.3f} s a step, {summary['MiB']:.0f} MiB")  # fmt: skip
    return summary


if __name__ == "__main__":
    main()
