# SPDX-License-Identifier: Apache-2.0
"""What official guides and examples of Keras do, with no line changed: the same as one rank, on equal replicas."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, assert_identical, enough, enough_on, everyone, job, on_one_rank, values
from regression import BATCH, SAMPLES, X, Y, compare, dense

import keras_hpc
from keras_hpc.keras_hooks import keras_private

SOAK = {"tensorflow": (2,), "jax": (2,), "torch": (2,)}
BACKEND = keras.backend.backend()
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


class Guide(keras.Model):
    """A model with the `train_step` of a guide: it updates and returns `self.metrics`, those of `compile` nested."""

    def logs(self, x, y, predicted, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        return self.logs(x, y, predicted, self.compute_loss(y=y, y_pred=predicted))

    if BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predicted)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.logs(x, y, predicted, loss)

    elif BACKEND == "torch":

        def train_step(self, data):
            import torch

            x, y = data
            self.zero_grad()
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return self.logs(x, y, predicted, loss)


@enough_on("torch")
@pytest.mark.skipif(BACKEND == "jax", reason="its train_step hands states on")
def test_logs_of_the_guides_are_nested():
    def make():
        inputs = keras.Input((4,))
        model = Guide(inputs, dense()(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    model = compare(make)

    def evaluate():
        return keras.tree.map_structure(float, model.evaluate(X, Y, verbose=0, return_dict=True))

    together, alone = evaluate(), on_one_rank(evaluate)
    keras.tree.assert_same_structure(together, alone)  # flat, but nested in Keras 3.10
    np.testing.assert_allclose(keras.tree.flatten(together), keras.tree.flatten(alone), rtol=1e-5)


class GAN(keras.Model):
    """Two networks and two optimizers in one model, which Keras cannot build without a step."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(4)])
        # TensorFlow builds in the first step what is not built; PyTorch's trainer wants it built before.
        shape = [] if BACKEND == "tensorflow" else [keras.Input((4,))]
        self.critic = keras.Sequential([*shape, keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
        self.tracker = keras.metrics.Mean(name="critic_loss")
        self.built = BACKEND == "torch"  # as the guides do there

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

    @property
    def metrics(self):
        return [self.tracker]

    def losses_of(self, real):
        fake = self.generator(real)
        return ops.mean(ops.square(self.critic(real) - 1)) + ops.mean(ops.square(self.critic(fake)))

    def generator_loss(self, real):
        return ops.mean(ops.square(self.critic(self.generator(real)) - 1))

    def train_step(self, real):
        real = real[0] if isinstance(real, (list, tuple)) else real
        for _ in range(2):  # several steps of the critic
            loss = self.update(lambda: self.losses_of(real), self.critic, self.critic_optimizer)
        self.update(lambda: self.generator_loss(real), self.generator, self.generator_optimizer)
        self.tracker.update_state(loss, sample_weight=ops.shape(real)[0])
        return {"critic_loss": self.tracker.result()}

    def update(self, loss_of, network, optimizer):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_of()
            gradients = tape.gradient(loss, network.trainable_weights)
            optimizer.apply_gradients(zip(gradients, network.trainable_weights, strict=True))
            return loss
        import torch

        self.zero_grad()
        loss = loss_of()
        loss.backward()
        gradients = [v.value.grad for v in network.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, network.trainable_weights)
        return loss.detach()


@pytest.mark.skipif(BACKEND == "jax", reason="its trainer knows one optimizer")
@pytest.mark.parametrize("optimizer", [*enough(["Adam"], "torch"), *enough(["RMSprop"])])
def test_a_gan_in_one_model(optimizer):
    def make():
        model = GAN()
        kind = getattr(keras.optimizers, optimizer)
        model.compile(kind(1e-3), kind(1e-3))
        return model

    model = compare(make, y=None, tolerance=2e-5)
    assert int(model.critic_optimizer.iterations) == 2 * int(model.generator_optimizer.iterations) == 16
    keras_hpc.check_replicas(model)


class Shuffled(keras.utils.PyDataset):
    """Draws a new order after each epoch, as tutorials do, from generators without a seed."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(SAMPLES)
        np.random.shuffle(self.order)
        self.seen = []

    def __len__(self):
        return 15

    def on_epoch_end(self):
        np.random.shuffle(self.order)

    def __getitem__(self, index):
        np.random.random(1 + job().rank)  # each rank draws as often as it likes
        rows = self.order[4 * index : 4 * index + 4]
        self.seen.extend(rows.tolist())
        return X[rows], Y[rows]


@enough_on("torch")
def test_data_that_shuffle_themselves_are_read_once_an_epoch():
    data = Shuffled()
    model = dense()
    model.compile(keras.optimizers.SGD(0.01), "mse")

    class Epoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            orders.append(data.order.tolist())

    orders = []
    model.fit(data, epochs=3, verbose=0, callbacks=[Epoch()])
    assert len({str(order) for order in orders}) == 3
    assert all(theirs == orders for theirs in everyone(orders))


def test_predict_and_evaluate_of_each_ranks_own_rows():
    model = dense()
    model.compile("sgd", "mse")
    mine = X[job().rank :: 7][: 5 + job().rank]
    predicted = model.predict(mine, verbose=0)
    loss = model.evaluate(mine, np.zeros((len(mine), 1)), verbose=0)
    with keras_hpc.local():
        np.testing.assert_allclose(predicted, model.predict(mine, verbose=0), rtol=1e-5)
    assert loss == pytest.approx(float(np.mean(predicted**2)), rel=1e-4)


def test_what_was_never_trained_is_the_roots(caplog):
    model = dense()
    model.compile("adam", "mse")
    model.set_weights([w + job().rank for w in model.get_weights()])
    losses = everyone(model.evaluate(X, Y, verbose=0))
    assert len(set(losses)) == 1
    assert_identical(values(model))
    # A loop by hand or with optax, whose gradients nobody averages, would end like this.
    assert ("weights differ between ranks" in caplog.text) == (job().rank == 0 and job().size > 1)


@enough_on("torch")
def test_a_model_that_its_first_batch_has_built_takes_others():
    def make():
        model = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.evaluate(X, Y, batch_size=BATCH, verbose=0)
        return model

    compare(make)


def test_a_model_of_one_batch_size_takes_no_parts_of_batches():
    inputs = keras.Input((4,), batch_size=BATCH)
    outputs = keras.layers.Lambda(lambda x: ops.reshape(x, (BATCH, 2, 2))[:, 0, :1])(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile("sgd", "mse")
    if job().size > 1:
        with pytest.raises(ValueError, match="batches of one size only"):
            model.fit(X[:48], Y[:48], batch_size=BATCH, verbose=0)


@enough_on("torch")
def test_weights_that_rank_0_loads_alone_reach_all(tmp_path):
    model = dense()
    model.compile("adam", "mse")
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    best = [w + 1 for w in model.get_weights()]
    if job().rank == 0:
        with keras_hpc.local():
            model.set_weights(best)
            model.save_weights(tmp_path / "best.weights.h5")
            model.load_weights(tmp_path / "best.weights.h5")
    keras_hpc.broadcast(model)
    model.evaluate(X, Y, verbose=0)
    assert_identical(values(model))
    assert_close(values(model), everyone([w.tolist() for w in model.get_weights()])[0], 0)


@enough_on()
def test_models_of_a_search_leave_nothing_behind():
    team = job().teams[0]

    def used():
        model = dense()
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        return len(team._plans)

    import gc

    counts = []
    for _ in range(5):
        counts.append(used())
        keras.backend.clear_session()
        gc.collect()
    assert counts[-1] <= counts[1]


@pytest.mark.skipif(BACKEND != "jax", reason="steps of JAX hand their state on")
def test_state_is_fetched_from_steps_as_often_as_by_keras(monkeypatch):
    trainer = keras_private.backend_trainer()
    original, fetched = trainer.jax_state_sync, []

    def counting(self):
        if getattr(self, "_jax_state", None) and not self._jax_state_synced:
            fetched.append(1)
        return original(self)

    monkeypatch.setattr(trainer, "jax_state_sync", counting)

    class Quiet(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    def train():
        fetched.clear()
        model = dense()
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[Quiet()])
        return len(fetched)

    assert on_one_rank(train) == train()
