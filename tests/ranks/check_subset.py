# SPDX-License-Identifier: Apache-2.0
"""Teams of some of the ranks: their models are broadcast, reduced and shared out among those alone."""

import keras
import numpy as np
import pytest
from keras_cases import data, dense, job

import keras_hpc

RANKS = {"torch": (3,)}  # which ranks communicate is no matter of the backend
SOAK = {"tensorflow": (3,), "jax": (3,)}
# Ranks 0 and 2 train one model, rank 1 another, at the same time.
MEMBERS = {1: [0, 2], 2: [1]}


@pytest.fixture(autouse=True)
def _job():
    keras_hpc.init(teams=3, batch="global", wire_dtype="bfloat16")
    yield
    keras_hpc.finalize()


def compiled(seed):
    model = dense(seed)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(model, **kwargs):
    x, y = data()
    return model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0, **kwargs).history


@pytest.mark.parametrize("schedule", ["synchronous", "pipelined"])
def test_two_groups_train_two_models(schedule):
    if keras_hpc.size() != 3:
        pytest.skip("the groups are of three ranks")
    for team, ranks in MEMBERS.items():
        keras_hpc.configure_team(team, ranks=ranks, schedule=schedule)
    mine = next(team for team, ranks in MEMBERS.items() if keras_hpc.rank() in ranks)
    assert (job().teams[mine].size, job().teams[mine].rank) == {0: (2, 0), 1: (1, 0), 2: (2, 1)}[keras_hpc.rank()]
    assert job().teams[mine].wire_dtype == "bfloat16", "what init() was told"
    # Weights differ until the team's first rank gives its own.
    model = compiled(10 * mine + keras_hpc.rank())
    keras_hpc.assign_team(model, mine)
    x, y = data()
    history = train(model, validation_data=(x, y))
    outputs = model.predict(x, verbose=0)

    if schedule == "synchronous":
        with keras_hpc.local():
            alone = compiled(10 * mine + MEMBERS[mine][0])
            expected = train(alone, validation_data=(x, y))
            expected_outputs = alone.predict(x, verbose=0)
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
        for a, b in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
    keras_hpc.check_replicas(model, team=mine)
    assert keras_hpc.allreduce(1, "sum", team=mine) == len(MEMBERS[mine])
    assert keras_hpc.allreduce(1, "sum") == 3


def test_other_ranks_may_not_use_it():
    if keras_hpc.size() != 3:
        pytest.skip("the groups are of three ranks")
    keras_hpc.configure_team(1, ranks=[0, 2])
    model = compiled(1)
    keras_hpc.assign_team(model, 1)
    if keras_hpc.rank() == 1:
        with pytest.raises(ValueError, match=r"one of the ranks 0, 2\. Received: rank 1"):
            train(model)
        with pytest.raises(ValueError, match="Received: rank 1"):
            keras_hpc.allreduce(1.0, team=1)
    else:
        train(model)
    with pytest.raises(ValueError, match="gets its ranks once"):  # on all ranks alike, so none waits for another
        keras_hpc.configure_team(1, ranks=[0, 1])
    keras_hpc.barrier()


@pytest.mark.parametrize(("team", "ranks"), [(0, [0]), (1, []), (1, [1, 0]), (1, [0, 0]), (1, [99])])
def test_wrong_ranks(team, ranks):
    with pytest.raises(ValueError, match=r"Received: team=\d, ranks="):
        keras_hpc.configure_team(team, ranks=ranks)
