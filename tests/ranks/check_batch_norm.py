# SPDX-License-Identifier: Apache-2.0
"""`BatchNormalization(synchronized=True)`: N ranks compute what one rank computes on the whole batch."""

import keras
import numpy as np
import pytest
from keras_cases import BATCH, assert_like_one_rank, data, enough, enough_on, on_one_rank, values

import keras_hpc

RANKS = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
SOAK = {"tensorflow": (2,), "jax": (2,)}
TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(batch="global", check_replicas_every=4, teams=2)
    yield
    keras_hpc.finalize()


def norm(**options):
    return keras.layers.BatchNormalization(synchronized=True, momentum=0.7, **options)


def vectors():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8)(inputs)
    # Branches, whose reductions depend on no order.
    branches = [keras.layers.Activation("tanh")(norm()(keras.layers.Dense(5)(x))) for _ in range(2)]
    x = norm(scale=False)(keras.layers.Concatenate()(branches))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))


def images():
    layers = [keras.layers.Reshape((2, 3, 1)), keras.layers.Conv2D(4, 2), norm(), keras.layers.ReLU()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((6,)), *layers])


def sequences():
    layers = [keras.layers.Reshape((3, 2)), keras.layers.Masking(), norm(), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3, activation="softmax")])


def shared():
    """A layer that is used twice in a step, at the same time if the backend likes."""
    inputs, layer = keras.Input((6,)), norm()
    branches = [layer(keras.layers.Dense(4)(inputs)) for _ in range(2)]
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(keras.layers.Concatenate()(branches)))


def doubles():
    layers = [keras.layers.Dense(4), norm(dtype="float64"), keras.layers.Dense(3, activation="softmax")]
    return keras.Sequential([keras.Input((6,)), *layers])


def far_from_zero():
    """Numbers of which the variance would vanish in a difference of squares."""
    layers = [
        keras.layers.Rescaling(1.0, offset=30.0),
        norm(moving_mean_initializer=keras.initializers.Constant(30.0)),
    ]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3, activation="softmax")])


NETWORKS = [*enough([vectors], "tensorflow", "torch"), *enough([images, far_from_zero], "torch")]
NETWORKS += enough([sequences, shared])
if keras.backend.backend() != "jax":  # which has no float64 unless the whole program asks for it
    NETWORKS += enough([doubles], "torch")


@pytest.mark.parametrize("network", NETWORKS)
def test_like_one_rank(network):
    x, y = data()
    x = x.copy()
    x[::3, 2:4] = 0  # what is masked in the second place of sequences

    def make():
        keras.utils.set_random_seed(3)
        model = network()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def train(model, whole):
        # 8 steps an epoch; the last holds 17 samples, not as many for every rank.
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)).history
        return history["loss"], history["val_loss"]

    # On PyTorch, Keras itself takes a difference of squares.
    lossy = network is far_from_zero and keras.backend.backend() == "torch"
    assert_like_one_rank(make, train, 3e-4 if lossy else TOLERANCE)


def without_a_gradient_at_zero():
    """Of a sample that is zero, which stands for none, gradients are NaN."""
    inputs = keras.Input((6,))
    x = keras.layers.Reshape((6, 1))(inputs)
    y = keras.layers.Multiply()([norm()(keras.layers.Dense(3)(x)), x])
    y = keras.layers.Flatten()(keras.layers.UnitNormalization()(y))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(y))


@enough_on("jax", "torch")
@pytest.mark.parametrize("network", [images, *enough([without_a_gradient_at_zero], "torch")])
def test_a_rank_without_samples_keeps_up(network):
    x, y = data(samples=BATCH + 1)  # a sample for one rank in the second step

    def make():
        keras.utils.set_random_seed(3)
        model = network()
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    def train(model, whole):
        return model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]

    # Of a dense layer below a normalization the gradient is the rest of numbers that nearly cancel.
    assert_like_one_rank(make, train, TOLERANCE if network is images else 3e-5)


@enough_on("tensorflow", "torch")
def test_statistics_of_layers_that_are_not_synchronized_are_the_mean_of_the_ranks_own():
    """A rank without samples in a step keeps its own for that step; none differs where anybody looks at them."""
    x, y = data(samples=BATCH + 1)
    layer = keras.layers.BatchNormalization(momentum=0.7)
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, validation_data=(x, y))
    size, means = keras_hpc.size(), []
    for rank in range(size):
        mean = np.zeros(6, "float32")
        for batch in (x[:BATCH], x[BATCH:]):
            rows = batch[-(-len(batch) * rank // size) : -(-len(batch) * (rank + 1) // size)]
            mean = 0.7 * mean + 0.3 * rows.mean(axis=0) if len(rows) else mean
        means.append(mean)
    assert np.abs(means[0] - means[-1]).max() > 0.1
    np.testing.assert_allclose(np.array(layer.moving_mean), np.mean(means, axis=0), rtol=1e-5, atol=1e-6)
    keras_hpc.check_replicas(model)


@enough_on("torch")
def test_moments_of_a_pipelined_team_are_of_this_step():
    x, y = data()
    keras.utils.set_random_seed(3)
    model = images()
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
    before = values(model)
    keras_hpc.assign_team(model, 1)
    keras_hpc.configure_team(1, schedule="pipelined")
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)

    def alone():
        other = images()
        other.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
        other.set_weights(before)
        other.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        return values(other)

    for ours, theirs in zip(values(model), on_one_rank(alone), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@enough_on("jax", "torch")
def test_gradient_through_the_moments():
    """The loss of one rank reaches the inputs of the others."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, use_bias=False), norm(), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    rng = np.random.default_rng(5)
    weights = [rng.normal(size=v.shape).astype("float32") for v in model.get_weights()]
    weights[-3] = np.abs(weights[-3])  # the moving variance
    x = rng.normal(size=(12, 2)).astype("float32") + 2
    y = rng.normal(size=(12, 1)).astype("float32")
    model.set_weights(weights)

    def one_step():
        model.train_on_batch(x, y)
        return values(model)

    alone = on_one_rank(one_step)
    model.set_weights(weights)
    mine = np.array_split(np.arange(12), keras_hpc.size())[keras_hpc.rank()]
    model.train_on_batch(x[mine], y[mine])
    for ours, theirs in zip(values(model), alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_local_and_inference_need_no_other_rank():
    model = images()
    if keras_hpc.rank() == 0:
        with keras_hpc.local():
            model(np.ones((4, 6), "float32"), training=True)
        model(np.ones((4, 6), "float32"), training=False)
    keras_hpc.barrier()
