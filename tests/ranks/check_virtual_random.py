# SPDX-License-Identifier: Apache-2.0
"""Random trainings with virtual ranks end with the same bits on any number of ranks, and so do their histories."""

import itertools
import os
import random
import shutil
import tempfile

import keras
import numpy as np
import pytest
import random_callbacks
import random_networks
import random_optimizers
from keras import layers
from keras_cases import Parts
from random_steps import OwnMetrics, Spread
from virtual_cases import digest, same_bits, world

RANKS = {}
SOAK = {"tensorflow": (3,), "jax": (3,), "torch": (4, 8)}
TIMEOUT = 900
BACKEND = keras.backend.backend()
SEEDS = os.environ.get("FIT_SEEDS", {"torch": "0:30", "tensorflow": "0:8", "jax": "0:6"}[BACKEND])
METRICS = keras.metrics
KINDS = {
    "class": (
        ["sparse_categorical_crossentropy"],
        ["accuracy", lambda: METRICS.SparseTopKCategoricalAccuracy(2), lambda: METRICS.MeanIoU(3, sparse_y_pred=False)],
    ),
    "number": (
        ["mse", lambda: keras.losses.Huber(0.7), lambda: keras.losses.MeanSquaredError(reduction="sum")],
        ["mae", lambda: METRICS.RootMeanSquaredError(), lambda: METRICS.R2Score(), lambda: Spread(2)],
    ),
}


class Networks(random_networks.Networks):
    """Those, with layers that draw random numbers and that take statistics of a part."""

    def normalization(self, x):
        return self.pick(
            layers.BatchNormalization(momentum=self.pick(0.5, 0.9)), layers.LayerNormalization(),
            layers.GroupNormalization(self.pick(1, 2)), layers.RMSNormalization(),
        )(x)  # fmt: skip

    def nested(self, x):
        inside = keras.Input(x.shape[1:])
        middle = layers.BatchNormalization()(layers.Dense(x.shape[-1], "tanh")(inside))
        model = keras.Model(inside, self.pick(middle, layers.Dropout(0.3)(middle)))
        return model(model(x)) if self.pick(True, False) else model(x) + x

    def noisy(self, x):
        kinds = [layers.Dropout(0.3), layers.GaussianNoise(0.2), layers.GaussianDropout(0.2), layers.AlphaDropout(0.2)]
        if len(x.shape) == 4 and BACKEND == "tensorflow":
            kinds += [layers.RandomFlip(), layers.RandomTranslation(0.2, 0.2), layers.RandomContrast(0.3)]
        return self.pick(*kinds)(x)

    def body(self, family, x):
        if family != "tokens":
            x = self.pick(self.noisy, lambda x: x)(x)
        if family == "series" and self.pick(True, False):
            x = self.pick(layers.LSTM, layers.GRU)(4, dropout=0.2, recurrent_dropout=0.2)(x)
        else:
            x = super().body(family, x)
        spectral = layers.SpectralNormalization(layers.Dense(5))
        return self.pick(self.noisy, self.normalization, spectral, lambda x: x)(x)


