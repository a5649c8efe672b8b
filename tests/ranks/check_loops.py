# SPDX-License-Identifier: Apache-2.0
"""Training steps and loops of the user's own: every optimizer passes the funnel."""

import keras
import numpy as np
import pytest
from keras_cases import (
    Parts,
    assert_close,
    assert_identical,
    assert_like_one_rank,
    data,
    enough,
    job,
    on_one_rank,
    part,
    values,
)

import keras_hpc

SOAK = {"tensorflow": (2,)}

BACKEND = keras.backend.backend()
tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="needs TensorFlow")
jax_only = pytest.mark.skipif(BACKEND != "jax", reason="needs JAX")
eager_or_tensorflow = pytest.mark.skipif(BACKEND == "jax", reason="steps of JAX have no state")


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(shard=False)
    yield
    keras_hpc.finalize()


# Custom train steps.


class TwoOptimizers(keras.Model):
    """A model without `call` whose step updates two networks in turn, as a GAN's does."""

    def __init__(self, optimizer=lambda: keras.optimizers.SGD(0.1)):
        super().__init__()
        self.built = True  # or PyTorch's trainer would call it
        keras.utils.set_random_seed(12)
        self.first = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh")])
        self.second = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        self.first_optimizer, self.second_optimizer = optimizer(), optimizer()
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, batch):
        (x, y) = batch
        for network, optimizer in ((self.first, self.first_optimizer), (self.second, self.second_optimizer)):
            variables = network.trainable_variables
            loss, gradients = gradients_of(
                lambda: keras.ops.mean((self.second(self.first(x)) - y[:, None]) ** 2), variables
            )
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.tracker.update_state(loss, sample_weight=keras.ops.shape(x)[0])
        return {"loss": self.tracker.result(), "twice": 2 * loss}


