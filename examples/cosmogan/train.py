# SPDX-License-Identifier: Apache-2.0
"""CosmoGAN: a generator learns to make maps of weak lensing, each network on a team of its own.

mpiexec -n 2 python -m examples.cosmogan.train

Maps come from `maps.py`, made once; others are kept for tests. The folder of --out then holds losses.csv, quality.json
and generated.npz.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path

import numpy as np

from examples import tables
from examples.cosmogan import maps

LATENT = 64
STATISTICS = ("histogram", "spectrum")
REAL = 0.9  # its label of real maps, so that it does not become too sure
FLIPPED = 0.01  # of the discriminator's batches have wrong labels on purpose
AVERAGED = 0.998  # what the generator's average keeps at each step of what it was


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", type=int, default=4096, help="to learn from (default: 4096)")
    parser.add_argument("--tests", type=int, default=512, help="maps that are compared (default: 512)")
    parser.add_argument("--filters", type=int, default=16, help="of the widest level; the paper's: 64 (default: 16)")
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks (default: 32)")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("results") / "cosmogan", help="folder for the maps")
    parser.add_argument("--out", type=Path, default=Path("results") / "cosmogan" / "run")
    return parser.parse_args(argv)


def _convolved(layer, filters):
    import keras

    start = keras.initializers.RandomNormal(stddev=0.02)
    return layer(filters, 5, strides=2, padding="same", kernel_initializer=start)


def _wrapped(images):
    """Returns images with a pixel more on each side, that of the opposite side, as the sky goes on beyond the edge."""
    from keras import ops

    for axis in (1, 2):
        last, first = ops.split(images, [images.shape[axis] - 1], axis)[1], ops.split(images, [1], axis)[0]
        images = ops.concatenate([last, images, first], axis)
    return images


def generator(size, filters, levels, **normalization):
    """Returns the network from noise, (batch, 64), to maps, (batch, size, size, 1); its images grow `levels` times.

    Args:
        size: of the maps.
        filters: of the widest level.
        levels: how many.
        normalization: more of BatchNormalization; `synchronized=True` needs a job, except on TensorFlow.
    """
    import keras
    from keras import layers

    side, most = size // 2**levels, filters * 2 ** (levels - 1)
    noise = keras.Input((LATENT,))
    x = layers.Dense(side * side * most, kernel_initializer=keras.initializers.RandomNormal(stddev=0.02))(noise)
    x = layers.Reshape((side, side, most))(x)
    for level in range(levels - 1, -1, -1):
        x = layers.ReLU()(layers.BatchNormalization(epsilon=1e-5, **normalization)(x))
        wide = filters * 2 ** (level - 1) if level else 1
        x = layers.Cropping2D(2)(_convolved(layers.Conv2DTranspose, wide)(_wrapped(x)))
    return keras.Model(noise, x, name="generator")


def discriminator(size, filters, levels, **normalization):
    """Returns the network from maps to the logit of being real, (batch, 1): the generator's mirror."""
    import keras
    from keras import layers

    model = keras.Sequential([keras.Input((size, size, 1))], name="discriminator")
    for level in range(levels):
        model.add(_convolved(layers.Conv2D, filters * 2**level))
        if level:
            model.add(layers.BatchNormalization(momentum=0.9, epsilon=1e-5, **normalization))
        model.add(layers.LeakyReLU(negative_slope=0.2))
    model.add(layers.Flatten())
    model.add(layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(stddev=0.02)))
    return model


def compiled(rate, filters=16, levels=3):
    """Returns generator, discriminator, and two compiled models, each with a team.

    The first trains the discriminator: from real maps, noise and `turns` to the logits of real and of generated maps.
    The second trains the generator: from noise and `turns` to the logits of generated maps.
    """
    import keras

    import keras_hpc

    make, judge = (network(maps.SIZE, filters, levels, synchronized=True) for network in (generator, discriminator))
    real, noise = keras.Input((maps.SIZE, maps.SIZE, 1)), keras.Input((LATENT,))
    places = keras.Input((maps.SIZE**2,), dtype="int32")
    made = turned(make(noise), places)
    apart = keras.Model([real, noise, places], [judge(real), judge(made)], name="apart")
    both = keras.Model([noise, places], judge(made), name="both")
    for team, (model, learns) in enumerate(((apart, judge), (both, make))):
        average = {"use_ema": True, "ema_momentum": AVERAGED} if learns is make else {}
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate, beta_1=0.5, **average), loss)
        keras_hpc.assign_team(model, team)
        model.optimizer.build(learns.trainable_variables)  # the others are `frozen`
    return make, judge, apart, both


@contextlib.contextmanager
def frozen(model):
    """Inside, the weights of a model stay as they are, but it goes on to normalize over batches.

    With `model.trainable = False` BatchNormalization would take its moving statistics, which tell the generator
    something else than what the discriminator has learnt. Keras looks at it when it traces a step.
    """
    weights = model.trainable_variables
    for variable in weights:
        variable.trainable = False
    try:
        yield
    finally:
        for variable in weights:
            variable.trainable = True


