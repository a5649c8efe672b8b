# SPDX-License-Identifier: Apache-2.0
"""Random models in parts train, evaluate and predict as one rank does. `TESTS_SEEDS=100:200` says which.

Most compute with 64 bits, where a difference is an error and not rounding (but of losses and metrics, which have 32
bits in Keras, as BatchNormalization has, too, unless it is told otherwise here). Those with 32 or 16 bits may differ by
1e-5 of the largest number, or by what rounding alone makes: the difference of one rank from one rank with 64 bits.
Where one rank fails, the seed is skipped.
"""

import os
import random

import keras
import numpy as np
import pytest
from keras_cases import Parts, assert_identical, everyone, on_one_rank, values
from random_models import Maker
from spatial_cases import ranks

import keras_hpc

BaseConv = keras.layers.Conv1D.__base__
RANKS = {}
SOAK = {"tensorflow": (2, 3, 4), "jax": (2, 3, 4), "torch": (2, 3, 4)}
TIMEOUT = 1800
TOLERANCE = 1e-5  # of the largest
GRIDS = {2: [2, (1, 2)], 3: [3, (1, 3)], 4: [(2, 2), 4, 2, (1, 2), (1, 4)]}
SEEDS = os.environ.get("TESTS_SEEDS", "0:20" if keras.backend.backend() == "torch" else "0:6")
FIRST, END = map(int, SEEDS.split(":"))


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """JAX and BatchNormalization have no 64 bits unless they are told so; other files share this process."""
    narrow = keras.backend.result_type

    def wide(*dtypes):
        return "float64" if "float64" in dtypes else narrow(*dtypes)

    monkeypatch.setattr(keras.src.backend, "result_type", wide)
    monkeypatch.setattr(keras.backend, "result_type", wide)
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
    """A model, its data and how it is trained.

    Args:
        seed: of all of it.
        grid: how the ranks of a group are arranged.
        policy: how layers compute: "float64", "float32", "mixed_bfloat16" or "mixed_float16".
    """

    def __init__(self, seed, grid, policy):
        self.seed, self.policy = seed, policy
        self.dtype = "float64" if policy == "float64" else "float32"
        self.random = random.Random(seed + 2)
        self.groups = ranks() // int(np.prod(grid))
        self.min_rows = self.random.choice((1, 1, 2, 4))
        self.loss = self.random.choice(("mse", "mse", "entropy", "sum", "weighted"))
        self.weighs = self.random.choice((None, None, "samples", "positions"))
        self.rows, self.batch = self.random.choice(((7, 4), (5, 4), (3, 2), (3, 1)))
        self.accumulates = self.random.random() < 0.15
        self.adapts = self.random.random() < 0.15  # by LoRA
        self.freezes = self.random.random() < 0.15
        self.validates = self.random.random() < 0.3
        self.feed = self.random.choice(("arrays", "arrays", "batches"))
        self.clips = self.random.choice(({}, {"global_clipnorm": 1.0}, {"clipnorm": 0.5}, {"clipvalue": 0.1}))
        backend = keras.backend.backend()
        self.eager = backend == "tensorflow" and self.random.random() < 0.8
        if backend == "tensorflow" and policy == "float64" and "global_clipnorm" in self.clips:
            self.clips = {"clipnorm": 0.5}  # Keras cannot clip gradients of 32 and 64 bits together there

    def model(self):
        keras.utils.set_random_seed(self.seed)
        keras.config.set_floatx(self.dtype)
        keras.config.set_dtype_policy(self.policy)
        model = Maker(self.seed, self.groups > 1).made()
        chooser = random.Random(self.seed + 3)
        for layer in model._flatten_layers():
            if self.adapts and isinstance(layer, (keras.layers.Dense, BaseConv)) and chooser.random() < 0.5:
                layer.enable_lora(2)
        for layer in model.layers:
            if self.freezes and chooser.random() < 0.3:
                layer.trainable = False
        return model

    def data(self, model):
        rng = np.random.default_rng(self.seed)
        masked = any(type(layer) is keras.layers.Masking for layer in model.layers)

        def images(tensor):
            x = rng.normal(size=(self.rows, *tensor.shape[1:])).astype(self.dtype)
            for sample in range(self.rows if masked and len(tensor.shape) > 2 else 0):
                x[sample, 1 + 5 * sample :] = 0
            return x

        x = [images(tensor) for tensor in model.inputs]
        ys = [rng.random((self.rows, *tensor.shape[1:])).astype(self.dtype) for tensor in model.outputs]
        weights = None
        # On PyTorch Keras 3.15 multiplies weights in place by a mask's share.
        if self.weighs and not (masked and keras.backend.backend() == "torch"):
            # Keras does not broadcast weights of samples over two axes.
            ones = [(1,) * (len(y.shape) - 2) if len(y.shape) > 3 else () for y in ys]
            shapes = [
                (y.shape[0], *one) if self.weighs == "samples" else y.shape[:-1]
                for y, one in zip(ys, ones, strict=True)
            ]
            weights = [rng.random(shape).astype(self.dtype) for shape in shapes]
        return (x if len(x) > 1 else x[0]), *((a if a is None or len(a) > 1 else a[0]) for a in (ys, weights))

    def compiled(self, model):
        """The model with losses, metrics and an optimizer."""
        losses, count = keras.losses, len(model.outputs)
        make = {
            "mse": lambda: losses.MeanSquaredError(),
            "entropy": lambda: losses.BinaryCrossentropy(from_logits=True),
            "sum": lambda: losses.MeanSquaredError(reduction="sum"),
            "weighted": lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        }
        kinds = [self.loss, "mse", "entropy"][:count]

        def metrics():
            return ["mse", keras.metrics.MeanAbsoluteError(name="a")]

        steps = 2 if self.accumulates else None
        optimizer = keras.optimizers.SGD(0.02, momentum=0.9, gradient_accumulation_steps=steps, **self.clips)
        if self.policy == "mixed_float16":  # 2**15 is too large where several ranks' gradients are added up
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**8)
        model.compile(
            optimizer,
            make[self.loss]() if count == 1 else [make[kind]() for kind in kinds],
            loss_weights=None if count == 1 else [1.0, 0.5, 2.0][:count],
            weighted_metrics=metrics() if count == 1 else [metrics() for _ in kinds],
            run_eagerly=self.eager, jit_compile=False if keras.backend.backend() == "tensorflow" else "auto",
        )  # fmt: skip

    def train(self, initial=None):
        """What `fit`, `evaluate` and `predict` give, and the weights."""
        model = self.model()
        if initial is not None:
            model.set_weights(initial)
        before = values(model)
        self.compiled(model)
        self.plan = None
        if not keras_hpc.size() == 1 and not _is_local():
            self.plan = str(keras_hpc.partition(model, min_rows=self.min_rows))
        x, y, weight = self.data(model)
        how = {"batch_size": self.batch, "verbose": 0}
        validation = {"validation_data": (x, y), "validation_batch_size": self.batch} if self.validates else {}
        if self.feed == "batches":
            given = (tuple(a) if isinstance(a, list) else a for a in (x, y, weight) if a is not None)  # for TensorFlow
            data = Parts(*given, batch=self.batch, whole=True)
            history = model.fit(data, epochs=2, shuffle=False, verbose=0, **validation).history
        else:
            history = model.fit(x, y, sample_weight=weight, epochs=2, shuffle=False, **how, **validation).history
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


