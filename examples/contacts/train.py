# SPDX-License-Identifier: Apache-2.0
"""A variational autoencoder learns the contact maps of a toy protein, with three latent dimensions.

mpiexec -n 2 python -m examples.contacts.train

Maps come from `dynamics.py`, made once; other chains are kept for tests. The folder of --out then holds history.csv,
quality.json and latent.npz.
"""

import argparse
import csv
import json
import os
from pathlib import Path

import numpy as np

from examples import clock
from examples.contacts import dynamics

LATENT = 3
PRESETS = {"mini": (16, 32), "paper": (128, 128)}  # filters, units of the dense layers
FAR = np.abs(np.subtract.outer(np.arange(dynamics.BEADS), np.arange(dynamics.BEADS))) > 2  # others touch always


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=PRESETS, default="mini", help="paper: 26 million parameters (default: mini)"
    )
    parser.add_argument("--chains", type=int, default=60, help="to learn from; a third as many for tests (default: 60)")
    parser.add_argument("--frames", type=int, default=100, help="maps of each chain (default: 100)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=60, help="of all ranks (default: 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("results") / "contacts" / "maps", help="folder for the maps")
    parser.add_argument("--out", type=Path, default=Path("results") / "contacts" / "run")
    return parser.parse_args(argv)


def network(filters, units):
    """Returns the autoencoder and its encoder, as in DeepEx: three convolutions, a dense layer, and their mirror."""
    import keras
    from keras import layers, ops

    encoder = keras.Sequential([keras.Input((dynamics.BEADS, dynamics.BEADS, 1))], name="encoder")
    for _ in range(3):
        encoder.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
    encoder.add(layers.Flatten())
    encoder.add(layers.Dense(units, activation="relu"))
    encoder.add(layers.Dense(2 * LATENT))  # mean and logarithm of the variance
    decoder = keras.Sequential([keras.Input((LATENT,))], name="decoder")
    decoder.add(layers.Dense(units, activation="relu"))
    decoder.add(layers.Dense(dynamics.BEADS**2 * filters, activation="relu"))
    decoder.add(layers.Reshape((dynamics.BEADS, dynamics.BEADS, filters)))
    for _ in range(2):
        decoder.add(layers.Conv2DTranspose(filters, 3, padding="same", activation="relu"))
    decoder.add(layers.Conv2DTranspose(1, 3, padding="same"))

    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = encoder, decoder
            self.noise = keras.random.SeedGenerator()

        def call(self, x, training=False):
            mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
            self.add_loss(ops.mean(ops.sum(ops.exp(log_variance) + mean**2 - 1 - log_variance, axis=-1)) / 2)
            if training:
                mean += ops.exp(log_variance / 2) * keras.random.normal(ops.shape(mean), seed=self.noise)
            return self.decoder(mean)

    return Autoencoder(), encoder


def cross_entropy(maps, logits):
    """Returns -log p of each map, in nats, shape (batch,)."""
    from keras import ops

    return ops.sum(ops.maximum(logits, 0) - logits * maps + ops.log1p(ops.exp(-ops.abs(logits))), axis=(1, 2, 3))


def quality(maps, states, logits, latent, seed):
    """Returns how well test maps are reconstructed, and whether the latent space keeps the states apart.

    Args:
        maps: of the tests, (n, 28, 28, 1).
        states: theirs, (n,); those of -1 do not count for the latent space.
        logits: of the reconstructed maps.
        latent: means, (n, 3).
        seed: of k-means.

    Returns:
        f1: of the contacts of beads that are more than two apart.
        rand: adjusted Rand index of k-means in the latent space against the states: 1 if equal, 0 by chance.
        silhouette: of the states in the latent space, -1 to 1.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score, silhouette_score

    true, found = (maps[..., 0] > 0)[:, FAR], (logits[..., 0] > 0)[:, FAR]
    known = states >= 0
    clusters = KMeans(len(dynamics.STATES), n_init=10, random_state=seed).fit_predict(latent[known])
    return {
        "f1": float(2 * (true & found).sum() / max(1, true.sum() + found.sum())),
        "rand": float(adjusted_rand_score(states[known], clusters)),
        "silhouette": float(silhouette_score(latent[known], states[known], sample_size=2000, random_state=seed)),
    }


def main(argv=None):
    args = arguments(argv)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    import keras_hpc

    keras_hpc.init(batch="global")
    keras.utils.set_random_seed(args.seed)
    files = {kind: args.data / f"{kind}-{args.chains}x{args.frames}.npz" for kind in ("train", "test")}
    if keras_hpc.rank() == 0 and not files["test"].exists():
        args.data.mkdir(parents=True, exist_ok=True)
        dynamics.write(files["train"], args.chains, args.frames, seed=0)
        dynamics.write(files["test"], args.chains // 3 or 1, args.frames, seed=1)
    keras_hpc.barrier()

    def batches(kind, **kwargs):
        def both(rows):
            maps = rows["map"].astype("float32")
            return maps, maps

        return keras_hpc.data.Dataset(
            files[kind], args.batch_size, fields=("map",), decode=both, seed=args.seed, **kwargs
        )

    model, encoder = network(*PRESETS[args.preset])
    model.compile(keras.optimizers.RMSprop(1e-3), cross_entropy)
    timed = clock.epochs()
    tests = batches("test", shuffle=False)
    history = model.fit(
        batches("train", shuffle="all"), validation_data=tests, epochs=args.epochs, callbacks=[timed], verbose=2
    ).history
    keras_hpc.check_replicas(model)
    logits, latent = model.predict(tests, verbose=0), encoder.predict(tests, verbose=0)[:, :LATENT]
    if keras_hpc.rank() == 0:
        with np.load(files["test"]) as file:
            maps, states = file["map"], file["state"]
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "history.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", "seconds", *history])
            writer.writerows(zip(range(1, args.epochs + 1), timed.seconds, *history.values(), strict=True))
        found = quality(maps, states, logits, latent, args.seed)
        (args.out / "quality.json").write_text(json.dumps(found))
        np.savez(
            args.out / "latent.npz",
            latent=latent,
            states=states,
            maps=maps[:: len(maps) // 6],
            logits=logits[:: len(maps) // 6],
        )
        print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
