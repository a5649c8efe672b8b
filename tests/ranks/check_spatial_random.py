# SPDX-License-Identifier: Apache-2.0
"""Random models in parts train, evaluate and predict as one rank does. `TESTS_SEEDS=100:200` says which.

Most compute with 64 bits, where a difference is an error and not rounding (but of BatchNormalization, losses and
metrics, which have 32 bits in Keras). Those with 32 bits may differ by 1e-5 of the largest number, or by what rounding
alone makes: the difference of one rank from one rank with 64 bits.
"""

import os
import random

import keras
import numpy as np
import pytest
from keras_cases import assert_identical, everyone, on_one_rank, values
from random_models import Maker
from spatial_cases import ranks

import keras_hpc

RANKS = {}
SOAK = {"tensorflow": (2, 3, 4), "jax": (2, 3, 4), "torch": (2, 3, 4)}
TIMEOUT = 1800
TOLERANCE = 1e-5  # of the largest
GRIDS = {2: [2, (1, 2)], 3: [3, (1, 3)], 4: [(2, 2), 4, 2, (1, 2), (1, 4)]}
SEEDS = os.environ.get("TESTS_SEEDS", "0:20" if keras.backend.backend() == "torch" else "0:6")
FIRST, END = map(int, SEEDS.split(":"))


@pytest.fixture(autouse=True)
def _wide():
    """JAX has no 64 bits unless it is told so; other files share this process."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def grid_of(seed, dims):
    """How the ranks are arranged."""
    found = [grid for grid in GRIDS[ranks()] if isinstance(grid, int) or len(grid) <= dims]
    return random.Random(seed + 1).choice(found)


class Case:
    """A model, its data and how it is trained."""

    def __init__(self, seed, grid, dtype):
        self.seed, self.dtype = seed, dtype
        self.random = random.Random(seed + 2)
        self.groups = ranks() // int(np.prod(grid))
        self.min_rows = self.random.choice((1, 1, 2, 4))
        self.loss = self.random.choice(("mse", "mse", "entropy", "sum", "weighted"))
        self.weighs = self.random.choice((None, None, "samples", "positions"))
        self.rows, self.batch = self.random.choice(((7, 4), (5, 4), (3, 2)))
        self.accumulates = self.random.random() < 0.15
        backend = keras.backend.backend()
        self.eager = backend == "tensorflow" and self.random.random() < 0.8

    def model(self):
        keras.utils.set_random_seed(self.seed)
        keras.config.set_floatx(self.dtype)
        keras.config.set_dtype_policy(self.dtype)
        return Maker(self.seed, self.groups > 1).made()

    def data(self, model):
        rng = np.random.default_rng(self.seed)
        masked = any(type(layer) is keras.layers.Masking for layer in model.layers)

        def images(tensor):
            x = rng.normal(size=(self.rows, *tensor.shape[1:])).astype(self.dtype)
            for sample in range(self.rows if masked else 0):
                x[sample, 1 + 5 * sample :] = 0
            return x

        x = [images(tensor) for tensor in model.inputs]
        ys = [rng.random((self.rows, *tensor.shape[1:])).astype(self.dtype) for tensor in model.outputs]
        weights = None
        if self.weighs and len(ys) == 1:
            shape = ys[0].shape[:1] if self.weighs == "samples" else ys[0].shape[:-1]
            weights = rng.random(shape).astype(self.dtype)
        return (x if len(x) > 1 else x[0]), (ys if len(ys) > 1 else ys[0]), weights

    def train(self, initial=None):
        """What `fit`, `evaluate` and `predict` give, and the weights."""
        model = self.model()
        if initial is not None:
            model.set_weights(initial)
        before = values(model)
        losses = keras.losses
        make = {
            "mse": lambda: losses.MeanSquaredError(),
            "entropy": lambda: losses.BinaryCrossentropy(from_logits=True),
            "sum": lambda: losses.MeanSquaredError(reduction="sum"),
            "weighted": lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        }[self.loss]
        metrics = ["mse", keras.metrics.MeanAbsoluteError(name="a")]
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9, global_clipnorm=1.0,
                                 gradient_accumulation_steps=2 if self.accumulates else None),
            make(), weighted_metrics=metrics if len(model.outputs) == 1 else None,
            run_eagerly=self.eager, jit_compile=False if keras.backend.backend() == "tensorflow" else "auto",
        )  # fmt: skip
        self.plan = None
        if not keras_hpc.size() == 1 and not _is_local():
            self.plan = str(keras_hpc.partition(model, min_rows=self.min_rows))
        x, y, weight = self.data(model)
        how = {"batch_size": self.batch, "verbose": 0}
        history = model.fit(x, y, sample_weight=weight, epochs=2, shuffle=False, **how).history
        scores = model.evaluate(x, y, sample_weight=weight, **how)
        outputs = model.predict(x, **how)
        return {
            "history": [np.array(history[name], "float64") for name in sorted(history)],
            "scores": [np.array(scores, "float64")],
            "outputs": [np.asarray(y, "float64") for y in keras.tree.flatten(outputs)],
            "weights": [np.asarray(b, "float64") - a for a, b in zip(before, values(model), strict=True)],
            "bits": values(model),
            "before": before,
        }


def _is_local():
    from keras_hpc.job import current

    return current.is_local()


def difference(found, expected, scales=None):
    """The largest difference of each kind of results, relative to the largest of what is expected."""
    worst = {}
    for kind in ("history", "scores", "outputs", "weights"):
        scale = max([np.abs(b).max(initial=0) for b in expected[kind]] + [1e-3])
        diffs = [np.abs(a - b).max(initial=0) for a, b in zip(found[kind], expected[kind], strict=True)]
        worst[kind] = float(max([d if np.isfinite(d) else np.inf for d in diffs])) / scale
    return worst


@pytest.mark.parametrize("seed", range(FIRST, END))
def test_a_random_model(seed):
    dtype = "float32" if seed % 4 == 0 else "float64"
    dims = Maker(seed, False).dims
    grid = grid_of(seed, dims)
    # Others wait while one rank compiles and trains by itself.
    keras_hpc.init(batch="global", spatial=grid, timeout_seconds=300, stall_seconds=60)
    try:
        case = Case(seed, grid, dtype)

        def alone():
            try:
                first = case.train()
                rounding = dict.fromkeys(("history", "scores", "outputs", "weights"), 0.0)
                if dtype == "float32":
                    exact = Case(seed, grid, "float64").train(first["before"])
                    rounding = difference(first, exact)
                return first, rounding, None
            except Exception as error:  # noqa: BLE001  # whatever it is, it is no fault of parts
                return None, None, f"{type(error).__name__}: {str(error)[:300]}"

        expected, rounding, refused = on_one_rank(alone)
        if refused:
            pytest.skip(f"one rank cannot compute {seed}: {refused}")
        if not all(np.isfinite(a).all() for a in keras.tree.flatten(expected)):
            pytest.skip("not finite on one rank")
        found = case.train()
        assert_identical(found["bits"])
        worst = difference(found, expected)
        allowed = {kind: max(TOLERANCE, 4 * rounding[kind]) for kind in worst}
        said = f"seed {seed}, {dtype}, grid {grid}, {vars(case)}\n{worst}\nallowed {allowed}\n{case.plan}"
        assert all(everyone(all(worst[kind] <= allowed[kind] for kind in worst))), said
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        keras.backend.clear_session()
        keras_hpc.finalize()
