# SPDX-License-Identifier: Apache-2.0
"""Sharded optimizers on JAX: ranks' programs differ, XLA orders each as it likes, and no rank may wait for ever."""

import keras
import numpy as np
import pytest
from sharded_cases import Job, assert_same_bits

import keras_hpc

RANKS = {"jax": (2,)}
SOAK = {"jax": (3, 4)}


def network(make):
    """Returns a network and an optimizer for each of its variables."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((4,))] + [keras.layers.Dense(4, use_bias=False) for _ in range(3)])
    # One variable each, all of it one rank's: it has what it gathers, and what others give needs no gradient.
    optimizers = [make() for _ in range(3)]
    for optimizer, variable in zip(optimizers, model.trainable_variables, strict=True):
        optimizer.build([variable])
    trained = [variable.value for variable in model.trainable_variables]
    return model, optimizers, trained, [[variable.value for variable in o.variables] for o in optimizers]


def gradient(value, x):
    return keras.ops.sin(value * 3.0 + x)


@pytest.mark.parametrize("skips", [False, True], ids=["side by side", "in branches"])
def test_several_optimizers_in_a_program_of_the_users_own(skips):
    import jax

    def make():
        plain = keras.optimizers.SGD(0.1, momentum=0.5)
        return keras.optimizers.LossScaleOptimizer(plain, initial_scale=4.0) if skips else plain

    def train():
        model, optimizers, trained, states = network(make)

        @jax.jit
        def step(trained, states, x):
            done = [
                optimizer.stateless_apply(state, [gradient(value, x)], [value])
                for optimizer, value, state in zip(optimizers, trained, states, strict=True)
            ]
            return [values[0] for values, _ in done], [state for _, state in done]

        for number in range(3):
            trained, states = step(trained, states, np.float32(number + keras_hpc.rank()))
        for variable, value in zip(model.trainable_variables, trained, strict=True):
            variable.assign(value)
        model.optimizer = optimizers[0]
        return model

    assert_same_bits(train)


@pytest.mark.parametrize("inside", [0, 1], ids=["before one outside", "after one outside"])
def test_an_update_in_a_branch_of_the_users_own_is_refused(inside):
    import jax

    if jax.__version_info__ < (0, 6, 2):
        pytest.skip("an older JAX does not tell which program is around another one")
    with Job(True):
        _, optimizers, trained, states = network(lambda: keras.optimizers.SGD(0.1, momentum=0.5))

        @jax.jit
        def step(trained, states, due):
            for number in range(2):
                value, state = trained[number], states[number]

                def update(optimizer=optimizers[number], value=value, state=state):
                    return optimizer.stateless_apply(state, [gradient(value, 1.0)], [value])

                if number == inside:
                    jax.lax.cond(due, update, lambda value=value, state=state: ([value], state))
                else:
                    update()

        with pytest.raises(RuntimeError, match="one order on all ranks"):
            step(trained, states, True)
