# SPDX-License-Identifier: Apache-2.0
"""Sharded optimizers: weights have the same bits as unsharded, and each rank keeps its part of the state."""

import keras
import numpy as np
import pytest
from keras_cases import enough, enough_on, everyone
from mpi4py import MPI
from sharded_cases import Job, X, Y, assert_same_bits, compiled, fit, network, state_of

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (3,)}
SOAK = {"tensorflow": (3,), "jax": (3,), "torch": (2,)}

several = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="one rank shares nothing out")

OPTIMIZERS = {
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "lion": lambda: keras.optimizers.Lion(0.003),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lars": lambda: keras_hpc.optimizers.LARS(0.5, trust_coefficient=0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "muon": lambda: keras.optimizers.Muon(0.01, exclude_layers=["output"]),
}
NEWER = {}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # whose momenta begin with the weights
    NEWER["schedule free"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.01)
MAIN = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
}
OPTIONS = {
    "clipvalue": {"clipvalue": 0.01},
    "clipnorm": {"clipnorm": 0.1},
    "loss scale": {"loss_scale_factor": 64.0},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)},
    "average": {"use_ema": True, "ema_momentum": 0.8},
    "global norm": {"global_clipnorm": 0.1, "weight_decay": 0.01},
    "accumulation": {"gradient_accumulation_steps": 3},
    "average that overwrites": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
}


@pytest.mark.parametrize("name", [*enough(OPTIMIZERS), *enough(NEWER | MAIN, "torch")])
def test_optimizer(name):
    assert_same_bits(lambda: fit(compiled((OPTIMIZERS | NEWER | MAIN)[name]())))


@enough_on("torch")
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="compiled steps keep their momentum")
def test_momentum_that_ends():
    def train():
        model = fit(compiled(OPTIMIZERS["nesterov"]()), epochs=1)
        model.optimizer.momentum = 0.0
        return fit(model, epochs=1)

    assert_same_bits(train)


@pytest.mark.parametrize("name", enough(OPTIONS))
def test_option(name):
    options = {"learning_rate": 0.01} | OPTIONS[name]
    assert_same_bits(lambda: fit(compiled(keras.optimizers.Adam(**options))))


@enough_on()
def test_all_options_at_once():
    names = ("loss scale", "schedule", "global norm", "accumulation", "average that overwrites")
    options = {name: value for option in names for name, value in OPTIONS[option].items()}
    assert_same_bits(lambda: fit(compiled(keras.optimizers.RMSprop(momentum=0.5, centered=True, **options))))


@pytest.mark.parametrize("name", ["scaled gradients", pytest.param("one variable on a rank", marks=enough_on())])
def test_compilers_multiply_in_the_same_order(name):
    def train():
        if name == "scaled gradients":
            rates = {"learning_rate": 0.037, "momentum": 0.7, "loss_scale_factor": 10.0}
            return fit(compiled(keras.optimizers.SGD(nesterov=True, **rates)), epochs=1)
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(units, use_bias=False) for units in (64, 3)]
        optimizer = keras.optimizers.RMSprop(OPTIONS["schedule"]["learning_rate"])
        return fit(compiled(optimizer, keras.Sequential([keras.Input((6,)), *layers])), epochs=1)

    assert_same_bits(train)


@enough_on("torch")
def test_excluded_from_decay_and_constrained():
    def train():
        model = network(kernel_constraint=keras.constraints.MaxNorm(0.3))
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
        # The kernel that is cut: a stand-in is known by its variable.
        optimizer.exclude_from_weight_decay([model.layers[1].kernel])
        return fit(compiled(optimizer, model))

    assert_same_bits(train)


@enough_on("torch")
@pytest.mark.parametrize("name", ["lamb", *enough(["adam"])])  # whole, and cut
def test_kernels_that_lie_in_columns(name):
    """As PyTorch leaves orthogonal ones; in rows they would have other norms and products, in the last bits."""

    def train():
        model = compiled((OPTIMIZERS | MAIN)[name](), network(kernel_initializer="orthogonal"))
        before = layout(model)
        fit(model, epochs=6)
        assert layout(model) == before
        return model

    def layout(model):
        return [v.value.stride() for v in model.weights] if keras.backend.backend() == "torch" else None

    assert_same_bits(train)