def turns(count, size, rng):
    """Returns ways to move, mirror and transpose maps: of each, where its pixels come from, (count, size * size)."""
    to, signs, swap = rng.integers(0, size, (2, count, 1)), rng.choice((-1, 1), (2, count, 1)), rng.random(count) < 0.5
    down, right = (to + signs * np.arange(size)) % size
    places = down[:, :, None] * size + right[:, None, :]
    return np.where(swap[:, None, None], places.transpose(0, 2, 1), places).reshape(count, -1).astype("int32")


def turned(images, places):
    """Returns maps, (n, size, size, 1), turned by `turns`: the sky has no place, no up."""
    from keras import ops

    pixels = ops.reshape(images, (-1, images.shape[1] * images.shape[2]))
    return ops.reshape(ops.take_along_axis(pixels, places, axis=1), (-1, *images.shape[1:]))


def step(models, real, rng):
    """Trains the discriminator on real and on generated maps, and the generator on the same noise.

    The two kinds come in batches of their own, so that BatchNormalization shows the discriminator how much the maps of
    a batch differ, and in one update. Both are turned at random, so that it cannot know generated ones by a place.
    What is drawn is drawn for the batch of all ranks, so that any number of ranks trains alike.

    Args:
        models: of `compiled`.
        real: maps of this rank, as networks see them; as many on every rank.
        rng: the same on every rank.

    Returns:
        losses of this rank, of discriminator and generator.
    """
    import keras_hpc

    make, judge, apart, both = models
    count, ones = len(real) * keras_hpc.size(), np.ones((len(real), 1), "float32")
    mine = slice(keras_hpc.rank() * len(real), (keras_hpc.rank() + 1) * len(real))
    noise = rng.normal(size=(count, LATENT)).astype("float32")[mine]
    places, others = (turns(count, maps.SIZE, rng)[mine] for _ in range(2))
    real = np.take_along_axis(real.reshape(len(real), -1), others, axis=1).reshape(real.shape)
    labels = (REAL, 0.0) if rng.random() >= FLIPPED else (1 - REAL, 1.0)
    for model in (apart, both):
        model.reset_metrics()
    with frozen(make):
        loss, *_ = apart.train_on_batch([real, noise, places], [label * ones for label in labels])
    with frozen(judge):
        return float(loss), float(both.train_on_batch([noise, places], ones))


def settle(models, rng):
    """Gives the generator its averaged weights, and BatchNormalization the statistics that they make. Collective."""
    import keras

    make, *_, both = models
    both.optimizer.finalize_variable_values(make.trainable_variables)
    for layer in make.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0  # it forgets those of training
    make(rng.normal(size=(2048, LATENT)).astype("float32"), training=True)


def quality(generated, tests):
    """Returns chi squared per bin of the histogram of pixels and of the power spectrum, between maps of convergence."""
    both = (maps.chi2(of(generated), of(tests)) for of in (maps.intensities, maps.powers))
    return dict(zip(STATISTICS, both, strict=True))


def prepare(folder, count, tests):
    """Makes the maps, unless they are there, and returns their files: to learn from, and for tests."""
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"train-{count}.npz", folder / f"test-{tests}.npz"
    for seed, (file, number) in enumerate(zip(files, (count, tests), strict=True)):
        if not file.exists():
            maps.write(file, number, seed)
    return files


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_hpc

    keras_hpc.init(teams=2)
    rank, size = keras_hpc.rank(), keras_hpc.size()
    keras.utils.set_random_seed(args.seed)
    if rank == 0:
        prepare(args.data, args.maps, args.tests)
    keras_hpc.barrier()
    train, test = prepare(args.data, args.maps, args.tests)

    def decode(rows):
        return maps.squeezed(rows["convergence"])

    data = keras_hpc.data.Dataset(
        train, args.batch_size // size, fields=("convergence",), decode=decode, shuffle="all", seed=args.seed
    )
    models = compiled(args.learning_rate, args.filters)
    lines = []
    for epoch in range(args.epochs):
        data.set_epoch(epoch)
        batches = keras_hpc.shard(data)  # dealt to the ranks
        for model in models[2:]:  # the rate falls in the second half
            model.optimizer.learning_rate = args.learning_rate * min(1, 2 * (1 - epoch / args.epochs))
        rng = np.random.default_rng([args.seed, epoch])
        losses = np.mean([step(models, batches[number], rng) for number in range(len(batches))], axis=0)
        losses = keras_hpc.allreduce(losses)
        names = ("discriminator", "generator")
        lines.append({"epoch": epoch + 1, **dict(zip(names, map(float, losses), strict=True))})
        if rank == 0:
            print(", ".join(f"{name} {value:.3f}" for name, value in lines[-1].items()), flush=True)
    settle(models, np.random.default_rng([args.seed, rank, args.epochs]))
    for model in models:
        keras_hpc.check_replicas(model)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        tables.write(args.out / "losses.csv", lines)
        noise = np.random.default_rng(args.seed).normal(size=(args.tests, LATENT)).astype("float32")
        with keras_hpc.local():
            generated = maps.stretched(models[0].predict(noise, verbose=0))
        with np.load(test) as file:
            found = quality(generated, file["convergence"])
        (args.out / "quality.json").write_text(json.dumps(found))
        np.savez_compressed(args.out / "generated.npz", convergence=generated)
        print(", ".join(f"{name} {value:.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
