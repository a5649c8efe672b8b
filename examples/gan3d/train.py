# SPDX-License-Identifier: Apache-2.0
"""Trains a 3DGAN on showers in a calorimeter, on one rank or on many. Two models, two teams of ranks.

python -m examples.gan3d.train --data showers.h5 --out results/gan3d
mpiexec -n 2 python -m examples.gan3d.train --data showers.h5 --out results/gan3d

The folder of --out then holds checkpoint.npz, generator.weights.h5, discriminator.weights.h5 and losses.csv.
"""

import argparse
import csv
import time
from pathlib import Path

import h5py
import keras
import numpy as np

import keras_hpc
from examples.gan3d import checkpoint, networks

FLIPPED_LABELS = 0.05  # of the discriminator's labels are wrong on purpose, so that it does not become too sure
NOTHING_BELOW_GEV = 1e-6
FIT_EVENTS = 4000
TEST_SHARE = 0.1  # of a file, at its end, is not trained on
COLUMNS = ["epoch", "step", *(f"{who}_{what}" for who in "dg" for what in ("loss", *networks.HEADS))]


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="HDF5 file with ECAL (n,s,s,s) and target (n,2), GeV")
    parser.add_argument("--preset", choices=networks.PRESETS, default="mini", help="size of images (default: mini)")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, help="showers per rank and step (default: the preset's)")
    parser.add_argument("--steps", type=int, help="at most so many steps per epoch, to try things out")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of every rank, not scaled (default: 0.001)")
    for team, name in (("d", "discriminator"), ("g", "generator")):
        parser.add_argument(
            f"--schedule-{team}",
            choices=["synchronous", "pipelined"],
            default="synchronous",
            help=f"pipelined: the {name} takes gradients an update late, so that their way to it costs no time",
        )
    parser.add_argument(
        "--synchronous-epochs", type=int, default=1, help="so many before a pipelined schedule begins (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "gan3d", help="(default: results/gan3d)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser.parse_args(argv)


def training_events(count):
    """Returns how many of a file's showers, from its beginning, are for training."""
    return count - round(TEST_SHARE * count)


def load(path, rank, size):
    """Reads a rank's part of the showers for training, the same number for each rank.

    Args:
        path: HDF5 file with "ECAL" (n, s, s, s), cell energies in GeV, and "target" (n, 2), of which the second column
            is the energy of the primary particle in GeV.
        rank: whose part.
        size: number of ranks.

    Returns:
        images (m, s, s, s, 1) in units of 10 MeV and energies (m,) in units of 100 GeV, both float32.

    Raises:
        ValueError: a shower without energy, which has no relative error.
    """
    with h5py.File(path) as file:
        part = training_events(len(file["ECAL"])) // size
        return scaled(file, rank * part, (rank + 1) * part)


def scaled(file, begin, end):
    """Returns showers of an open file in the networks' units."""
    cells = file["ECAL"][begin:end].astype("float32")
    energies = file["target"][begin:end, 1].astype("float32")
    cells[cells < NOTHING_BELOW_GEV] = 0
    if not (np.all(energies > 0) and np.all(cells.sum(axis=(1, 2, 3)) > 0)):
        raise ValueError(f"Expected showers with energy in them. Received: {file.filename} has some without")
    return cells[..., None] / np.float32(networks.CELL_UNIT_GEV), energies / np.float32(networks.ENERGY_UNIT_GEV)


def response_of(path):
    """Fits what the cells of a shower add up to: a quartic in the energy, times the energy.

    Every rank fits the same first showers of the file, whose order must not depend on their energy.

    Returns:
        a function from energies (n,), units of 100 GeV, to sums (n,), units of 10 MeV; the lowest and highest energy.
    """
    with h5py.File(path) as file:
        images, energies = scaled(file, 0, min(FIT_EVENTS, training_events(len(file["ECAL"]))))
    degree = min(4, len(np.unique(energies)) - 1)
    ratio = np.polynomial.Polynomial.fit(energies, images.sum(axis=(1, 2, 3, 4)) / energies, degree)
    return (lambda y: ratio(y) * y), float(energies.min()), float(energies.max())


class Gan:
    """Generator, discriminator and combined model, compiled, and one training step of all.

    Attributes:
        generator: never trained by itself.
        discriminator: trained on team 0.
        combined: trains the generator, on team 1.
    """

    def __init__(self, preset, response, learning_rate=1e-3):
        self.response, self.low, self.high = response
        self.generator = networks.generator(preset)
        self.discriminator = networks.discriminator(preset)
        self.combined = networks.combine(self.generator, self.discriminator)
        self.generator.compile(jit_compile=networks.use_xla())  # to generate only
        self.discriminator.compile(**networks.compile_arguments(learning_rate))
        keras_hpc.assign_team(self.discriminator, 0)
        self.combined.compile(**networks.compile_arguments(learning_rate))
        keras_hpc.assign_team(self.combined, 1)
        self.models = [self.discriminator, self.combined]

    def step(self, images, energies, rng):
        """Trains on a batch: the discriminator on real and on generated showers, then the generator twice.

        Args:
            images: (batch, size, size, size, 1), units of 10 MeV.
            energies: (batch,), units of 100 GeV.
            rng: a `numpy.random.Generator`, another one on every rank.

        Returns:
            the losses of this rank, named as in COLUMNS: means of the two updates.
        """
        count = len(images)
        real = _train(self.discriminator, images, self._targets(1, energies, images.sum(axis=(1, 2, 3, 4)), rng))
        wanted = self._energies(rng, count)
        # Not `predict`, which is for all ranks together, and makes a pipelined team wait for its gradients.
        images = self.generator.predict_on_batch(networks.noise_of(rng, wanted))
        fake = _train(self.discriminator, images, self._targets(0, wanted, self.response(wanted), rng))
        generated = []
        for _ in range(2):
            wanted = self._energies(rng, count)
            with networks.frozen(self.discriminator):
                targets = self._targets(1, wanted, self.response(wanted))
                generated.append(_train(self.combined, networks.noise_of(rng, wanted), targets))
        return _mean("d", [real, fake]) | _mean("g", generated)

    def settle(self):
        """Lets pipelined teams apply what is outstanding. Collective."""
        for model in self.models:
            keras_hpc.drain(model)

    def _energies(self, rng, count):
        return rng.uniform(self.low, self.high, count)

    @staticmethod
    def _targets(label, energies, sums, rng=None):
        labels = np.full(len(energies), label, "float32")
        if rng is not None:
            flipped = rng.random(len(labels)) < FLIPPED_LABELS
            labels[flipped] = 1 - labels[flipped]
        columns = zip(networks.HEADS, (labels, energies, sums), strict=True)
        return {name: np.asarray(column, "float32")[:, None] for name, column in columns}


def _train(model, x, y):
    model.reset_metrics()  # train_on_batch returns means since then
    return model.train_on_batch(x, y, return_dict=True)


def _mean(who, logs):
    names = {"loss": "loss"} | {head: f"{head}_loss" for head in networks.HEADS}
    return {f"{who}_{what}": float(np.mean([log[name] for log in logs])) for what, name in names.items()}


class LossTable:
    """losses.csv: a line for each step, of rank 0. Forgets what a resumed run does again."""

    def __init__(self, path, first_epoch):
        self._path = path
        rows = []
        if first_epoch > 0 and path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["epoch"]) < first_epoch]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    def write(self, epoch, step, losses):
        row = {"epoch": epoch, "step": step} | {name: f"{loss:.9g}" for name, loss in losses.items()}
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)