@enough_on("torch")
def test_constraints_hold_after_each_micro_batch():
    """Whoever updates a kernel constrains it, before others get it at the next update; the second one is cut."""

    def train():
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(n, kernel_constraint=keras.constraints.UnitNorm()) for n in (37, 11, 3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        return fit(compiled(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3), model))

    assert_same_bits(train)


@enough_on()
def test_loss_scale_that_skips_steps():
    def train():
        # The first scales make infinities, so the first updates are skipped.
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**127)
        model = compiled(optimizer)
        model.fit(1000 * X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        model.steps = 3 * -(-52 // (4 * keras_hpc.size()))
        return model

    model = assert_same_bits(train)
    assert 0 < int(model.optimizer.iterations) < model.steps


@enough_on("torch")
@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none")
def test_several_optimizers_in_one():
    def train():
        kernels, rest = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.5)
        return fit(compiled(keras.optimizers.MultiOptimizer(lambda v: kernels if "kernel" in v.path else rest)))

    assert_same_bits(train)


@enough_on("tensorflow")
@pytest.mark.parametrize("rows", [400, *enough([40])], ids=["cut between rows", "not cut"])
def test_embedding(rows):
    def train():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Embedding(rows, 32), keras.layers.Flatten()])
        if rows == 40:
            model.add(keras.layers.Dense(64))
        model.add(keras.layers.Dense(3))
        compiled(keras.optimizers.Adam(0.01), model)
        words = np.random.default_rng(1).integers(0, rows, (52, 6)) // 3
        model.fit(words, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model

    assert_same_bits(train)


@enough_on()
def test_batch_by_batch():
    def train():
        model = compiled(keras.optimizers.Adam(0.01))
        for step in range(4):
            part = slice(step * 8, step * 8 + 8)
            model.train_on_batch(X[part], Y[part])
        return model

    assert_same_bits(train)


def gradients_of(model, x):
    """Returns something to apply: functions of weights and of this rank."""
    scale = 1.0 + keras_hpc.rank()
    return [keras.ops.convert_to_tensor(np.sin(np.array(v) * 3 + x) * scale) for v in model.trainable_variables]


@enough_on("torch")
def test_loop_of_the_users_own():
    def train():
        model = network()
        model.optimizer = keras.optimizers.Adam(0.01)
        for step in range(4):
            gradients = gradients_of(model, step)
            if step % 2:
                model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            else:
                model.optimizer.apply(gradients, model.trainable_variables)
        return model

    assert_same_bits(train)


@enough_on()
def test_compiled_loop_of_the_users_own():
    def in_tensorflow(model, optimizer):
        import tensorflow as tf

        @tf.function
        def step(x):
            gradients = [tf.sin(v * 3.0 + x) for v in model.trainable_variables]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for number in range(4):
            step(tf.constant(number + keras_hpc.rank(), tf.float32))

    def in_jax(model, optimizer):
        import jax

        @jax.jit
        def step(trained, state, x):
            gradients = [jax.numpy.sin(v * 3.0 + x) for v in trained]
            return optimizer.stateless_apply(state, gradients, trained)

        optimizer.build(model.trainable_variables)
        trained, state = ([v.value for v in vs] for vs in (model.trainable_variables, optimizer.variables))
        for number in range(4):
            trained, state = step(trained, state, float(number + keras_hpc.rank()))
        for variable, value in zip(model.trainable_variables, trained, strict=True):
            variable.assign(value)
        for variable, value in zip(optimizer.variables, state, strict=True):
            variable.assign(value)

    def train():
        model = network()
        model.optimizer = keras.optimizers.RMSprop(0.01)
        loop = {"tensorflow": in_tensorflow, "jax": in_jax}[keras.backend.backend()]
        loop(model, model.optimizer)
        return model

    if keras.backend.backend() != "torch":  # which compiles none
        assert_same_bits(train)


@pytest.mark.parametrize("name", [*enough(["adam"], "torch"), *enough(["rmsprop", "adafactor"])])
def test_each_rank_keeps_its_part(name):
    def train():
        keras.utils.set_random_seed(5)
        # Adafactor's are not cut: of 12 like ones 2, 3 and 4 ranks have as many.
        model = keras.Sequential([keras.Input((128,)), *(keras.layers.Dense(128) for _ in range(12))])
        model.compile(MAIN[name](), "mse")
        model.fit(np.ones((16, 128)), np.ones((16, 128)), batch_size=4, verbose=0)
        return sum(array.nbytes for array in state_of(model.optimizer))

    with Job(False):
        whole = train()
    with Job(True) as job:
        share = whole / job.size
        for held in everyone(train()):
            assert held == pytest.approx(share, rel=0.05)


@pytest.mark.parametrize(
    ("make", "options", "alone"),
    [
        (keras.optimizers.Adam, {}, True),
        pytest.param(keras.optimizers.Adam, {"clipvalue": 0.1}, True, marks=enough_on()),
        pytest.param(keras.optimizers.Adam, {"global_clipnorm": 1.0}, False, marks=enough_on("torch")),
        pytest.param(keras.optimizers.SGD, {"momentum": 0.5}, True, marks=enough_on()),
        pytest.param(keras.optimizers.SGD, {}, False, marks=enough_on("torch")),  # keeps nothing to share out
    ],
    ids=["adam", "clipvalue", "global norm", "momentum", "nothing kept"],
)
@several
def test_gradients_go_only_to_whoever_updates_with_them(make, options, alone):
    with Job(True) as job:
        fit(compiled(make(**options)), epochs=1)
        (plan,) = (p for p in job.teams[0].plans if p.op == "mean" and p.tensors[0].shape)
        parameters = [t for t in plan.tensors if "came" not in t.name]
        assert len(parameters) == 6
        assert all(bool(t.takers) == alone for t in parameters)
        assert not alone or {rank for t in parameters for _, rank in t.takers} == set(range(job.size))


@several
@enough_on("torch")
def test_what_cannot_be_sharded_is_refused():
    class Across(keras.optimizers.SGD):
        def _clip_gradients(self, grads):
            return super()._clip_gradients(grads)

    class Unknown(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.buffer = self.add_variable((3,), name="buffer")

    class Fine(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient * 2, variable, learning_rate)

    assert_same_bits(lambda: fit(compiled(Fine(0.01))))
    with Job(True):
        with pytest.raises(ValueError, match="schedule='pipelined'"):
            keras_hpc.configure_team(0, schedule="pipelined", synchronous_steps=1)
        for optimizer, message in (
            (Across(0.1), "Received: Across"),
            (Unknown(0.1), "Received: Unknown with `.*buffer"),
        ):
            with pytest.raises(ValueError, match=message):
                fit(compiled(optimizer))
        for callback in (
            keras.callbacks.BackupAndRestore("backup"),
            keras.callbacks.ModelCheckpoint("model.keras", save_freq=3),
            keras.callbacks.SwapEMAWeights(),
        ):
            with pytest.raises(ValueError, match=f"Received: {type(callback).__name__}"):
                fit(compiled(keras.optimizers.Adam(use_ema=True)), callbacks=[callback])
        model = network()
        with keras_hpc.local():
            compiled(keras.optimizers.Adam(), model)
            fit(model)  # for this rank alone: whole
        keras_hpc.broadcast(model)
        with pytest.raises(RuntimeError, match="was built before"):
            fit(model)
        model = fit(compiled(keras.optimizers.Adam()))
        with keras_hpc.local(), pytest.raises(RuntimeError, match="needs all ranks"):
            model.optimizer.apply(gradients_of(model, 0), model.trainable_variables)