class Case:
    """A model, its data and how it is trained, all drawn from a seed."""

    def __init__(self, seed, folder):
        self.draw, self.text, self.folder = random.Random(seed), [f"seed {seed}"], folder
        source = np.random.default_rng(seed)
        kinds = sorted(random_networks.FAMILIES)
        self.family = self.draw.choice(kinds if BACKEND == "torch" else ["vector", "vector", "image"])
        self.kind, self.batch = self.draw.choice(sorted(KINDS)), self.draw.choice([1, 2, 3, 5, 16])
        samples = self.draw.randint(6, 61)
        self.x = random_networks.data(self.family, samples, source)
        facts = random_networks.features(self.family, self.x)
        self.y = facts if self.kind == "number" else np.abs(facts.sum(1) * 2).astype("int32") % 3
        self.weight = source.choice([0.0, 0.5, 1.0, 2.0], size=samples).astype("float32")

    def say(self, text):
        self.text.append(str(text))

    def pick(self, *values):
        return self.draw.choice(values)

    def made(self, of):
        chosen = self.draw.choice(of)
        return chosen() if callable(chosen) else chosen

    def model(self):
        self.say(f"{self.family} {self.kind}, {len(self.x)} by {self.batch}")
        keras.utils.set_random_seed(5)
        inputs = keras.Input(self.x.shape[1:], dtype=self.x.dtype)
        x = Networks(self.draw, self.say, self.x).body(self.family, inputs)
        outputs = layers.Dense(2)(x) if self.kind == "number" else layers.Dense(3, "softmax")(x)
        model = self.pick(keras.Model, keras.Model, OwnMetrics)(inputs, outputs)
        for layer in model.layers[1:-1] if self.pick(*[True] * 6, False) is False else ():
            layer.trainable = self.pick(True, False)
        optimizer, self.settable = random_optimizers.make(self.draw, self.say, self.pick(*[False] * 4, True))
        losses, metrics = KINDS[self.kind]
        options = {"metrics": [self.made(metrics)], "weighted_metrics": [self.made(metrics[:2])]}
        options["run_eagerly"] = BACKEND != "jax" and self.pick(*[False] * 4, True)
        model.compile(optimizer, self.made(losses), jit_compile=BACKEND == "jax", **options)
        return model

    def data(self):
        weighted = self.pick(True, False, False)
        whole = (self.x, self.y, self.weight) if weighted else (self.x, self.y)
        how = self.pick("arrays", "arrays", "batches", "generator", "own")
        self.say(f"{how} {'weighted' if weighted else ''}")
        given = {"epochs": self.pick(1, 2, 3), "verbose": 0, "shuffle": self.pick(True, False)}
        if self.pick(True, False):
            rows = slice(self.pick(1, 9, 30))
            given["validation_data"] = tuple(array[rows] for array in whole)
        if how == "arrays":
            if weighted:
                given["sample_weight"] = self.weight
            elif self.kind == "class":
                given["class_weight"] = {0: 0.2, 1: 1.0, 2: 3.0}
            return whole[:2], given | {"batch_size": self.batch}
        batches = Parts(*whole, batch=self.batch, whole=True)
        if how == "generator":
            return ((batches[i % len(batches)] for i in itertools.count()),), given | {"steps_per_epoch": 2}
        if how == "own" and BACKEND == "tensorflow":
            import tensorflow as tf

            return (tf.data.Dataset.from_tensor_slices(whole).shuffle(30, seed=4).batch(self.batch),), given
        if how == "own" and BACKEND == "torch":
            import torch

            rows = [tuple(array[row] for array in whole) for row in range(len(self.x))]
            return (torch.utils.data.DataLoader(rows, batch_size=self.batch, shuffle=True),), given
        return (batches,), given

    def train(self):
        model, results = self.model(), []
        for number in range(self.pick(1, 2)):
            args, given = self.data()
            callbacks = random_callbacks.Callbacks(self.draw, "loss", self.settable, f"{self.folder}/{number}")
            drawn = callbacks.drawn(False)
            backup = keras.callbacks.BackupAndRestore
            given["callbacks"] = [callback for callback in drawn if not isinstance(callback, backup)]
            results += [model.fit(*args, **given).history, digest(model)]
        evaluated = model.evaluate(self.x, self.y, batch_size=3, verbose=0)
        # A NaN is equal to none, and its bits depend on the order of what is added.
        return "diverged" if np.isnan(evaluated).any() else (results, evaluated)


@pytest.mark.parametrize("seed", range(*map(int, SEEDS.split(":"))))
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # as Keras says of every generator
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # as JAX says of variables of 64 bits
def test_a_training_at_random(seed):
    folder = world().bcast(tempfile.mkdtemp() if world().rank == 0 else "")
    case = None

    def train():
        nonlocal case
        case = Case(seed, f"{folder}/{world().rank}")
        return case.train()

    try:
        same_bits(train, virtual=(8, world().size)[seed % 2])  # several parts a rank, or one
    except Exception as error:
        error.add_note("\n".join(case.text))
        raise
    finally:
        world().Barrier()
        if world().rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
