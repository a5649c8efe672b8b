# SPDX-License-Identifier: Apache-2.0
"""Random combinations of what `compile` and `fit` take give on several ranks what they give on one."""

import functools
import os
import random

import keras
import numpy as np
import pytest
from keras_cases import assert_identical, on_one_rank, values

import keras_hpc

RANKS = {"torch": (2,)}
SOAK = {"tensorflow": (2, 3), "jax": (2, 3), "torch": (2, 3)}
TIMEOUT = 900
BACKEND = keras.backend.backend()
COUNTING = ("accuracy", "top", "auc", "f1", "precision")
SOAKS = "0:60" if BACKEND == "torch" else "0:20"
SEEDS = os.environ.get("FIT_SEEDS", SOAKS if os.environ.get("TESTS_SOAK") else "0:4")


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(batch="global")
    yield
    keras_hpc.finalize()


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays, batch):
        super().__init__()
        self.arrays, self.batch = arrays, batch

    def __len__(self):
        return -(-len(keras.tree.flatten(self.arrays)[0]) // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return tuple(keras.tree.map_structure(lambda array: array[rows], array) for array in self.arrays)


class Penalty(keras.layers.Layer):
    """A loss of its own, and a penalty on what passes."""

    def call(self, x):
        self.add_loss(0.03 * keras.ops.mean(keras.ops.square(x)))
        return x


class Best(keras.callbacks.Callback):
    """What a script of one's own does in callbacks: looks at logs and weights, and decides."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(sorted(logs))
        if epoch == 0 and logs["loss"] > 0:
            self.model.optimizer.learning_rate = 0.02


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

    def __init__(self, seed):
        self.seed, draw = seed, random.Random(seed)
        self.draw = draw
        self.samples, self.batch = draw.randint(3, 61), draw.choice([1, 2, 3, 5, 8, 16, 100])
        self.outputs = {f"out{i}": draw.choice(sorted(KINDS)) for i in range(draw.choice([1, 1, 1, 2]))}
        self.named = draw.random() < 0.5 or len(self.outputs) > 1
        self.text = []
        self.train = self._data(self.samples, 1)
        self.held = self._data(draw.randint(1, 20), 2)

    def say(self, text):
        self.text.append(str(text))

    def chance(self, p, text):
        found = self.draw.random() < p
        if found:
            self.say(text)
        return found

    def _data(self, samples, seed):
        source = np.random.default_rng(seed)
        x = {"a": source.normal(size=(samples, 5)).astype("float32")}
        if self.seed % 3 == 0:
            x["b"] = source.integers(0, 7, size=(samples, 4)).astype("int32")
        y = {}
        for name, kind in self.outputs.items():
            labels = (np.abs(x["a"].sum(1) * 2).astype("int32") % 3).astype("int32")
            y[name] = {
                "class": labels,
                "one-hot": np.eye(3, dtype="float32")[labels],
                "number": np.stack([x["a"][:, 0], x["a"][:, 1:].sum(1)], 1).astype("float32"),
            }[kind]
        weight = {name: source.choice([0.0, 0.5, 1.0, 2.0], size=samples).astype("float32") for name in y}
        return x, y, weight

    def model(self):
        draw = random.Random(self.seed + 1)
        keras.utils.set_random_seed(5)
        inputs = {"a": keras.Input((5,), name="a")}
        x = inputs["a"]
        regularizer = draw.choice([None, None, keras.regularizers.L2(0.01), keras.regularizers.L1L2(0.01, 0.02)])
        activity = draw.choice([None, None, keras.regularizers.L2(0.02)])
        x = keras.layers.Dense(8, "tanh", kernel_regularizer=regularizer, activity_regularizer=activity)(x)
        middle = draw.choice(["none", "none", "normalized", "batch", "penalty", "spectral"])
        self.say(f"middle={middle} regularizer={regularizer and type(regularizer).__name__} activity={activity and 1}")
        if middle == "normalized":
            x = keras.layers.LayerNormalization()(x)
        elif middle == "batch":
            x = keras.layers.BatchNormalization(synchronized=True, momentum=0.8)(x)
        elif middle == "penalty":
            x = Penalty()(x)
        elif middle == "spectral":
            x = keras.layers.SpectralNormalization(keras.layers.Dense(8))(x)
        if "b" in self.train[0]:
            inputs["b"] = keras.Input((4,), dtype="int32", name="b")
            masked = draw.random() < 0.5
            words = keras.layers.Embedding(7, 3, mask_zero=masked)(inputs["b"])
            words = keras.layers.SimpleRNN(4)(words) if masked else keras.layers.GlobalAveragePooling1D()(words)
            x = keras.layers.Concatenate()([x, words])
        ends = {
            name: keras.layers.Dense(3, "softmax", name=name)(x)
            if kind != "number"
            else keras.layers.Dense(2, name=name)(x)
            for name, kind in self.outputs.items()
        }
        model = keras.Model(inputs if len(inputs) > 1 or self.named else inputs["a"],
                            ends if self.named else ends["out0"])  # fmt: skip
        if draw.random() < 0.2:
            model.layers[1].trainable = False
            self.say("frozen")
        return model

    def optimizer(self, draw):
        options = draw.choice([{}, {}, {"clipnorm": 0.5}, {"global_clipnorm": 0.7}, {"clipvalue": 0.05},
                               {"use_ema": True, "ema_momentum": 0.9}, {"weight_decay": 0.01},
                               {"gradient_accumulation_steps": draw.choice([2, 3])}])  # fmt: skip
        rate = draw.choice([0.05, keras.optimizers.schedules.CosineDecay(0.05, 9)])
        kind = draw.choice(
            [keras.optimizers.SGD, keras.optimizers.SGD, keras.optimizers.Nadam, keras.optimizers.RMSprop]
        )
        if kind is keras.optimizers.SGD:
            options = {"momentum": 0.9, "nesterov": draw.random() < 0.3} | options
        else:
            options = {"epsilon": 1e-2} | options  # the sign of a gradient that is nothing but rounding is no number
        self.say(f"{kind.__name__} {options} {'schedule' if not isinstance(rate, float) else ''}")
        optimizer = kind(rate, **options)
        if draw.random() < 0.15:
            self.say("loss scale")
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**7)
        return optimizer, isinstance(rate, float)

    def compiled(self):
        draw = random.Random(self.seed + 2)
        model = self.model()
        optimizer, settable = self.optimizer(draw)
        losses = {name: draw.choice(KINDS[kind]["losses"])() for name, kind in self.outputs.items()}
        chosen = {
            which: {
                name: [m() if callable(m) else m for m in draw.sample(KINDS[kind]["metrics"], draw.choice([0, 1, 2]))]
                for name, kind in self.outputs.items()
            }
            for which in ("metrics", "weighted_metrics")
        }
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
        return model, settable

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
        batches = Batches(whole, self.batch)
        if sets == "loader":
            import torch

            rows = [keras.tree.map_structure(lambda array, i=i: array[i], whole) for i in range(self.length(x))]
            return (torch.utils.data.DataLoader(rows, batch_size=self.batch),), {}
        return (batches[i] for i in range(len(batches))), {}

    @staticmethod
    def length(x):
        return len(keras.tree.flatten(x)[0])

    def run(self):
        self.text = [f"seed {self.seed}: {self.samples} by {self.batch}, {self.outputs}"]
        model, settable = self.compiled()
        draw = random.Random(self.seed + 3)
        kinds = [
            "arrays",
            "arrays",
            "pydataset",
            {"tensorflow": "tf.data", "torch": "loader", "jax": "pydataset"}[BACKEND],
        ]
        sets, weighted = draw.choice(kinds), draw.random() < 0.4
        self.say(f"{sets} {'weighted' if weighted else ''}")
        args, options = self.given(self.train, weighted, sets)
        options |= {"epochs": draw.choice([1, 2, 3]), "verbose": 0, "shuffle": False}
        if sets == "arrays":
            if draw.random() < 0.2 and self.samples > 6:
                options["validation_split"] = 0.3
        if list(self.outputs.values()) == ["class"] and not self.named and sets == "arrays" and not weighted:
            options["class_weight"] = {0: 0.2, 1: 1.0, 2: 3.0}
        if "validation_split" not in options and draw.random() < 0.6:
            held, more = self.given(self.held, draw.random() < 0.5, sets)
            options["validation_data"] = (*held, *([more["sample_weight"]] if "sample_weight" in more else [])) \
                if sets == "arrays" else held[0]  # fmt: skip
            if sets == "arrays" and draw.random() < 0.5:
                options["validation_batch_size"] = draw.choice([1, 4, 7])
            if draw.random() < 0.3:
                options["validation_freq"] = 2
        if draw.random() < 0.2:
            options["initial_epoch"] = 1
        if draw.random() < 0.15 and sets != "arrays":
            options["steps_per_epoch"] = max(1, -(-self.samples // self.batch) // max(2, options["epochs"]))
        seen = []
        options["callbacks"] = [Best(seen)] if settable and draw.random() < 0.3 else []
        if "validation_data" in options and "validation_freq" not in options and draw.random() < 0.3:
            options["callbacks"].append(
                keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10, restore_best_weights=True)
            )
        self.say({k: v for k, v in options.items() if k not in ("validation_data", "sample_weight")})
        history = model.fit(*args, **options).history
        args, more = self.given(self.held, weighted, draw.choice(["arrays", "pydataset"]))
        scores = model.evaluate(*args, verbose=0, return_dict=True, **more)
        outputs = model.predict(args[0] if len(args) > 1 else args[0].arrays[0], batch_size=3, verbose=0)
        return {"history": history, "scores": scores, "outputs": outputs, "seen": len(seen)}, values(model)


def attempt(case):
    try:
        return case.run()
    except Exception as error:  # noqa: BLE001  # what Keras cannot do on one rank is not ours
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("seed", range(*map(int, SEEDS.split(":"))))
def test_a_training_at_random(seed):
    case = Case(seed)
    expected = on_one_rank(lambda: attempt(case))
    if isinstance(expected, str):
        pytest.skip(f"Keras cannot do it on one rank: {expected}")
    results, weights = case.run()
    text = "\n".join(case.text)
    assert_identical(weights)
    for a, b in zip(weights, expected[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5, err_msg=text)
    keras.tree.assert_same_structure(results, expected[0])
    for path, found in keras.tree.flatten_with_path(results):
        wanted = functools.reduce(lambda inside, key: inside[key], path, expected[0])
        # A number that rounding moves past a threshold is another sample counted.
        counts = any(str(key).endswith(COUNTING) for key in path)
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=0.05 if counts else 5e-5, err_msg=f"{path}\n{text}")
