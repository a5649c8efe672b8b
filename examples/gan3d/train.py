# SPDX-License-Identifier: Apache-2.0
"""Trains a 3DGAN on showers in a calorimeter, on one rank or on many. Two models, two teams of ranks.

python -m examples.gan3d.train --data showers.h5 --out results/gan3d
mpiexec -n 2 python -m examples.gan3d.train --data showers.h5 --out results/gan3d

The folder of --out then holds a folder of checkpoints, generator.weights.h5, discriminator.weights.h5, losses.csv with
a line for each step, and epochs.csv with one for each epoch: its time, and what communication cost.
"""

import argparse
import csv
import shutil
import time
from pathlib import Path

import keras
import numpy as np

import keras_hpc
from examples.gan3d import networks
from examples.gan3d.data import Showers, fit_response

FLIPPED_LABELS = 0.05  # of the discriminator's labels are wrong on purpose, so that it does not become too sure
LOSSES = [f"{who}_{what}" for who in "dg" for what in ("loss", *networks.HEADS)]
COLUMNS = ["epoch", "step", *LOSSES]
EPOCH_COLUMNS = ["epoch", "samples", "seconds"] + [
    f"communication/team{team}_{what}" for team in (0, 1) for what in ("mb", "ms", "exposed_ms", "hidden")
]


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="HDF5 file with ECAL (n,s,s,s) and target (n,2), GeV")
    parser.add_argument("--preset", choices=networks.PRESETS, default="mini", help="size of images (default: mini)")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, help="showers per rank and step (default: the preset's)")
    parser.add_argument("--stage", type=Path, metavar="FOLDER", help="of the node, for a cache of what is read")
    parser.add_argument("--steps", type=int, help="at most so many steps per epoch, to try things out")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of every rank, not scaled (default: 0.001)")
    parser.add_argument(
        "--decay", action="store_true", help="let the rate fall linearly to 0 in the second half of --epochs"
    )
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
    parser.add_argument(
        "--cooldown-epochs", type=int, default=0, help="so many synchronous ones at its end (default: 0)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results") / "gan3d", help="(default: results/gan3d)")
    parser.add_argument("--keep-generators", action="store_true", help="generator-N.weights.h5 after each epoch N")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return parser.parse_args(argv)


class Gan:
    """Generator, discriminator and combined model, compiled, and one training step of all.

    Attributes:
        generator: never trained by itself.
        discriminator: trained on team 0.
        combined: trains the generator, on team 1.
    """

    def __init__(self, preset, response, learning_rate=1e-3):
        self.response = response
        self.generator = networks.generator(preset)
        self.discriminator = networks.discriminator(preset)
        self.combined = networks.combine(self.generator, self.discriminator)
        self.generator.compile(jit_compile=networks.use_xla())  # to generate only
        self.discriminator.compile(**networks.compile_arguments(preset, learning_rate))
        keras_hpc.assign_team(self.discriminator, 0)
        self.combined.compile(**networks.compile_arguments(preset, learning_rate))
        keras_hpc.assign_team(self.combined, 1)
        self.combined.optimizer.build(self.generator.trainable_variables)  # the discriminator is frozen in its steps
        self.models = [self.discriminator, self.combined]

    def step(self, batch, rng):
        """Trains on a batch: the discriminator on real and on generated showers, then the generator twice.

        Args:
            batch: a `data.Batch`.
            rng: a `numpy.random.Generator`, another one on every rank.

        Returns:
            the losses of this rank, named and ordered as LOSSES: means of the two updates.
        """
        count = len(batch.images)
        real = _train(self.discriminator, batch.images, self._targets(1, batch.energies, batch.sums, rng))
        wanted = self._energies(rng, count)
        # Not `predict`, which is for all ranks together, and makes a pipelined team wait for its gradients.
        images = self.generator.predict_on_batch(networks.noise_of(rng, wanted))
        fake = _train(self.discriminator, images, self._targets(0, wanted, self.response.expected_sum(wanted), rng))
        generated = []
        for _ in range(2):
            wanted = self._energies(rng, count)
            with networks.frozen(self.discriminator):
                targets = self._targets(1, wanted, self.response.expected_sum(wanted))
                generated.append(_train(self.combined, networks.noise_of(rng, wanted), targets))
        return _mean("d", [real, fake]) | _mean("g", generated)

    def set_rate(self, rate):
        """Sets both learning rates."""
        for model in self.models:
            model.optimizer.learning_rate = rate

    def settle(self):
        """Lets pipelined teams apply what is outstanding. Collective."""
        for model in self.models:
            keras_hpc.drain(model)

    def _energies(self, rng, count):
        return rng.uniform(self.response.lowest, self.response.highest, (count, 1))

    @staticmethod
    def _targets(label, energies, sums, rng=None):
        labels = np.full((len(energies), 1), label, "float32")
        if rng is not None:
            flipped = rng.random(labels.shape) < FLIPPED_LABELS
            labels[flipped] = 1 - labels[flipped]
        columns = zip(networks.HEADS, (labels, energies, sums), strict=True)
        return {name: np.asarray(column, "float32") for name, column in columns}


def _train(model, x, y):
    model.reset_metrics()  # train_on_batch returns means since then
    return model.train_on_batch(x, y, return_dict=True)


def _mean(who, logs):
    names = {"loss": "loss"} | {head: f"{head}_loss" for head in networks.HEADS}
    return {f"{who}_{what}": float(np.mean([log[name] for log in logs])) for what, name in names.items()}