def main(argv=None):
    args = arguments(argv)
    preset = networks.PRESETS[args.preset]
    batch = args.batch_size or preset.batch_size
    keras_hpc.init(teams=2)
    rank, size = keras_hpc.rank(), keras_hpc.size()
    first = rank == 0

    images, energies = load(args.data, rank, size)
    if images.shape[1:] != preset.shape:
        raise SystemExit(f"Preset {preset.name} is for images of {preset.shape}. {args.data} has {images.shape[1:]}.")
    steps = min(len(images) // batch, args.steps or len(images))
    if steps < 1:
        raise SystemExit(f"{len(images)} showers for each rank are less than a batch of {batch}: --batch-size.")

    facts = {"preset": args.preset, "seed": args.seed, "batch_size": batch, "ranks": size, "rate": args.learning_rate}
    first_epoch = 0
    if args.resume:
        saved = checkpoint.facts(args.out)
        first_epoch = saved.pop("epochs")
        if saved != facts:
            raise SystemExit(f"The checkpoint in {args.out} is of a run with {saved}. This one has {facts}.")

    keras.utils.set_random_seed(args.seed)
    gan = Gan(args.preset, response_of(args.data), args.learning_rate)
    # Two updates of each network in a step; a resumed run makes one step before its first epoch.
    synchronous = 2 * (steps * max(0, args.synchronous_epochs - first_epoch) + (first_epoch > 0))
    keras_hpc.configure_team(0, schedule=args.schedule_d, synchronous_steps=synchronous)
    keras_hpc.configure_team(1, schedule=args.schedule_g, synchronous_steps=synchronous)
    if first_epoch:
        # Makes the optimizers' variables, and the ranks equal; what it does to the networks is forgotten.
        gan.step(images[:batch], energies[:batch], np.random.default_rng(0))
        gan.settle()
        checkpoint.restore(args.out, gan.models)

    args.out.mkdir(parents=True, exist_ok=True)
    table = LossTable(args.out / "losses.csv", first_epoch) if first else None
    for epoch in range(first_epoch, args.epochs):
        rng = np.random.default_rng([args.seed, rank, epoch])
        checkpoint.reseed(gan.models, args.seed, rank, epoch)
        order = rng.permutation(len(images))[: steps * batch].reshape(steps, batch)
        begin = time.perf_counter()
        for step, rows in enumerate(order):
            losses = gan.step(images[rows], energies[rows], rng)
            if first:
                table.write(epoch, step, losses)
                if step % max(1, steps // 10) == 0:
                    seconds = (time.perf_counter() - begin) / (step + 1)
                    text = ", ".join(f"{name} {losses[name]:.3f}" for name in ("d_loss", "g_loss"))
                    print(f"epoch {epoch + 1}/{args.epochs}, step {step + 1}/{steps}: {text}, {seconds:.2f} s/step")
        gan.settle()
        if first:
            gan.generator.save_weights(args.out / "generator.weights.h5")
            gan.discriminator.save_weights(args.out / "discriminator.weights.h5")
            checkpoint.save(args.out, gan.models, facts | {"epochs": epoch + 1})
    keras_hpc.check_replicas(gan.combined)
    return gan


if __name__ == "__main__":
    main()
