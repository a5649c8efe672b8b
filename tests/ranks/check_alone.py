# SPDX-License-Identifier: Apache-2.0
"""What a rank has alone, in attributes of Python or from a file, is that of all, or stays its own where it must."""

import keras
import numpy as np
import pytest
from keras_cases import assert_close, enough_on, everyone, job, on_one_rank
from regression import BATCH, X, Y, dense

import keras_hpc

SOAK = {"tensorflow": (2,), "jax": (2,)}
RANKS = {"torch": (2,)}
ops = keras.ops


@pytest.fixture(scope="module", autouse=True)
def _job():
    keras_hpc.init()
    yield
    keras_hpc.finalize()


class Listed(keras.metrics.Metric):
    """Keeps what it gets in a list, as those of other libraries do, and so trains by Python."""

    def __init__(self):
        super().__init__(name="listed")
        self.seen = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.append(ops.convert_to_numpy(y_true))

    def result(self):
        return float(np.max(np.concatenate(self.seen))) if self.seen else 0.0

    def reset_state(self):
        self.seen = []


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="compiles each metric")
@enough_on("torch")
def test_a_metric_that_counts_in_python_is_the_mean_over_ranks(caplog):
    model = dense()
    model.compile("sgd", "mse", metrics=[Listed()], run_eagerly=True)
    with caplog.at_level("WARNING", "keras_hpc"):
        logs = model.fit(X, Y, batch_size=BATCH, verbose=0, shuffle=False).history
    assert all(theirs == logs for theirs in everyone(logs))
    own = [float(model.metrics[-1].metrics[0].result())]
    assert logs["listed"] == [pytest.approx(np.mean(everyone(own)))]
    assert ("counts in attributes of Python" in caplog.text) == (job().rank == 0 and job().size > 1)


@enough_on("torch")
@pytest.mark.parametrize("how", ["predict", "fit", "broadcast"])
@pytest.mark.parametrize("others", [0.0, 1.0], ids=["statistics", "weights"])
def test_a_normalization_that_rank_0_loads_alone_is_that_of_all(how, others, tmp_path):
    def make():
        keras.utils.set_random_seed(8)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Normalization(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    model = make()
    if job().rank == 0:
        with keras_hpc.local():
            adapted = make()
            adapted.layers[0].adapt(3 * X + 2)
            adapted.layers[1].bias.assign([others])
            adapted.save_weights(tmp_path / "adapted.weights.h5")
            model.load_weights(tmp_path / "adapted.weights.h5")
            expected = adapted.predict(X, verbose=0)
    if how == "broadcast":
        keras_hpc.broadcast(model)
    if how == "fit":
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    model.predict(X, verbose=0)
    with keras_hpc.local():
        own = model.predict(X, verbose=0)
    assert_close([own], [keras_hpc.broadcast(expected if job().rank == 0 else own)], 1e-5)


@enough_on("torch")
def test_a_model_that_keeps_states_predicts_batch_after_batch():
    x = np.random.default_rng(1).normal(size=(32, 5, 2)).astype("float32")

    def predicted():
        keras.utils.set_random_seed(8)
        recurrent = keras.layers.SimpleRNN(3, stateful=True)
        model = keras.Sequential([keras.Input((5, 2), batch_size=8), recurrent, keras.layers.Dense(1)])
        return model.predict(x, batch_size=8, verbose=0)

    assert_close([predicted()], [on_one_rank(predicted)])


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="about modules of PyTorch")
def test_statistics_of_modules_of_pytorch_are_those_of_all():
    import torch

    class One(keras.utils.PyDataset):
        def __len__(self):
            return 1  # so other ranks than the first have no samples

        def __getitem__(self, index):
            return X, Y

    def trained():
        keras.utils.set_random_seed(8)
        norm = torch.nn.BatchNorm1d(4)
        model = keras.Sequential([keras.Input((4,)), keras.layers.TorchModuleWrapper(norm), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(One(), verbose=0)
        return model, norm.running_mean.numpy().copy()

    alone = on_one_rank(lambda: trained()[1])
    model, mean = trained()
    assert_close([mean], [alone / job().size])
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    keras_hpc.check_replicas(model)
    together = model.predict(X, verbose=0)
    with keras_hpc.local():
        assert_close([together], [model.predict(X, verbose=0)], 1e-5)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="about modules of PyTorch")
def test_statistics_of_a_module_that_is_local_stay_its_ranks():
    import torch

    norm = torch.nn.BatchNorm1d(4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.TorchModuleWrapper(norm), keras.layers.Dense(1)])
    keras_hpc.keep_local(model.layers[0])
    model.compile("sgd", "mse")
    with torch.no_grad():
        norm.running_mean.fill_(job().rank)
    keras_hpc.average_statistics(model)
    model.predict(X, verbose=0)
    assert_close([norm.running_mean.numpy()], [np.full(4, job().rank, np.float32)])
    keras_hpc.check_replicas(model)  # which are compared without it
