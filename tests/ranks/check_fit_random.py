# SPDX-License-Identifier: Apache-2.0
"""Random combinations of what `compile` and `fit` take give on several ranks what they give on one."""

import contextlib
import functools
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
import random_steps
from keras_cases import assert_identical, on_one_rank, values

import keras_hpc

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2, 3), "jax": (2, 3), "torch": (2, 3)}
TIMEOUT = 900
BACKEND = keras.backend.backend()
COUNTING = ("accuracy", "top", "auc", "f1", "precision")
SOAKS = {"torch": "0:60", "tensorflow": "0:20", "jax": "0:8"}[BACKEND]  # each takes minutes to compile on JAX
SEEDS = os.environ.get("FIT_SEEDS", SOAKS if os.environ.get("TESTS_SOAK") else "0:2")
pytestmark = pytest.mark.usefixtures("global_batches")


@pytest.fixture
def folder():
    """A folder of all ranks together."""
    path = keras_hpc.broadcast_object(tempfile.mkdtemp())
    yield path
    keras_hpc.barrier()
    shutil.rmtree(path, ignore_errors=True)


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays, batch):
        super().__init__()
        self.arrays, self.batch = arrays, batch

    def __len__(self):
        return -(-len(keras.tree.flatten(self.arrays)[0]) // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return tuple(keras.tree.map_structure(lambda array: array[rows], array) for array in self.arrays)


KINDS = {
    "class": {
        "losses": [lambda: "sparse_categorical_crossentropy"],
        "metrics": ["accuracy", lambda: keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")],
    },
    "one-hot": {
        "losses": [
            lambda: "categorical_crossentropy",
            lambda: keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
            lambda: keras.losses.CategoricalFocalCrossentropy(),
        ],
        "metrics": [
            "accuracy",
            lambda: keras.metrics.F1Score(average="macro", name="f1"),
            lambda: keras.metrics.AUC(name="auc"),
            lambda: keras.metrics.Precision(name="precision"),
        ],
    },
    "number": {
        "losses": [
            lambda: "mse",
            lambda: keras.losses.Huber(0.7),
            lambda: keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
            lambda: keras.losses.MeanSquaredError(reduction="sum"),
            lambda: keras.losses.LogCosh(),
        ],
        "metrics": [
            "mae",
            lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
            lambda: keras.metrics.R2Score(name="r2"),
        ],
    },
}


class Case:
    """A model, its data and how it is trained, all drawn from a seed."""

    def __init__(self, seed, folder):
        self.seed, self.folder, draw = seed, folder, random.Random(seed)
        self.batch = draw.choice([1, 2, 3, 5, 8, 16, 100])
        self.samples = draw.randint(6, max(6, min(6 * self.batch + 3, 61)))
        self.family = draw.choice(sorted(random_networks.FAMILIES))
        if BACKEND != "torch" and draw.random() < 0.6:
            self.family = "vector"  # recurrent layers take minutes to compile
        self.outputs = {f"out{i}": draw.choice(sorted(KINDS)) for i in range(draw.choice([1, 1, 1, 2]))}
        self.named = draw.random() < 0.5 or len(self.outputs) > 1
        self.second = draw.random() < 0.25  # another input
        self.half = draw.random() < 0.06
        simple = self.family == "vector" and not (self.half or self.second)
        self.sharp = simple and draw.random() < 0.2
        self.text = []
        self.train = self._data(self.samples, 1)
        self.held = self._data(draw.randint(1, 20), 2)
        self.rows = 6 - 6 % keras_hpc.size()  # of a batch of a loop, of which ranks get equally many

    def say(self, text):
        self.text.append(str(text))

    def _data(self, samples, seed):
        source = np.random.default_rng(seed)
        x = {"a": random_networks.data(self.family, samples, source)}
        facts = random_networks.features(self.family, x["a"])
        if self.second:
            x["b"] = random_networks.data("tokens", samples, source)
        y = {}
        for name, kind in self.outputs.items():
            labels = (np.abs(facts.sum(1) * 2).astype("int32") % 3).astype("int32")
            y[name] = {"class": labels, "one-hot": np.eye(3, dtype="float32")[labels], "number": facts}[kind]
        weight = {name: source.choice([0.0, 0.5, 1.0, 2.0], size=samples).astype("float32") for name in y}
        return x, y, weight

    def model(self):
        draw = random.Random(self.seed + 1)
        keras.utils.set_random_seed(5)
        given = self.train[0]
        inputs = {name: keras.Input(rows.shape[1:], name=name, dtype=rows.dtype) for name, rows in given.items()}
        networks = random_networks.Networks(draw, self.say, given["a"], self.sharp)
        x = networks.body(self.family, inputs["a"])
        if self.second:
            x = keras.layers.Concatenate()([x, networks.body("tokens", inputs["b"])])
        ends = {
            name: keras.layers.Dense(3, "softmax", name=name, dtype="float32")(x)
            if kind != "number"
            else keras.layers.Dense(2, name=name, dtype="float32")(x)
            for name, kind in self.outputs.items()
        }
        kind = draw.choice([None, None, None, *random_steps.CLASSES])
        if kind == "own step" and len(self.outputs) > 1:
            kind = None
        self.say(kind)
        self.width = 3 if self.outputs["out0"] != "number" else 2
        cls = random_steps.CLASSES.get(kind, keras.Model)
        model = cls(inputs if len(inputs) > 1 or self.named else inputs["a"], ends if self.named else ends["out0"])
        if draw.random() < 0.15:
            frozen = [layer for layer in model.layers[1:-1] if draw.random() < 0.5]
            for layer in frozen:
                layer.trainable = False
            self.say(f"frozen {len(frozen)}")
        return model

    def compile(self, model, seed):
        """Returns whether the learning rate can be set."""
        draw = random.Random(seed)
        optimizer, settable = random_optimizers.make(draw, self.say, self.sharp)
        losses = {name: draw.choice(KINDS[kind]["losses"])() for name, kind in self.outputs.items()}
        chosen = {
            which: {
                name: [m() if callable(m) else m for m in draw.sample(KINDS[kind]["metrics"], draw.choice([0, 1, 2]))]
                for name, kind in self.outputs.items()
            }
            for which in ("metrics", "weighted_metrics")
        }
        if draw.random() < 0.2:
            chosen["metrics"]["out0"].append(random_steps.Spread(self.width))
        if draw.random() < 0.15:
            chosen["metrics"]["out0"].append(random_steps.size_of_outputs)
        options = {"loss": losses, **chosen}
        if not self.named:
            options = {key: value["out0"] for key, value in options.items()}
        elif draw.random() < 0.5:
            options["loss_weights"] = dict(zip(self.outputs, (0.3, 2.0), strict=False))
        if BACKEND != "tensorflow" or draw.random() < 0.7:
            options["jit_compile"] = False if BACKEND != "jax" else draw.random() < 0.9
        if draw.random() < 0.25 and BACKEND != "torch":
            options["steps_per_execution"] = draw.choice([2, 3])
        elif draw.random() < 0.2 and BACKEND != "jax":
            options["run_eagerly"] = True
        self.say({key: str(value) for key, value in options.items()})
        model.compile(optimizer, **options)
        return settable

    def given(self, arrays, weighted, sets):
        """Data as `fit` and `evaluate` take them: positional ones, and keyword ones."""
        x, y, weight = arrays
        if not (self.named or len(x) > 1):
            x = x["a"]
        if not self.named:
            y, weight = y["out0"], weight["out0"]
        whole = (x, y, weight) if weighted else (x, y)
        if sets == "arrays":
            return whole[:2], {"batch_size": self.batch, **({"sample_weight": weight} if weighted else {})}
        if sets == "pydataset":
            return (Batches(whole, self.batch),), {}
        if sets == "tf.data":
            import tensorflow as tf

            return (tf.data.Dataset.from_tensor_slices(whole).batch(self.batch),), {}
        if sets == "loader":
            import torch

            rows = [keras.tree.map_structure(lambda array, i=i: array[i], whole) for i in range(self.length(x))]
            return (torch.utils.data.DataLoader(rows, batch_size=self.batch),), {}
        batches = Batches(whole, self.batch)
        return ((batches[i % len(batches)] for i in itertools.count()),), {}

    @staticmethod
    def length(x):
        return len(keras.tree.flatten(x)[0])

    def fit(self, model, settable, seed):
        draw = random.Random(seed)
        sets = draw.choice(["arrays", "arrays", "pydataset", "generator",
                            {"tensorflow": "tf.data", "torch": "loader", "jax": "pydataset"}[BACKEND]])  # fmt: skip
        weighted = draw.random() < 0.4
        self.say(f"{sets} {'weighted' if weighted else ''}")
        args, options = self.given(self.train, weighted, sets)
        options |= {"epochs": draw.choice([1, 2, 2, 3]), "verbose": 0, "shuffle": False}
        steps = -(-self.samples // self.batch)
        if sets == "arrays" and draw.random() < 0.2 and self.samples > 6:
            options["validation_split"] = 0.3
        if list(self.outputs.values()) == ["class"] and not self.named and sets == "arrays" and not weighted:
            options["class_weight"] = {0: 0.2, 1: 1.0, 2: 3.0}
        if "validation_split" not in options and draw.random() < 0.6:
            kind = "pydataset" if sets == "generator" else sets
            held, more = self.given(self.held, draw.random() < 0.5, kind)
            options["validation_data"] = (*held, *([more["sample_weight"]] if "sample_weight" in more else [])) \
                if kind == "arrays" else held[0]  # fmt: skip
            if sets == "arrays" and draw.random() < 0.5:
                options["validation_batch_size"] = draw.choice([1, 4, 7])
            if draw.random() < 0.3:
                options["validation_freq"] = 2
        if draw.random() < 0.2:
            options["initial_epoch"] = 1
        if sets == "generator":
            options["steps_per_epoch"] = draw.choice([1, 2, steps])
        elif draw.random() < 0.15 and sets != "arrays":
            options["steps_per_epoch"] = max(1, steps // max(2, options["epochs"]))
        watch = "val_loss" if "validation_data" in options and "validation_freq" not in options else "loss"
        callbacks = random_callbacks.Callbacks(draw, watch, settable, self.folder)
        options["callbacks"] = callbacks.drawn(getattr(model.optimizer, "use_ema", False))
        self.say({k: v for k, v in options.items() if k not in ("validation_data", "sample_weight")})
        history = model.fit(*args, **options).history
        return {"history": history, "seen": callbacks.seen(model)}

    def evaluate(self, model, draw):
        args, more = self.given(self.held, draw.random() < 0.5, draw.choice(["arrays", "pydataset"]))
        scores = model.evaluate(*args, verbose=0, return_dict=True, **more)
        outputs = model.predict(args[0] if len(args) > 1 else args[0].arrays[0], batch_size=3, verbose=0)
        return {"scores": scores, "outputs": outputs}

    def then(self, model, draw):
        """Returns a model to go on with, and whether it must be compiled."""
        more = ["exported"] if BACKEND == "tensorflow" else []
        how = draw.choice(["again", "again", "recompiled", "frozen", "cloned", "saved", "weights", "batches", *more])
        self.say(f"then {how}")
        if how == "frozen":
            for layer in model.layers:
                if draw.random() < 0.4:
                    layer.trainable = not layer.trainable
        elif how == "cloned":
            other = keras.models.clone_model(model)
            other.set_weights(model.get_weights())
            model = other
        elif how == "saved":
            path = f"{self.folder}/model.keras"
            model.save(path)
            model = keras.saving.load_model(path)
        elif how == "weights":
            path = f"{self.folder}/model.weights.h5"
            model.save_weights(path)
            model.load_weights(path)
        elif how == "exported":
            model.export(f"{self.folder}/exported", verbose=False)
        elif how == "batches":
            args, _ = self.given(self.train, False, "arrays")
            rows = keras.tree.map_structure(lambda array: array[: self.rows], args)
            rows = keras_hpc.shard(rows) if self.ranks else rows
            samples = len(keras.tree.flatten(rows)[0])
            with keras_hpc.step(samples=samples) if self.ranks else contextlib.nullcontext():
                model.train_on_batch(*rows)
        return model, how in ("recompiled", "frozen", "cloned")

    def run(self, ranks):
        self.ranks = ranks
        self.text = [f"seed {self.seed}: {self.family}, {self.samples} by {self.batch}, {self.outputs} {self.half}"]
        self.folder = f"{self.folder}/{'all' if ranks else 'one'}"
        draw = random.Random(self.seed + 3)
        if self.half:
            keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            model = self.model()
        finally:
            keras.config.set_dtype_policy("float32")
        settable = self.compile(model, self.seed + 2)
        results = [self.fit(model, settable, self.seed + 3)]
        results.append(self.evaluate(model, draw))
        phases = [0, 1, 1, 2] if BACKEND == "torch" else [0, 0, 1]  # others compile each anew
        for phase in range(draw.choice(phases)):
            model, anew = self.then(model, draw)
            if anew:
                settable = self.compile(model, self.seed + 10 * phase + 4)
            results.append(self.fit(model, settable, self.seed + 10 * phase + 5))
            results.append(self.evaluate(model, draw))
        return results, values(model)


def attempt(case):
    try:
        return case.run(ranks=False)
    except Exception as error:  # noqa: BLE001  # what Keras cannot do on one rank is not ours
        return f"{type(error).__name__}: {error}"


def shape_of(results):
    return [".".join(map(str, path)) for path, _ in keras.tree.flatten_with_path(results)]


@pytest.mark.parametrize("seed", range(*map(int, SEEDS.split(":"))))
def test_a_training_at_random(seed, folder):
    case = Case(seed, folder)
    expected = on_one_rank(lambda: attempt(case))
    if isinstance(expected, str):
        pytest.skip(f"Keras cannot do it on one rank: {expected}")
    case = Case(seed, folder)
    try:
        results, weights = case.run(ranks=True)
    except Exception as error:
        error.add_note("\n".join(case.text))
        raise
    text = "\n".join(case.text)
    assert_identical(weights)
    loose = 300 if case.half else 1
    assert shape_of(results) == shape_of(expected[0]), text
    for path, found in keras.tree.flatten_with_path(results):
        wanted = functools.reduce(lambda inside, key: inside[key], path, expected[0])
        # A number that rounding moves past a threshold is another sample counted.
        counts = any(str(key).endswith(COUNTING) for key in path)
        atol = 0.05 if counts else 1e-4 * loose
        if case.half and not any("loss" in str(key) for key in path):
            continue  # scores of what is rounded to 8 bits
        np.testing.assert_allclose(found, wanted, rtol=2e-4 * loose, atol=atol, err_msg=f"{path}\n{text}")
    for a, b in zip(weights, expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4 * loose, atol=1e-4 * loose, err_msg=text)
