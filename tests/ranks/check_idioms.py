# SPDX-License-Identifier: Apache-2.0
"""What official guides and examples of Keras do, with no line changed: the same as one rank, on equal replicas."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, assert_identical, enough, enough_on, job, on_one_rank, values

import keras_hpc
from keras_hpc.keras_hooks import keras_private

SOAK = {"tensorflow": (2,), "jax": (2,)}
BACKEND = keras.backend.backend()
SAMPLES, BATCH = 60, 16  # the last step has 12
X = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
ops = keras.ops


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init(batch="global")
    yield
    keras_hpc.finalize()


def everyone(value):
    return job().teams[0].allgather_object(value)


def dense(*layers):
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), *layers, keras.layers.Dense(1)]
    )


def compare(make, x=X, y=Y, tolerance=3e-6):
    """Trains together and alone, on all data, and compares weights and history."""

    def trained():
        keras.utils.set_random_seed(5)
        model = make()
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        return values(model), history, model

    alone, alone_history = on_one_rank(lambda: trained()[:2])
    weights, history, model = trained()
    assert_identical(weights)
    assert_close(weights, alone, tolerance)
    assert history.keys() == alone_history.keys()
    for name, numbers in alone_history.items():
        np.testing.assert_allclose(history[name], numbers, rtol=1e-5, err_msg=name)
    return model


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


@pytest.mark.skipif(BACKEND == "jax", reason="its train_step hands states on")
def test_logs_of_the_guides_are_nested():
    def make():
        inputs = keras.Input((4,))
        model = Guide(inputs, dense()(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    model = compare(make)
    together = model.evaluate(X, Y, verbose=0, return_dict=True)
    alone = on_one_rank(lambda: model.evaluate(X, Y, verbose=0, return_dict=True))
    assert together.keys() == alone.keys() == {"loss", "mae"}
    for name, number in alone.items():
        np.testing.assert_allclose(together[name], number, rtol=1e-5, err_msg=name)


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
@pytest.mark.parametrize("optimizer", ["Adam", *enough(["RMSprop"], "torch")])
def test_a_gan_in_one_model(optimizer):
    def make():
        model = GAN()
        kind = getattr(keras.optimizers, optimizer)
        model.compile(kind(1e-3), kind(1e-3))
        return model

    model = compare(make, y=None, tolerance=2e-5)
    assert int(model.critic_optimizer.iterations) == 2 * int(model.generator_optimizer.iterations) == 16
    keras_hpc.check_replicas(model)


class Adds(keras.layers.Layer):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


@pytest.mark.parametrize(
    "kind", ["sum", "added sum", *enough(["mean", "vector", "added mean", "added vector"], "torch")]
)
def test_losses_that_are_sums_or_vectors(kind):
    losses = {
        "sum": lambda y, p: ops.sum(ops.square(y - p)),
        "mean": lambda y, p: ops.mean(ops.square(y - p)),
        "vector": lambda y, p: ops.square(y - p)[:, 0],
    }
    added = {
        "added sum": lambda x: 0.01 * ops.sum(ops.square(x)),
        "added mean": lambda x: 0.01 * ops.mean(ops.square(x)),
        "added vector": lambda x: 0.01 * ops.sum(ops.square(x), axis=1),
    }

    def make():
        model = dense(*([Adds(added[kind])] if kind in added else []))
        model.compile(keras.optimizers.SGD(1e-3), losses.get(kind, "mse"))
        return model

    compare(make)


def test_sums_of_a_model_whose_call_knows_no_training():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = dense(Adds(lambda x: 0.01 * ops.sum(ops.square(x))))

        def call(self, x):
            return self.inner(x)

    def make():
        model = Own()
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    compare(make)


class Endpoint(keras.layers.Layer):
    """Computes the loss itself, from targets that are among the inputs, as a sum over samples."""

    def call(self, x, targets):
        self.add_loss(0.01 * ops.sum(ops.square(x - targets)))
        return x


@enough_on("torch")
@pytest.mark.parametrize("named", [True, *enough([False], "torch")])
def test_targets_among_the_inputs(named):
    def make():
        x, y = keras.Input((4,), name="x"), keras.Input((1,), name="y")
        inputs = {"x": x, "y": y} if named else [x, y]
        model = keras.Model(inputs, Endpoint()(keras.layers.Dense(1)(x), y))
        model.compile(keras.optimizers.SGD(0.05))
        return model

    compare(make, x={"x": X, "y": Y} if named else [X, Y], y=None)


def test_a_loss_that_is_neither_is_refused():
    model = dense(Adds(lambda x: ops.logsumexp(x)))
    model.compile("sgd", "mse")
    if job().size > 1:
        with pytest.raises(ValueError, match="neither a mean nor a sum"):
            model.fit(X, Y, batch_size=BATCH, verbose=0)


class OwnStep(keras.Model):
    """A model with a loss and a `train_step` of its own."""

    def __init__(self, loss, *layers):
        inputs = keras.Input((4,))
        super().__init__(inputs, dense(*layers)(inputs))
        self.own_loss = loss

    if BACKEND == "jax":

        def train_step(self, state, data):
            import jax

            trainable, fixed, optimizer, metrics = state
            x, y = data

            def loss_of(trainable, fixed):
                predicted, fixed = self.stateless_call(trainable, fixed, x, training=True)
                return self.own_loss(y, predicted), fixed

            gradients, fixed = jax.grad(loss_of, has_aux=True)(trainable, fixed)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {"loss": ops.zeros(())}, (trainable, fixed, optimizer, metrics)

    else:

        def train_step(self, data):
            x, y = data
            if BACKEND == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.own_loss(y, self(x, training=True))
                self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            else:
                self.zero_grad()
                self.own_loss(y, self(x, training=True)).backward()
                self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
            return {"loss": ops.zeros(())}


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda y, p: ops.mean(ops.square(y - p)), id="mean"),
        pytest.param(keras.losses.MeanSquaredError(), id="keras mean", marks=enough_on("torch")),
        pytest.param(keras.losses.MeanSquaredError(reduction="sum"), id="keras sum"),
    ],
)
def test_a_step_of_ones_own(loss, caplog):
    def make():
        model = OwnStep(loss)
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    with caplog.at_level("INFO", "keras_hpc"):
        model = compare(make)
    assert "right if its loss is a mean" not in caplog.text
    keras_hpc.check_replicas(model)


class OwnLoss(keras.Model):
    """A model with a loss of its own and the step of Keras."""

    def __init__(self, loss):
        inputs = keras.Input((4,))
        super().__init__(inputs, dense()(inputs))
        self.own_loss = loss

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.own_loss(y, y_pred)


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_loss_that_the_model_computes(kind):
    def make():
        model = OwnLoss(lambda y, p: getattr(ops, kind)(ops.square(y - p)))
        model.compile(keras.optimizers.SGD(1e-3))
        return model

    if kind == "mean" or job().size == 1:
        compare(make)
    else:
        with pytest.raises(ValueError, match=r"compute_loss\(\)` are a sum over samples"):
            make().fit(X, Y, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize(
    ("loss", "layers", "what"),
    [
        (lambda y, p: ops.sum(ops.square(y - p)), [], "a sum over samples"),
        (lambda y, p: ops.sum(ops.square(y - p)), [keras.layers.GaussianNoise(0.3)], "a sum over samples"),
        (lambda y, p: ops.log(ops.sum(ops.square(y - p)) + 1), [], "neither a mean nor a sum"),
    ],
    ids=["sum", "noisy sum", "logarithm"],
)
def test_a_step_whose_gradients_ranks_may_not_average_is_refused(loss, layers, what):
    model = OwnStep(loss, *layers)
    model.compile(keras.optimizers.SGD(1e-3))
    before = values(model)
    if job().size == 1:
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        return
    with pytest.raises(ValueError, match=what):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    if BACKEND != "jax":  # where Keras holds the state of a model that trains outside of it
        assert_close(values(model), before, 0)


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value.value, ops.max(ops.cast(y_true, self.value.dtype))))

    def result(self):
        return ops.convert_to_tensor(self.value)


class MergedLargest(Largest):
    def merge_state(self, metrics):
        for metric in metrics:
            self.value.assign(ops.maximum(self.value.value, metric.value.value))


def test_a_metric_that_says_how_to_merge_is_right(caplog):
    model = dense()
    model.compile("sgd", "mse", metrics=[MergedLargest()])
    assert model.evaluate(X, Y, verbose=0, return_dict=True)["largest"] == pytest.approx(Y.max())
    assert "keeps a state of its own" not in caplog.text
    model.compile("sgd", "mse", metrics=[Largest("unknown")])
    with caplog.at_level("WARNING", "keras_hpc"):
        model.evaluate(X, Y, verbose=0)
    assert ("Largest `unknown` keeps a state of its own" in caplog.text) == (job().rank == 0 and job().size > 1)


@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
@enough_on("torch")
def test_aggregation_of_a_metrics_variable(aggregation):
    class Own(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="own")
            self.value = self.add_variable((), "zeros", aggregation=aggregation, name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(ops.zeros(()) + 1.0 + job().rank)

        def result(self):
            return ops.convert_to_tensor(self.value)

    model = dense()
    model.compile("sgd", "mse", metrics=[Own()])
    expected = (job().size + 1) / 2 if aggregation == "mean" else 1.0
    assert model.evaluate(X, Y, batch_size=SAMPLES, verbose=0, return_dict=True)["own"] == pytest.approx(expected)


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


def test_what_was_never_trained_is_the_roots():
    model = dense()
    model.compile("adam", "mse")
    model.set_weights([w + job().rank for w in model.get_weights()])
    losses = everyone(model.evaluate(X, Y, verbose=0))
    assert len(set(losses)) == 1
    assert_identical(values(model))


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


def test_a_loop_with_step_and_shard_is_exact():
    if BACKEND == "jax":
        pytest.skip("loops on JAX hand states on: check_loops")
    rows = {0: 5, 1: 9}.get(job().rank, 2)  # each rank has its own number of samples
    start = sum({0: 5, 1: 9}.get(rank, 2) for rank in range(job().rank))
    total = sum({0: 5, 1: 9}.get(rank, 2) for rank in range(job().size))

    def gradients(model, x, y):
        if BACKEND == "torch":
            model.zero_grad()
            ops.mean(ops.square(model(x) - y)).backward()
            return [v.value.grad for v in model.trainable_variables]
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(model(x) - y))
        return tape.gradient(loss, model.trainable_variables)

    def train(x, y, samples):
        keras.utils.set_random_seed(3)
        model, optimizer = dense(), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        for _ in range(3):
            with keras_hpc.step(samples=samples):
                own = gradients(model, ops.convert_to_tensor(x), ops.convert_to_tensor(y))
                if BACKEND == "torch":
                    own = [g.detach() for g in own]
                optimizer.apply(own, model.trainable_variables)
        return values(model)

    alone = on_one_rank(lambda: train(X[:total], Y[:total], total))
    together = train(X[start : start + rows], Y[start : start + rows], rows)
    assert_identical(together)
    assert_close(together, alone, 3e-6)


@pytest.mark.skipif(BACKEND != "torch", reason="optimizers of PyTorch")
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_optimizers_of_pytorch(kind):
    import torch

    def train(x, y):
        keras.utils.set_random_seed(3)
        model = dense()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            ops.mean(ops.square(model(x) - y)).backward()
            optimizer.step()
        return values(model)

    whole = X[: 10 * job().size], Y[: 10 * job().size]
    alone = on_one_rank(lambda: train(*map(torch.tensor, whole)))
    together = train(*map(torch.tensor, keras_hpc.shard(whole)))
    assert_identical(together)
    assert_close(together, alone, 3e-6)


@enough_on("torch")
def test_parts_of_a_loops_data_are_equally_long_and_different():
    whole = np.arange(11)
    parts = everyone(keras_hpc.shard(whole).tolist())
    assert {len(part) for part in parts} == {11 // job().size}
    assert len({number for part in parts for number in part}) == job().size * (11 // job().size)
    batches = everyone([batch for batch in keras_hpc.shard(iter(range(11)))])
    assert {len(part) for part in batches} == {11 // job().size}
    if keras_private.find("tensorflow:data") is not None and BACKEND == "tensorflow":
        import tensorflow as tf

        for data in (tf.data.Dataset.range(11), tf.data.Dataset.range(11).filter(lambda x: x >= 0)):
            taken = everyone([int(x) for x in keras_hpc.shard(data)])
            assert sorted(x for part in taken for x in part) == list(range(job().size * (11 // job().size)))


@enough_on("torch")
def test_a_layer_that_stays_local():
    keras.utils.set_random_seed(1)
    model = dense()
    keras_hpc.keep_local(model.layers[0])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.layers[0].set_weights([w + job().rank for w in model.layers[0].get_weights()])
    model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
    keras_hpc.check_replicas(model)
    kernels = everyone(np.array(model.layers[0].kernel).tolist())
    assert len({str(kernel) for kernel in kernels}) == job().size


@enough_on("torch")
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
