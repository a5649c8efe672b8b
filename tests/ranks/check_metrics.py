# SPDX-License-Identifier: Apache-2.0
"""Metrics of the user's own: merged as they say it, exact where their state is sums, named where it is not."""

import keras
import pytest
from keras_cases import enough_on, everyone, job, on_one_rank
from regression import BATCH, SAMPLES, X, Y, compare, dense

import keras_hpc

SOAK = {"tensorflow": (2,), "jax": (2,)}
RANKS = {"torch": (3,)}
ops = keras.ops
pytestmark = pytest.mark.usefixtures("global_batches")


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


class OfOthers(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="of_others")
        self.mean = keras.metrics.MeanAbsoluteError()

    def update_state(self, *batch, **weights):
        self.mean.update_state(*batch, **weights)

    def result(self):
        return 2 * self.mean.result()


def test_a_metric_that_says_how_to_merge_is_right(caplog):
    model = dense()
    model.compile("sgd", "mse", metrics=[MergedLargest(), OfOthers()])
    assert model.evaluate(X, Y, verbose=0, return_dict=True)["largest"] == pytest.approx(Y.max())
    assert "The metric" not in caplog.text


class Shares(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="shares")
        self.counts = self.add_weight(shape=(3,), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        true, said = (ops.cast(y > 0, "float32") for y in (y_true, y_pred))
        self.counts.assign_add(ops.stack([ops.sum(true * said), ops.sum(true), ops.sum(said)]))

    def result(self):
        right, true, said = ops.unstack(ops.convert_to_tensor(self.counts))
        return {"recall": right / ops.maximum(true, 1), "precision": right / ops.maximum(said, 1)}


class Evaluating(keras.callbacks.Callback):
    """Evaluates as an epoch begins, amid it, and after its last batch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            self.model.evaluate(X[:10], Y[:10], verbose=0)

    def on_train_batch_end(self, batch, logs=None):
        if batch in (1, 3):
            self.model.evaluate(X[:10], Y[:10], verbose=0)


@pytest.mark.parametrize("callbacks", [[], [Evaluating()]], ids=["fit", "evaluating"])
@enough_on("torch")
def test_a_metric_of_several_values(callbacks):
    if callbacks and keras.backend.backend() == "jax" and hasattr(keras.Model, "_clear_jax_state_sharding"):
        pytest.skip("Keras before 3.12 cannot evaluate amid an epoch of fit on JAX")

    def make():
        model = dense()
        model.compile("sgd", "mse", metrics=[Shares(), "mae"])
        return model

    compare(make, callbacks=callbacks)


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


class OfMean(keras.metrics.Metric):
    """A mean of what `numbers` gives for a batch."""

    def __init__(self):
        super().__init__(name=type(self).__name__)
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(self.numbers(y_true, y_pred))

    def result(self):
        return self.mean.result()


class OfSamples(OfMean):
    def numbers(self, y_true, y_pred):
        return ops.mean(abs(y_true - y_pred), axis=-1)


class OfBatches(OfMean):
    def numbers(self, y_true, y_pred):
        return ops.mean(abs(y_true - y_pred))


class RootOfMean(OfMean):
    def numbers(self, y_true, y_pred):
        return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


class Discrepancy(OfMean):
    """The distance between two distributions, by a kernel (Gretton et al. 2012)."""

    def numbers(self, y_true, y_pred):
        def kernel(x, y):
            return ops.mean((ops.matmul(x, ops.transpose(y)) + 1) ** 3)

        return kernel(y_true, y_true) + kernel(y_pred, y_pred) - 2 * kernel(y_true, y_pred)


class OfCrossentropy(OfMean):
    """A mean of a loss, which does not accept all made-up samples."""

    def numbers(self, y_true, y_pred):
        return keras.losses.BinaryCrossentropy(reduction=None)(ops.cast(y_true > 0, y_pred.dtype), y_pred)


class Determination(keras.metrics.Metric):
    """A ratio of differences of sums, which it assigns."""

    def __init__(self):
        super().__init__(name="determination")
        self.sums = self.add_weight(shape=(4,), initializer="zeros", name="sums")

    def update_state(self, y_true, y_pred, sample_weight=None):
        count = ops.ones_like(y_true)
        sums = [ops.sum(value) for value in (count, y_true, y_true**2, (y_true - y_pred) ** 2)]
        self.sums.assign(self.sums + ops.stack(sums))

    def result(self):
        count, total, squares, errors = ops.unstack(ops.convert_to_tensor(self.sums))
        return 1 - errors / (squares - total**2 / count)


class AsksAll(Determination):
    """Takes the largest value of all ranks, which must then not be asked by one of them alone."""

    def result(self):
        return keras_hpc.allreduce(super().result(), op="max")


class CountsBatches(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="CountsBatches")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.batches = self.add_weight(initializer="zeros", name="batches")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.mean(abs(y_true - y_pred)))
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / self.batches


class MergesOthers(OfSamples):
    """Merges the states of the metrics that it holds."""

    def merge_state(self, metrics):
        for metric in metrics:
            self.mean.total.assign_add(metric.mean.total)
            self.mean.count.assign_add(metric.mean.count)


class Forgets(MergesOthers):
    """Merges nothing."""

    def merge_state(self, metrics):
        pass


EXACT = OfSamples, OfBatches, OfCrossentropy, Determination, MergesOthers, OfOthers, Shares, MergedLargest
NAMED = RootOfMean, Discrepancy, CountsBatches, Forgets, Largest


@pytest.mark.parametrize("metric", EXACT)
def test_a_metric_of_sums_is_exact_and_not_named(metric, caplog):
    def make():
        model = dense()
        model.compile("sgd", "mse", metrics=[metric()])
        return model

    with caplog.at_level("WARNING", "keras_hpc"):
        compare(make)
    assert f"The metric {metric.__name__} " not in caplog.text


def test_a_metric_of_numbers_of_batches_is_named_once(caplog):
    model = dense()
    before = [value for variable in model.variables for value in ops.convert_to_numpy(variable).ravel()]
    metrics = [metric() for metric in NAMED]
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics)
    with caplog.at_level("WARNING", "keras_hpc"):
        model.fit(X, Y, verbose=0)
        model.fit(X, Y, verbose=0)
        model.evaluate(X, Y, verbose=0)
    for metric in metrics:
        name = f"The metric {type(metric).__name__} `{metric.name}` does not say of the samples of all ranks"
        assert everyone(caplog.text.count(name)) == [int(rank == 0 and job().size > 1) for rank in range(job().size)]
    assert before == [value for variable in model.variables for value in ops.convert_to_numpy(variable).ravel()]


def test_a_metric_that_asks_all_ranks_is_not_tried_by_one():
    def evaluated(metric):
        keras.utils.set_random_seed(5)
        model = dense()
        model.compile("sgd", "mse", metrics=[metric()])
        return model.evaluate(X, Y, verbose=0, return_dict=True)["determination"]

    assert evaluated(AsksAll) == evaluated(Determination)


class TestedDiscrepancy(Discrepancy):
    __test__ = False


class OfTwoModels(keras.Model):
    """Tells a metric in its `test_step` alone how far two distributions are apart, as generative models do."""

    def __init__(self):
        super().__init__()
        self.layer, self.distance = keras.layers.Dense(1), TestedDiscrepancy()

    def call(self, x):
        return self.layer(x)

    def test_step(self, *arguments):
        x, y = arguments[-1]
        if keras.backend.backend() != "jax":
            self.distance.update_state(y, self(x))
            return {"distance": self.distance.result()}
        trainable, others, metrics = arguments[0]
        predicted, others = self.stateless_call(trainable, others, x)
        own = self.distance.stateless_update_state(metrics[-len(self.distance.variables) :], y, predicted)
        metrics = [*metrics[: -len(own)], *own]
        return {"distance": self.distance.stateless_result(own)}, (trainable, others, metrics)


@enough_on("torch")
def test_a_metric_of_a_test_step_of_ones_own_is_named(caplog):
    model = OfTwoModels()
    model(X[:1])
    model.compile()
    with caplog.at_level("WARNING", "keras_hpc"):
        model.evaluate(X, Y, verbose=0)
    assert ("The metric TestedDiscrepancy" in caplog.text) == (job().rank == 0 and job().size > 1)


class OwnTest(keras.Model):
    """Gives the metrics of its `test_step` alone numbers of a batch: a mean, a sum, a mean to add up, and a root."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(2)
        self.square, self.root = keras.metrics.Mean("square"), keras.metrics.Mean("root")
        self.sum, self.squares = keras.metrics.Mean("sum"), keras.metrics.Sum("squares")

    def call(self, x):
        return self.layer(x)

    def numbers(self, y, predicted):
        square = ops.mean(ops.square(y - predicted))
        given = {"square": square, "sum": ops.sum(abs(y)), "squares": square, "root": ops.sqrt(square)}
        return [(getattr(self, name), number) for name, number in given.items()]

    def test_step(self, *arguments):
        x, y = arguments[-1]
        if keras.backend.backend() != "jax":
            for metric, number in self.numbers(y, self(x)):
                metric.update_state(number)
            return {metric.name: metric.result() for metric in self.metrics}
        trainable, fixed, metrics = arguments[0]
        numbers = {
            id(metric): number for metric, number in self.numbers(y, self.stateless_call(trainable, fixed, x)[0])
        }
        logs, moved, left = {}, [], list(metrics)
        for metric in self.metrics:
            own = [left.pop(0) for _ in metric.variables]
            if id(metric) in numbers:
                own = metric.stateless_update_state(own, numbers[id(metric)])
                logs[metric.name] = metric.stateless_result(own)
            moved += own
        return logs, (trainable, fixed, moved)


@enough_on("torch", "jax")
def test_metrics_of_a_test_step_are_exact_or_named(caplog):
    def evaluated():
        keras.utils.set_random_seed(5)
        model = OwnTest()
        model(X[:1])
        model.compile()
        return model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)

    alone = on_one_rank(evaluated)
    with caplog.at_level("WARNING", "keras_hpc"):
        logs = evaluated()
    for name in ("square", "sum", "squares"):
        assert logs[name] == pytest.approx(alone[name], rel=1e-5)
        assert f"`{name}`" not in caplog.text
    assert ("`OwnTest.test_step()`" in caplog.text) == (job().rank == 0 and job().size > 1)
    assert ("Received: `root`" in caplog.text) == (job().rank == 0 and job().size > 1)
