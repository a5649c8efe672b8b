# SPDX-License-Identifier: Apache-2.0
"""The recipe that ResNet-50 is trained by on ImageNet with large batches, on images of your own, or on digits.

python -m examples.resnet50.train
mpiexec -n 2 python -m examples.resnet50.train --global-batch 512
srun ... python -m examples.resnet50.train --data 'imagenet/train-*.h5' --tests 'imagenet/validation-*.h5' --width 64 \
    --classes 1000 --epochs 100 --global-batch 32768 --flip

LARS, whose rate rises for 12 of 100 epochs and falls as a polynomial of degree 2 to a floor; labels that are smoothed;
no decay, and no rate of their own, for biases and BatchNormalization (You et al., 2017; Goyal et al., 2017). Files have
`image`, uint8 (n, size, size, channels), and `label`, (n,); without any, they are made of the 5,000 digits of
examples/cnn. Killed, or stopped by a batch system, it goes on from --checkpoints when it is started again. The folder
of --out then holds history.csv and quality.json.
"""

import argparse
import csv
import json
import os
from pathlib import Path

import numpy as np

from examples import clock
from examples.resnet50.network import resnet50

PEAK, PEAK_BATCH = 40.0, 32768  # of the LARS paper, whose warm-up begins at 0.1; it grows with the root of the batch
BEGIN = 0.1 / PEAK
FLOOR = 1e-3  # of the peak: the last epochs of a rate that falls to 0 teach nothing
WARMUP = 0.12  # of the training
DECAY = 1e-4
SMOOTHING = 0.1
SHIFT = 2 / 28  # of an image's extent, by which it is moved at most


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILES", help="to learn from: HDF5, NumPy or Zarr (default: digits)")
    parser.add_argument("--tests", metavar="FILES", help="to test on; the same kinds")
    parser.add_argument(
        "--digits", type=Path, default=Path("results") / "resnet50", help="folder for those (default: results/resnet50)"
    )
    parser.add_argument("--classes", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--width", type=int, default=8, help="filters of the first convolution; the paper's: 64 (8)")
    parser.add_argument("--global-batch", type=int, default=128, help="images of a step, of all ranks (default: 128)")
    parser.add_argument("--epochs", type=int, default=25, help="the papers': 90 or 100 (default: 25)")
    parser.add_argument("--learning-rate", type=float, help=f"at the peak (default: {PEAK:.0f} sqrt(batch / 32,768))")
    parser.add_argument("--flip", action="store_true", help="also learn from images seen in a mirror")
    parser.add_argument("--stage", type=Path, metavar="FOLDER", help="of the node, for a cache of what is read")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save there, and go on from there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "resnet50" / "run")
    args = parser.parse_args(argv)
    if bool(args.data) != bool(args.tests):
        parser.error(f"Expected --data and --tests, or neither. Received: {args.data}, {args.tests}")
    return args


def rate_of(batch, total, peak=None):
    """Returns the learning rate of each step.

    Args:
        batch: images of a step.
        total: steps of the training.
        peak: its peak; None: that of the paper, by the root of the batch.
    """
    from keras_hpc.schedules import WarmupPolynomial, square_root_scaling

    peak = square_root_scaling(PEAK, batch / PEAK_BATCH) if peak is None else peak
    return WarmupPolynomial(
        peak,
        total_steps=total,
        warmup_steps=round(WARMUP * total),
        initial_learning_rate=BEGIN * peak,
        end_learning_rate=FLOOR * peak,
    )


def statistics_momentum(steps):
    """Returns BatchNormalization's momentum for a training of so many steps: 0.9, or less if they are few."""
    return min(0.9, max(0.0, 1 - 20 / steps))


def prepare(folder):
    """Writes the digits of examples/cnn, unless they are there; returns files to learn from and to test on."""
    from examples.cnn.train import digits

    files = folder / "digits-train.npz", folder / "digits-test.npz"
    for file, (x, y) in zip(files, digits(5000), strict=True) if not files[1].exists() else ():
        folder.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npz")
        np.savez(part, image=np.round(255 * x).astype("uint8"), label=y)
        part.rename(file)
    return files


def model_of(shape, args, momentum):
    """Returns the network, behind layers that move its images at random, and mirror them."""
    import keras
    from keras import layers

    image = x = keras.Input(shape)
    x = layers.Rescaling(1 / 255)(x)
    x = layers.RandomTranslation(SHIFT, SHIFT, fill_mode="constant", interpolation="nearest")(x)
    x = layers.RandomFlip("horizontal")(x) if args.flip else x
    return keras.Model(image, resnet50(shape, args.classes, args.width, momentum)(x))


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_hpc

    keras_hpc.init(batch="global")
    keras.utils.set_random_seed(args.seed)
    files = args.data, args.tests
    if not args.data:
        if keras_hpc.rank() == 0:
            prepare(args.digits)
        keras_hpc.barrier()
        files = prepare(args.digits)
    if args.stage:
        keras_hpc.data.stage(args.stage, limit="20GB")

    def decode(rows):
        return rows["image"], np.eye(args.classes, dtype="float32")[rows["label"]]

    fields = ("image", "label")
    train = keras_hpc.data.Dataset(files[0], args.global_batch, fields=fields, decode=decode, seed=args.seed)
    test = keras_hpc.data.Dataset(files[1], args.global_batch, fields=fields, decode=decode, shuffle=False)
    total = args.epochs * len(train)
    model = model_of(train[0][0].shape[1:], args, statistics_momentum(total))
    model.compile(
        keras_hpc.optimizers.LARS(
            rate_of(args.global_batch, total, args.learning_rate), momentum=0.9, lars_weight_decay=DECAY
        ),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=SMOOTHING),
        metrics=["accuracy"],
    )
    timed = clock.epochs()
    callbacks = [timed]
    if args.checkpoints:
        callbacks.append(keras_hpc.callbacks.Checkpoint(args.checkpoints))
    history = model.fit(train, validation_data=test, epochs=args.epochs, callbacks=callbacks, verbose=2).history
    keras_hpc.check_replicas(model)
    if keras_hpc.rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "history.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(history)
            writer.writerows(zip(*history.values(), strict=True))
        found = {"error": 1 - history["val_accuracy"][-1], "seconds": float(np.median(timed.seconds))}
        (args.out / "quality.json").write_text(json.dumps(found))
        print(f"test error {found['error']:.2%}, {found['seconds']:.1f} s an epoch")


if __name__ == "__main__":
    main()