def gradients_of(loss, variables):
    """Returns the value and the gradients of `loss()`, as users of TensorFlow and PyTorch compute them."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, variables)
    for variable in variables:
        variable.value.grad = None
    value = loss()
    value.backward()
    return value.detach(), [variable.value.grad for variable in variables]


def regression():
    x, y = data()
    return x, y.astype("float32")


def step_model(**kwargs):
    model = TwoOptimizers()
    model.compile(**kwargs)
    return model


@eager_or_tensorflow
@pytest.mark.parametrize("eager", [False, *enough([True])] if BACKEND == "tensorflow" else [False])
def test_custom_step_with_two_optimizers(eager):
    def train(model, whole):
        return model.fit(Parts(*regression(), whole=whole), epochs=2, shuffle=False, verbose=0).history["loss"]

    assert_like_one_rank(lambda: step_model(run_eagerly=eager), train)


@eager_or_tensorflow
def test_custom_logs_are_averaged():
    model = step_model()
    history = model.fit(Parts(*regression()), epochs=2, shuffle=False, verbose=0).history
    everyone = job().teams[0].allgather_object(history)
    assert all(theirs == everyone[0] for theirs in everyone)
    assert set(history) == {"loss", "twice"}


if BACKEND == "jax":
    import jax

    class JaxSteps(keras.Model):
        """The same for JAX: both gradients come from the old state, so their reductions are independent."""

        def __init__(self):
            super().__init__()
            keras.utils.set_random_seed(12)
            self.first = keras.layers.Dense(5, activation="tanh")
            self.second = keras.layers.Dense(1)
            self.other = keras.optimizers.SGD(0.3)

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, state, batch):
            trainable, fixed, (mine, others), metrics = state[0], state[1], self._split(state[2]), state[3]
            x, y = batch

            def loss(weights):
                out, updates = self.stateless_call(weights, fixed, x)
                return keras.ops.mean((out - y[:, None]) ** 2), updates

            (value, fixed), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
            first, mine = self.optimizer.stateless_apply(mine, gradients[:2], trainable[:2])
            second, others = self.other.stateless_apply(others, gradients[2:], trainable[2:])
            return {"value": value}, ([*first, *second], fixed, [*mine, *others], metrics)

        def _split(self, variables):
            count = len(self.optimizer.variables)
            return variables[:count], variables[count:]


@jax_only
def test_custom_jax_step_with_two_independent_optimizers():
    x, y = regression()

    def run(whole):
        model = JaxSteps()
        model(np.zeros((1, 6), "float32"))
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        model.optimizer.build(model.trainable_variables[:2])
        model.other.build(model.trainable_variables[2:])
        step = model.train_step
        from keras_hpc.keras_hooks import step as steps

        if not whole:
            step = steps.wrap(model, "train", steps.Mode(True, True, False, 1), step)
        step = jax.jit(step)
        optimizers = [v.value for v in (*model.optimizer.variables, *model.other.variables)]
        state = [v.value for v in model.trainable_variables], [], optimizers, []
        for index in range(16):
            _, state = step(state, (part(x, index % 8, whole), part(y, index % 8, whole)))
        return [np.array(v) for v in state[0]]

    expected = on_one_rank(lambda: run(True))
    received = run(False)
    assert_identical(received)
    assert_close(received, expected)


# Loops of the user's own: plain means, as nothing tells the batch size.


def test_gradients_of_numpy():
    # float64, which JAX takes for float32: a mean of eight bytes for each of its four would be written past its end.
    gradients = [np.full(shape, 1.0 + job().rank) for shape in ((1000,), (3, 2))]
    variables = [keras.Variable(np.zeros(gradient.shape, "float32")) for gradient in gradients]
    optimizer = keras.optimizers.SGD(1.0)
    for _ in range(3):
        optimizer.apply(gradients, variables)
    for variable in variables:
        expected = np.full(variable.shape, -3 * (1 + job().size) / 2)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), expected)


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's sparse gradients")
def test_sparse_gradients_of_jax():
    from jax.experimental import sparse

    rows = np.array([[job().rank], [5]])  # the last one on all ranks
    gradient = sparse.BCOO((np.ones((2, 3), np.float32), rows), shape=(6, 3))
    variable = keras.Variable(np.zeros((6, 3), "float32"))
    keras.optimizers.SGD(1.0).apply([gradient], [variable])
    expected = np.zeros((6, 3))
    expected[: job().size] = -1 / job().size
    expected[5] = -1
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, rtol=1e-6)


def even(array, step, whole):
    return part(array[:144], step % 6, whole)  # 24 samples divide among 1, 2, 3 and 4 ranks


@eager_or_tensorflow
@pytest.mark.parametrize("traced", [True, *enough([False])] if BACKEND == "tensorflow" else [False])
def test_loop(traced):
    x, y = regression()

    def run(whole):
        keras.utils.set_random_seed(2 if whole or job().rank == 0 else 3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01)

        def step(inputs, targets):
            variables = model.trainable_variables
            _, gradients = gradients_of(lambda: keras.ops.mean((model(inputs)[:, 0] - targets) ** 2), variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        if traced:
            import tensorflow as tf

            step = tf.function(step)
        elif not whole:
            keras_hpc.broadcast(model)  # an eager step computes gradients before any optimizer can intervene
        for index in range(12):
            step(*(keras.ops.convert_to_tensor(even(a, index, whole)) for a in (x, y)))
        return values(model)

    expected = on_one_rank(lambda: run(True))
    received = run(False)
    assert_identical(received)
    assert_close(received, expected, 1e-5)


def jax_loop(seed, whole):
    x, y = regression()
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @jax.jit
    def step(state, inputs, targets):
        def loss(weights):
            return keras.ops.mean((model.stateless_call(weights, [], inputs)[0][:, 0] - targets) ** 2)

        return optimizer.stateless_apply(state[1], jax.grad(loss)(state[0]), state[0])

    state = [v.value for v in model.trainable_variables], [v.value for v in optimizer.variables]
    for index in range(12):
        state = step(state, even(x, index, whole), even(y, index, whole))
    return [np.array(v) for v in state[0]]


@jax_only
def test_jax_loop():
    expected = on_one_rank(lambda: jax_loop(2, True))
    received = jax_loop(2, False)
    assert_identical(received)
    assert_close(received, expected, 1e-5)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="which makes them equal when it traces")
def test_loop_with_other_weights_is_refused():
    if job().size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(ValueError, match=r"kernel.*differs between rank 0"):
        (jax_loop if BACKEND == "jax" else torch_step)(job().rank, False)


def torch_step(seed, whole):
    x, y = (keras.ops.convert_to_tensor(even(a, 0, whole)) for a in regression())
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    _, gradients = gradients_of(lambda: keras.ops.mean((model(x)[:, 0] - y) ** 2), model.trainable_variables)
    keras.optimizers.SGD(0.1).apply(gradients, model.trainable_variables)
