# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401 (a fixture)
"""Local steps against local SGD and DiLoCo's outer step in NumPy, on any number of ranks."""

import functools

import keras
import numpy as np
import pytest
from keras_cases import enough_on, job, part
from linear_cases import BATCH, FEATURES, MOMENTUM, RATE, STEPS, linear, two_teams
from local_cases import LOCAL, LocalSGD, X, Y, check, check_weights, executions, fit, momenta, own_batches, own_loop

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (1, 2)}
SOAK = {"tensorflow": (1, 2, 3), "jax": (1, 2, 3), "torch": (3,)}

pytestmark = pytest.mark.usefixtures("two_teams")


@pytest.mark.parametrize(
    ("arguments", "reference"),
    [
        ({"every": 5, "outer": "nesterov"}, {"every": 5, "outer": (0.7, 0.9)}),
        ({"every": 7, "overlap_steps": 6, "outer": "nesterov"}, {"every": 7, "overlap": 6, "outer": (0.7, 0.9)}),
        *(
            pytest.param(*case, marks=enough_on("torch"))
            for case in (
                ({"every": 5, "average_optimizer": True}, {"every": 5, "average_optimizer": True}),
                (
                    {"every": 1, "outer": "nesterov", "outer_rate": 0.4, "outer_momentum": 0.5},
                    {"every": 1, "outer": (0.4, 0.5)},
                ),
                ({"every": 5, "overlap_steps": 2}, {"every": 5, "overlap": 2}),
            )
        ),
        *(pytest.param({"every": n}, {"every": n}, marks=enough_on()) for n in (1, 5)),
    ],
    ids=str,
)
@enough_on("tensorflow", "torch")
def test_fit_equals_local_sgd(arguments, reference):
    keras_hpc.configure_team(LOCAL, schedule="local", **arguments)
    model = linear()
    fit(model)
    expected = LocalSGD(**reference).train(2 * STEPS)
    check(model, expected)
    for ours, theirs in zip(momenta(model.optimizer), expected.m[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "last", "reference"),
    [(7, 4, (7, 4)), *(pytest.param(*c, marks=enough_on("torch")) for c in ((0.25, 0.5, (6, 12)), (0, 5, (0, 5))))],
)
@enough_on("jax", "torch")
def test_synchronous_beginning_and_end(first, last, reference):
    keras_hpc.configure_team(LOCAL, schedule="local", every=4, synchronous_steps=first, cooldown_steps=last)
    model = linear()
    fit(model)
    check(model, LocalSGD(4).train(2 * STEPS, *reference))


@enough_on("torch")
def test_overlap_before_a_synchronous_end():
    keras_hpc.configure_team(
        LOCAL, schedule="local", every=4, overlap_steps=3, outer="nesterov", outer_rate=0.6, cooldown_steps=3
    )
    model = linear()
    fit(model)
    check(model, LocalSGD(4, overlap=3, outer=(0.6, 0.9)).train(2 * STEPS, 0, 3))


@enough_on("torch")
def test_every_epoch():
    keras_hpc.configure_team(LOCAL, schedule="local", every="epoch")
    model = linear()
    before = executions()
    fit(model, epochs=3)
    check(model, LocalSGD().train(3 * STEPS, settle=(STEPS, 2 * STEPS)))
    assert executions() - before == 3, "one average an epoch, and no gradients"


def noted(method, calls):
    @functools.wraps(method)
    def noting(*args, **kwargs):
        calls.append(method.__name__)
        return method(*args, **kwargs)

    return noting


def test_local_steps_send_nothing(monkeypatch):
    keras_hpc.configure_team(LOCAL, schedule="local", every=4)
    model = linear()
    x, y = part(X, 0, False, BATCH), part(Y, 0, False, BATCH)
    model.train_on_batch(x, y)
    sent, calls = [], []
    team = type(job().teams[LOCAL])
    for name in ("allreduce", "allgather", "broadcast", "alltoall", "meet", "agree", "barrier"):
        monkeypatch.setattr(team, name, noted(getattr(team, name), calls))
    for _ in range(7):
        before = job().teams[LOCAL].report()
        model.train_on_batch(x, y)
        if keras.backend.backend() == "jax":
            model.jax_state_sync()
            keras.ops.convert_to_numpy(model.optimizer.iterations)
        after = job().teams[LOCAL].report()
        sent.append(after["bytes"] - before["bytes"])
    assert calls == [], "nothing but plans communicates"
    weights = 4 * (FEATURES + 1)
    assert sent == [0, 0, weights, 0, 0, 0, weights]
    assert [plan.name.split("/")[-1] for plan in job().teams[LOCAL].plans] == ["weights"], "no plan of gradients"


def test_a_loop_of_the_users_own():
    keras_hpc.configure_team(
        LOCAL, schedule="local", every=3, outer="nesterov", synchronous_steps=2, cooldown_steps=2, max_steps=STEPS - 1
    )
    model = linear()
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)
    keras_hpc.assign_team(optimizer, LOCAL)
    own_loop(model, optimizer)
    # Loops of the user's own give every rank the same weight, unless told otherwise; so parts must be of equal size.
    reference = LocalSGD(3, outer=(0.7, 0.9)).train(STEPS - 1, 2, 2)
    check_weights(model, reference)
    assert int(optimizer.iterations) == STEPS - 1


@enough_on("torch")
def test_samples_in_a_loop_of_the_users_own():
    keras_hpc.configure_team(LOCAL, schedule="local", every="epoch")
    model, optimizer = linear(), keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    keras_hpc.assign_team(optimizer, LOCAL)
    keras_hpc.assign_team(model, LOCAL)
    optimizer.build(model.trainable_variables)
    own_loop(model, optimizer, STEPS)
    keras_hpc.drain(model)
    check_weights(model, LocalSGD().train(STEPS))
    assert int(optimizer.iterations) == STEPS


def test_an_optimizer_of_pytorch():
    if keras.backend.backend() != "torch":
        pytest.skip("an optimizer of torch.optim")
    import torch

    keras_hpc.configure_team(LOCAL, schedule="local", every=5, outer="nesterov")
    model = linear()
    optimizer = torch.optim.SGD([v.value for v in model.trainable_variables], RATE)
    reference = LocalSGD(5, outer=(0.7, 0.9))
    for s, (x, y) in enumerate(own_batches(STEPS)):
        optimizer.zero_grad()
        loss = keras.ops.mean((model(x, training=True) - keras.ops.convert_to_tensor(y)) ** 2)
        loss.backward()
        optimizer.step()
        for m in reference.m:
            m[:] = [np.zeros_like(v) for v in m]
        reference.local(s)
    check_weights(model, reference)
    keras_hpc.drain(model)
    check_weights(model, reference.settle())