def policy_of(seed):
    """Most have 64 bits."""
    if seed % 10 == 3:
        return ("mixed_bfloat16", "mixed_float16")[seed // 10 % 2]
    return "float32" if seed % 4 == 0 else "float64"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of softmax over one channel, of variables without gradients
@pytest.mark.parametrize("seed", range(FIRST, END))
def test_a_random_model(seed):
    pytest.importorskip("tensorflow")  # for Rescaling and Resizing
    policy = policy_of(seed)
    dims = Maker(seed, False).dims
    grid = grid_of(seed, dims)
    # Others wait while one rank compiles and trains by itself.
    keras_hpc.init(batch="global", spatial=grid, timeout_seconds=300, stall_seconds=60)
    try:
        case = Case(seed, grid, policy)

        def alone():
            try:
                first = case.train()
                rounding = dict.fromkeys(("history", "scores", "outputs", "weights"), 0.0)
                if policy != "float64":
                    exact = Case(seed, grid, "float64").train(first["before"])
                    rounding = difference(first, exact)
                    assert all(np.isfinite(list(rounding.values()))), "64 bits are not finite"
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
        if "mixed" in policy:  # of two numbers of 16 bits one may be right by chance
            rounding = dict.fromkeys(rounding, max(rounding.values()))
        allowed = {kind: max(TOLERANCE, 4 * rounding[kind]) for kind in worst}
        said = f"seed {seed}, {policy}, grid {grid}, {vars(case)}\n{worst}\nallowed {allowed}\n{case.plan}"
        assert all(everyone(all(worst[kind] <= allowed[kind] for kind in worst))), said
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        keras.backend.clear_session()
        keras_hpc.finalize()