class Table:
    """A CSV file to which rank 0 adds lines, epoch by epoch. Forgets what a resumed run does again."""

    def __init__(self, path, columns, first_epoch):
        self._path, self._columns = path, columns
        rows = []
        if first_epoch > 0 and path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["epoch"]) < first_epoch]
        self._write("w", [dict(zip(columns, columns, strict=True)), *rows])

    def add(self, rows):
        """Adds lines, dictionaries of numbers."""
        self._write("a", [{k: v if isinstance(v, int) else f"{v:.9g}" for k, v in row.items()} for row in rows])

    def _write(self, mode, rows):
        with self._path.open(mode, newline="") as file:
            csv.DictWriter(file, self._columns).writerows(rows)


def train_epoch(gan, batches, rates, rng, title):
    """Makes the steps of an epoch, one for each learning rate. Collective.

    Returns:
        losses (steps, columns), means of all ranks, and what the epoch cost: seconds, and the figures of both teams.
    """
    reports = [keras_hpc.callbacks.CommunicationReport() for _ in gan.models]
    for report, model in zip(reports, gan.models, strict=True):
        report.set_model(model)
        report.on_epoch_begin(0)
    begin = time.perf_counter()
    losses = []
    for step, (rate, batch) in enumerate(zip(rates, batches, strict=False)):
        gan.set_rate(rate)
        losses.append(gan.step(batch, rng))
        if keras_hpc.rank() == 0 and step % max(1, len(rates) // 5) == 0:
            seconds = (time.perf_counter() - begin) / (step + 1)
            text = ", ".join(f"{name} {losses[-1][name]:.3f}" for name in ("d_loss", "g_loss"))
            print(f"{title}, step {step + 1}/{len(rates)}: {text}, {seconds:.3f} s/step", flush=True)
    gan.settle()
    cost = {"seconds": time.perf_counter() - begin}
    for report in reports:
        report.on_epoch_end(0, cost)
    return keras_hpc.allreduce(np.array([list(line.values()) for line in losses])), cost


def main(argv=None):
    args = arguments(argv)
    preset = networks.PRESETS[args.preset]
    size_of_batch = args.batch_size or preset.batch_size
    keras_hpc.init(teams=2)
    rank, size = keras_hpc.rank(), keras_hpc.size()
    if args.stage:
        keras_hpc.data.stage(args.stage, limit="20GB")
    showers = Showers(args.data, size_of_batch, rank=rank, size=size, seed=args.seed)
    if showers.image_shape != preset.shape:
        raise SystemExit(
            f"Preset {preset.name} is for images of {preset.shape}. Received: {args.data} of {showers.image_shape}"
        )
    steps = min(len(showers), args.steps or len(showers))

    facts = {
        "preset": args.preset,
        "seed": args.seed,
        "batch_size": size_of_batch,
        "ranks": size,
        "rate": args.learning_rate,
        "steps": steps,
        "decay": args.epochs if args.decay else 0,
    }
    keras.utils.set_random_seed(args.seed)
    gan = Gan(args.preset, fit_response(args.data), args.learning_rate)
    checkpoint = keras_hpc.callbacks.Checkpoint(args.out / "checkpoint", keep=1)
    if not args.resume and rank == 0:
        shutil.rmtree(args.out / "checkpoint", ignore_errors=True)
    keras_hpc.barrier()
    first_epoch = 0
    saved = checkpoint.restore(*gan.models)
    if args.resume:
        if saved is None:
            raise SystemExit(f"There is no checkpoint in {args.out} to go on from.")
        first_epoch = saved.pop("epochs")
        if saved != facts:
            raise SystemExit(f"The checkpoint in {args.out} is of a run with {saved}. This one has {facts}.")
    updates = 2 * steps  # of each network in an epoch
    for team, schedule in enumerate((args.schedule_d, args.schedule_g)):
        keras_hpc.configure_team(
            team,
            schedule=schedule,
            synchronous_steps=updates * max(0, args.synchronous_epochs - first_epoch),
            cooldown_steps=updates * args.cooldown_epochs,
            max_steps=updates * max(1, args.epochs - first_epoch),
        )

    args.out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        losses_csv = Table(args.out / "losses.csv", COLUMNS, first_epoch)
        epochs_csv = Table(args.out / "epochs.csv", EPOCH_COLUMNS, first_epoch)
    for epoch in range(first_epoch, args.epochs):
        rng = np.random.default_rng([args.seed, rank, epoch])
        title = f"epoch {epoch + 1}/{args.epochs}"
        left = 1 - (epoch * steps + np.arange(steps)) / (args.epochs * steps)  # of the training
        rates = args.learning_rate * (np.minimum(1, 2 * left) if args.decay else np.ones(steps))
        losses, cost = train_epoch(gan, showers.epoch(epoch), rates, rng, title)
        if rank == 0:
            numbered = enumerate(losses)
            losses_csv.add(dict(zip(COLUMNS, (epoch, step, *line), strict=True)) for step, line in numbered)
            samples = steps * size_of_batch * size
            epochs_csv.add([{"epoch": epoch, "samples": samples} | {k: cost[k] for k in EPOCH_COLUMNS if k in cost}])
            print(f"{title}: {samples / cost['seconds']:.0f} samples/s", flush=True)
            gan.generator.save_weights(args.out / "generator.weights.h5")
            gan.discriminator.save_weights(args.out / "discriminator.weights.h5")
            if args.keep_generators:
                gan.generator.save_weights(args.out / f"generator-{epoch + 1}.weights.h5")
        checkpoint.save(*gan.models, step=epoch + 1, state=facts | {"epochs": epoch + 1})
    checkpoint.wait()
    keras_hpc.check_replicas(gan.combined)
    return gan


if __name__ == "__main__":
    main()
