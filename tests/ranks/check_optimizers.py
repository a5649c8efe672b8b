# SPDX-License-Identifier: Apache-2.0
"""LARS and its schedule: against published numbers, NumPy, and one rank that sees the whole batch."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, assert_identical, enough, enough_on, job, on_one_rank, values

import keras_hpc
from keras_hpc.optimizers import LARS
from keras_hpc.schedules import WarmupPolynomial, linear_scaling, square_root_scaling

SOAK = {"tensorflow": (2,), "jax": (2,)}
pytestmark = pytest.mark.usefixtures("global_batches")


def lars_in_numpy(weights, gradients, rates, m=0.9, eta=0.001, b=5e-4, epsilon=0.0, nesterov=False, clip=False):
    """The formula of the paper, step by step, in float64. Takes a list of weights and lists of their gradients."""
    weights = [w.astype("float64") for w in weights]
    velocities = [np.zeros_like(w) for w in weights]
    for rate, step in zip(rates, gradients, strict=True):
        for w, v, g in zip(weights, velocities, step, strict=True):
            trust, decay = 1.0, 0.0
            if w.ndim > 1:
                decay = b
                norms = np.linalg.norm(w), np.linalg.norm(g)
                if min(norms) > 0:
                    trust = eta * norms[0] / (norms[1] + b * norms[0] + epsilon)
                trust = min(trust, 1.0) if clip else trust
            change = rate * trust * (g + decay * w)
            v[...] = m * v + change
            w -= m * v + change if nesterov else v
    return weights


def test_first_step_is_the_published_one():
    w = keras.Variable(np.array([[1.0, 2.0]], "float32"))
    optimizer = LARS(3.0, momentum=0.0, lars_weight_decay=0.0)
    with keras_hpc.local():
        optimizer.apply([keras.ops.convert_to_tensor(np.array([[0.1, 0.1]], "float32"))], [w])
    np.testing.assert_allclose(np.array(w)[0], np.array([1.0, 2.0]) - 0.003 * np.sqrt(5) / np.sqrt(2), rtol=1e-6)


@enough_on("torch")
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": True}, {"clip": True, "eta": 50.0}, {"m": 0.0, "b": 0.0, "epsilon": 1e-3}],
    ids=["defaults", "nesterov", "clip", "plain"],
)
def test_against_numpy(options):
    rng = np.random.default_rng(3)
    shapes = [(4, 3), (3,), (2, 2, 3), (3, 2), ()]
    start = [rng.normal(size=shape).astype("float32") for shape in shapes]
    start[3][...] = 0  # has no norm: moves as with SGD
    gradients = [[rng.normal(size=shape).astype("float32") for shape in shapes] for _ in range(6)]
    gradients[2][0][...] = 0
    variables = [keras.Variable(w) for w in start]
    schedule = WarmupPolynomial(2.0, total_steps=6, warmup_steps=2, initial_learning_rate=0.5)
    names = {"m": "momentum", "eta": "trust_coefficient", "b": "lars_weight_decay"}
    optimizer = LARS(schedule, **{names.get(name, name): value for name, value in options.items()})
    with keras_hpc.local():
        for step in gradients:
            optimizer.apply([keras.ops.convert_to_tensor(g) for g in step], variables)
    rates = [0.5, 1.25, 2.0, *(1.998 * (1 - (s - 2) / 4) ** 2 + 0.002 for s in (3, 4, 5))]
    for variable, wanted in zip(variables, lars_in_numpy(start, gradients, rates, **options), strict=True):
        np.testing.assert_allclose(np.array(variable), wanted, rtol=2e-5, atol=1e-6)


def network():
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def samples(count=48):
    x = np.random.default_rng(0).normal(size=(count, 6)).astype("float32")
    return x, x[:, :1] * x[:, 1:2]


def fitted(**options):
    model = network()
    rate = WarmupPolynomial(0.05, total_steps=12, warmup_steps=3)
    model.compile(LARS(rate, trust_coefficient=0.5, **options), "mse")
    model.fit(*samples(), batch_size=12, epochs=3, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("options", [{}, *enough([{"clipnorm": 0.1}, {"loss_scale_factor": 64.0}], "torch")], ids=str)
@enough_on("torch")
def test_ranks_take_the_step_of_one_rank(options):
    alone = on_one_rank(lambda: values(fitted(**options)))
    together = values(fitted(**options))
    assert_close(together, alone)


@enough_on("torch")
def test_saved_and_loaded_it_goes_on(tmp_path):
    model = fitted(nesterov=True, clip=True, epsilon=1e-5)
    model.save(tmp_path / "model.keras")
    path = job().teams[0].allgather_object(str(tmp_path / "model.keras"))[0]
    keras_hpc.barrier()
    loaded = keras.models.load_model(path)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for one in (model, loaded):
        one.fit(*samples(), batch_size=12, shuffle=False, verbose=0)
    assert_identical(values(loaded), values(model))


@enough_on("torch")
def test_schedule():
    schedule = WarmupPolynomial(40.0, total_steps=100, warmup_steps=12, initial_learning_rate=0.1)
    found = [float(schedule(step)) for step in (0, 6, 12, 56, 100, 500)]
    assert found == pytest.approx([0.1, 20.05, 40.0, 39.96 / 4 + 0.04, 0.04, 0.04], rel=1e-5)
    copy = WarmupPolynomial.from_config(schedule.get_config())
    assert [float(copy(step)) for step in (5, 50)] == [float(schedule(step)) for step in (5, 50)]
    assert float(WarmupPolynomial(1.0, total_steps=10, power=1.0, end_learning_rate=0.5)(5)) == pytest.approx(0.75)


def test_scaling_rules():
    assert linear_scaling(0.1) == pytest.approx(0.1 * job().size)
    assert square_root_scaling(0.1) == pytest.approx(0.1 * job().size ** 0.5)
    assert (linear_scaling(0.1, 8), square_root_scaling(0.1, 16)) == pytest.approx((0.8, 0.4))


@enough_on("torch")
@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda: LARS(1.0, momentum=1.0), "momentum=1.0"),
        (lambda: LARS(1.0, trust_coefficient=0), "trust_coefficient=0"),
        (lambda: LARS(1.0, weight_decay=0.1), "weight_decay"),
        (lambda: WarmupPolynomial(1.0, total_steps=5, warmup_steps=5), "warmup_steps=5"),
        (lambda: WarmupPolynomial(-1.0, total_steps=5), "peak_learning_rate=-1.0"),
        (lambda: WarmupPolynomial(float("nan"), total_steps=5), "peak_learning_rate=nan"),
        (lambda: linear_scaling(0.1, 0), "factor=0"),
        (lambda: linear_scaling(0.1, float("nan")), "factor=nan"),
    ],
)
def test_bad_arguments(make, received):
    with pytest.raises(ValueError, match=f"Expected .*Received: .*{received}"):
        make()
