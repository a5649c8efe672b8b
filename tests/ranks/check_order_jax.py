# SPDX-License-Identifier: Apache-2.0
"""Plans of a step on JAX end in one order on all ranks, whatever XLA makes of it."""

import keras
import numpy as np
import pytest
from keras_cases import enough
from random_steps import OwnStep

import keras_hpc

RANKS = {"jax": (2,)}
SOAK = {"jax": (2,)}
pytestmark = pytest.mark.usefixtures("global_batches")


def norm():
    return keras.layers.BatchNormalization(synchronized=True)


def branches(x):
    """Layers whose reductions depend on no order, forward or backward."""
    return [norm()(keras.layers.Dense(3)(x)) for _ in range(3)]


def one_output(cls=keras.Model):
    inputs = keras.Input((4,))
    model = cls(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(branches(inputs))))
    model.compile("sgd", "mse")
    return model


def own_step():
    return one_output(OwnStep)


def several_outputs():
    """Losses that ask for the other ranks' samples, or divide by what other ranks have."""
    inputs = keras.Input((4,))
    outputs = {f"out{i}": keras.layers.Dense(1, name=f"out{i}")(x) for i, x in enumerate(branches(inputs))}
    model = keras.Model(inputs, outputs)
    losses = ["mse", keras.losses.MeanSquaredError("sum"), keras.losses.MeanSquaredError("mean_with_sample_weight")]
    model.compile("adam", dict(zip(outputs, losses, strict=True)))
    return model


class Adversary(keras.Model):
    """Two optimizers; what one of them averages, and what the other's network exchanges, depend on no order."""

    def __init__(self):
        super().__init__()
        self.one, self.other = one_output(), one_output()
        self.second = keras.optimizers.SGD(0.1)

    def build(self, shape):
        self.second.build(self.other.trainable_variables)

    def call(self, x, training=False):
        return self.one(x, training=training) + self.other(x, training=training)

    def train_step(self, state, data):
        import jax

        trainable, others, optimizer, metrics = state
        x, y = data[:2]

        def loss_of(trainable, others):
            y_pred, others = self.stateless_call(trainable, others, x, training=True)
            return keras.ops.mean(keras.ops.square(y - y_pred)), others

        fake, _ = self.stateless_call(trainable, others, x, training=True)  # of which no gradient is asked
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, others)
        (_, others), more = jax.value_and_grad(loss_of, has_aux=True)(trainable, others)
        half = len(gradients) // 2
        state = [v.value for v in self.second.variables]
        new, _ = self.second.stateless_apply(state, more[half:], trainable[half:])
        mine = [*gradients[:half], *map(keras.ops.zeros_like, gradients[half:])]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, mine, [*trainable[:half], *new])
        return {"loss": loss + keras.ops.mean(fake)}, (trainable, others, optimizer, metrics)


def two_optimizers():
    model = Adversary()
    model(np.zeros((1, 4), "float32"))
    model.compile(keras.optimizers.SGD(0.1))
    model.optimizer.build(model.trainable_variables)
    return model


class Asking(keras.Model):
    """Asks for a mean that needs no gradient, after the update."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {"loss": keras_hpc.allreduce(logs["loss"])}, state


def asking():
    return one_output(Asking)


def ends(jaxpr, known, found):
    """Appends to `found` the plans and calls that a program ends, each with those that end before it.

    Args:
        jaxpr: the program.
        known: of each variable, the plans of whose results it is made.
        found: pairs of a plan, and those before.

    Returns:
        Of each of its results, the plans.
    """

    def of(atoms):
        return frozenset().union(*(known.get(atom, ()) for atom in atoms if not hasattr(atom, "val")))

    for eqn in jaxpr.eqns:
        before = of(eqn.invars)
        results = [before] * len(eqn.outvars)
        if eqn.params.get("target") == "khpc_jax_done":
            found.append((eqn.params["plan"], before))
            results = [before | {eqn.params["plan"]}] * len(eqn.outvars)
        elif eqn.primitive.name == "keras_hpc_allreduce":
            found.append((eqn.params["what"], before))
            results = [before | {eqn.params["what"]}] * len(eqn.outvars)
        inner = next((eqn.params[name] for name in ("call_jaxpr", "jaxpr", "fun_jaxpr") if name in eqn.params), None)
        if inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            inside = {variable: of([atom]) for variable, atom in zip(inner.invars, eqn.invars, strict=True)}
            results = ends(inner, inside, found)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [of([atom]) for atom in jaxpr.outvars]


@pytest.mark.parametrize("make", [one_output, own_step, *enough([several_outputs, asking, two_optimizers])])
def test_each_plan_ends_after_the_one_before(make):
    """Ranks with other numbers of samples have other programs, in which independent plans may come in another order."""
    import jax

    model = make()
    x, y = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
    y = {name: y for name in model.output_names} if make is several_outputs else y
    model.fit(x, y, batch_size=16, verbose=0)  # makes the function
    state = model._get_jax_state(
        trainable_variables=True, non_trainable_variables=True, optimizer_variables=True, metrics_variables=True
    )
    data = keras.tree.map_structure(lambda rows: rows[:8], (x, y))
    program = jax.make_jaxpr(lambda state: model.train_function(state, iter([data])))(state)
    found = []
    ends(program.jaxpr, {}, found)
    plans = [plan for plan, _ in found]
    assert len(plans) >= 7  # three forward, three backward, and gradients
    assert len(set(plans)) == len(plans)
    for earlier, (plan, before) in zip(plans, found[1:], strict=False):
        assert earlier in before, f"plan {plan} of {plans} may end before plan {earlier}"


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled by itself"])
def test_an_optimizer_updates_twice_in_a_program(compiled):
    """The gradient of a Wasserstein critic's last bias depends on no weight, so it exists before the first update."""
    import jax

    critic = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(critic.trainable_variables)

    def loss_of(trainable, x):
        y, _ = critic.stateless_call(trainable, [], x)
        return y.mean() - critic.stateless_call(trainable, [], 2 * x)[0].mean()

    def update(trainable, state, x):
        gradients = jax.grad(loss_of)(trainable, x)
        return optimizer.stateless_apply(state, gradients, trainable)

    once = jax.jit(update) if compiled else update

    @jax.jit
    def step(trainable, state, x):
        for _ in range(3):
            trainable, state = once(trainable, state, x)
        return trainable, state

    x = np.random.default_rng(keras_hpc.rank()).normal(size=(8, 2)).astype("float32")
    trainable = [v.value for v in critic.trainable_variables]
    expected, everyone = trainable, keras_hpc.allgather(x)
    trainable, _ = step(trainable, [v.value for v in optimizer.variables], x)
    for _ in range(3):
        expected = [w - 0.1 * g for w, g in zip(expected, jax.grad(loss_of)(expected, everyone), strict=True)]
    for ours, theirs in zip(trainable, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
