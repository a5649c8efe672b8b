# SPDX-License-Identifier: Apache-2.0
"""`init(check_replicas_every=n)`: a bit that flips in one rank's memory is found; healthy training is left alone."""

import keras
import numpy as np
import pytest
from keras_cases import enough_on, job

import keras_hpc

RANKS = {"jax": (2,), "torch": (2,)}  # JAX keeps the state outside of the model, the others in it
SOAK = {"tensorflow": (2,), "jax": (2,)}


@pytest.fixture(autouse=True)
def _job():
    keras_hpc.init(check_replicas_every=3)
    yield
    keras_hpc.finalize()


def compiled(**options):
    keras.utils.set_random_seed(job().rank)
    layers = [
        keras.layers.Dense(5),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def samples(count):
    x = np.random.default_rng(0).normal(size=(count, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


class Flip(keras.callbacks.Callback):
    """Flips a bit of a number on the last rank, once a step has ended: low, but not so low that rounding heals it."""

    def __init__(self, step, variable, at_once=1):
        super().__init__()
        # Keras before 3.12 names the first of several steps that run at once, later ones the last.
        self.steps, self.variable = (step, step + 1 - at_once), variable

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 not in self.steps:
            return
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()  # which every rank may do, and changes nothing
        if job().rank == job().size - 1:
            variable = self.variable(self.model)
            value = np.array(keras.ops.convert_to_numpy(variable))
            value.reshape(-1).view(np.uint32)[2] ^= 1 << 12
            variable.assign(value)


@pytest.mark.parametrize(
    "variable", [lambda model: model.layers[0].kernel, lambda model: model.optimizer._momentums[0]]
)
def test_a_flipped_bit_is_found_and_named(variable):
    model = compiled()
    size = job().size
    others = "" if size == 2 else "s"
    # A wrong momentum makes a wrong weight.
    wanted = rf"differ after step 6: variable '.*dense.*/kernel' .* on rank {size - 1} than on the other{others}\."
    with pytest.raises(keras_hpc.ReplicaMismatchError, match=wanted):
        model.fit(*samples(40 * size), batch_size=4, shuffle=False, verbose=0, callbacks=[Flip(4, variable)])


def test_found_in_steps_at_once_and_one_by_one():
    size = job().size
    if keras.backend.backend() != "torch":  # where Keras refuses several steps per execution
        model = compiled(steps_per_execution=2)
        flip = Flip(2, lambda model: model.layers[0].kernel, at_once=2)
        with pytest.raises(keras_hpc.ReplicaMismatchError, match=r"after step 4:"):
            model.fit(*samples(40 * size), batch_size=4, shuffle=False, verbose=0, callbacks=[flip])

    model = compiled()
    for _ in range(2):
        model.train_on_batch(*samples(4))
    flip = Flip(2, lambda model: model.layers[0].kernel)
    flip.set_model(model)
    flip.on_train_batch_end(1)
    with pytest.raises(keras_hpc.ReplicaMismatchError, match=r"after step 3:"):
        model.train_on_batch(*samples(4))


@enough_on("torch")
def test_healthy_training_goes_on(monkeypatch):
    from keras_hpc.keras_hooks.state import replicas

    compared = []
    compare = replicas.compare

    def watched(team, variables, values, when):
        compared.append((when, [v.path.rpartition("/")[2] for v in variables]))
        compare(team, variables, values, when)

    monkeypatch.setattr(replicas, "compare", watched)
    model = compiled()
    x, y = samples(28 * job().size)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y))
    whole = [names for when, names in compared if "step" in when]
    assert [when for when, _ in compared if "step" in when] == [f" after step {step}" for step in (3, 6, 9, 12)]
    for names in whole:
        assert {"kernel", "bias", "gamma", "beta", "iteration"} <= set(names)
        assert "moving_mean" not in names  # each rank's own, in the middle of an epoch


class Drifts(keras.callbacks.Callback):
    """Moves weights, on each rank elsewhere."""

    def on_epoch_end(self, epoch, logs=None):
        bias = self.model.layers[0].bias
        bias.assign(bias + float(job().rank))


@enough_on("torch")
def test_weights_that_ranks_move_apart_are_named_once(caplog):
    with caplog.at_level("WARNING", "keras_hpc"):
        compiled().fit(*samples(4 * job().size), batch_size=4, epochs=2, verbose=0, callbacks=[Drifts()])
    named = job().rank == 0 and job().size > 1
    assert caplog.text.count("replicas differ after epoch 1: variable") == named
